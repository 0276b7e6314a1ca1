"""Which profile a recipe takes: ``cpu`` (embedded nano policy, minutes) or ``gpu`` (public checkpoint, full defaults).

The choice happens while Hydra composes, through the resolver ``${vla3_profile:}`` in the recipes' defaults lists, so
that ``--cfg job`` shows what will run and every ordinary override still wins over the profile's values.
"""

import os
import sys
from typing import Any

PROFILES = ("cpu", "gpu")
ENGINE = "VLA3_MODEL_ENGINE"


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def requested_profile(argv: list[str] | None = None) -> str:
    """``auto``, ``cpu`` or ``gpu``: the command line's ``vla3.profile=``, else ``VLA3_PROFILE``, else ``auto``."""
    return _given("vla3.profile", argv) or os.environ.get("VLA3_PROFILE", "auto")


def engine_choice(argv: list[str] | None = None) -> str:
    """verl's ``model_engine``, which a recipe cannot see while Hydra composes it: whose keys our configs set.

    The command line's ``model_engine=``, else ``VLA3_MODEL_ENGINE`` (for programs that compose), else verl's ``dp``.
    """
    return _given("model_engine", argv) or os.environ.get(ENGINE, "dp")


def _given(key: str, argv: list[str] | None) -> str | None:
    for argument in reversed(sys.argv[1:] if argv is None else argv):
        if argument.lstrip("+").startswith(f"{key}="):
            return argument.split("=", 1)[1].strip("'\"")
    return None


def resolve_profile() -> str:
    """The profile of this run.

    Raises:
        ValueError: the requested one is neither ``auto`` nor one of ``PROFILES``.
    """
    requested = requested_profile()
    if requested == "auto":
        return "gpu" if has_gpu() else "cpu"
    if requested not in PROFILES:
        raise ValueError(f"vla3.profile is {requested!r}, expected one of auto, {', '.join(PROFILES)}")
    return requested


def joins_a_cluster(address: str | None = None) -> bool:
    """Whether Ray will connect to a cluster that stands already, instead of starting one.

    ``address``: ``ray_kwargs.ray_init.address``; where there is none the environment's counts.
    """
    return (address or os.environ.get("RAY_ADDRESS") or "local") != "local"


def policy_choice(published: str) -> str:
    """Of a family's configs (``configs/policy/FAMILY``): ``nano`` on a CPU, else the ``published`` settings."""
    return "nano" if resolve_profile() == "cpu" else published


def streamed_statistics(num_mini_batches: Any, given: str = "batch") -> str:
    """What advantages are normalised by where they stream in: the mini-batch's own, where waiting for it leaves any of
    the batch to stream; the former batch's, where it does not or where those are ``given``."""
    several = isinstance(num_mini_batches, int) and num_mini_batches > 1  # what is no number is refused elsewhere
    return "mini_batch" if several and given != "previous" else "previous"


def register_resolvers() -> None:
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("vla3_profile", resolve_profile, replace=True)
    OmegaConf.register_new_resolver("vla3_statistics", streamed_statistics, replace=True)
    OmegaConf.register_new_resolver("vla3_engine", engine_choice, replace=True)
    OmegaConf.register_new_resolver("vla3_policy", policy_choice, replace=True)
    OmegaConf.register_new_resolver("vla3_device", lambda: "cuda" if has_gpu() else "cpu", replace=True)
