"""The ``verl.plugins`` entry point: verl imports this module at the end of its own import, in every process.

It must stay light (no simulator, no transformers, under 100 ms) and it must be loud: verl swallows a plugin's
exception at DEBUG level, so a failure here is printed before it is raised again.
"""

import sys
import traceback

LOAD_ERROR: str | None = None  # read by `vla3 doctor`


def _load() -> None:
    from vla3_plugin import hooks

    hooks.serve_module("verl.trainer.main", "vla3_plugin.launch")
    hooks.apply_patches()
    hooks.after_import("verl.trainer.ppo.v1", "vla3_plugin.trainer.trainer")
    hooks.after_import("verl.workers.engine", "vla3_plugin.learner.engine_fsdp")
    hooks.after_import("verl.workers.engine", "vla3_plugin.learner.engine_megatron")
    hooks.after_import("verl.trainer.ppo.core_algos", "vla3_plugin.trainer.registration")
    hooks.after_import("transfer_queue", "vla3_plugin.rollout.store_nodes")
    from vla3_plugin.learner import platform_cpu

    platform_cpu.register()


try:
    _load()
except Exception:
    LOAD_ERROR = traceback.format_exc()
    print(
        f"vla3-plugin could not be loaded and verl will run without it:\n{LOAD_ERROR}"
        "Run `vla3 doctor` for the versions it expects, or set VERL_USE_EXTERNAL_PLUGINS=none to silence this.",
        file=sys.stderr,
    )
    raise
