"""Finding simulators by name, from the entry-point group ``vla3.envs``; nothing is imported here."""

from __future__ import annotations

import difflib
import importlib.util
import os
from importlib.metadata import entry_points
from typing import Any, Optional

from vla3_plugin.envs.inline import InlineEnv
from vla3_plugin.envs.process import EnvProcess
from vla3_plugin.envs.rendering import ASSIGNED, child_environment

GROUP = "vla3.envs"
BUILT_IN = {
    "latency": "vla3_plugin.envs.latency:LatencyEnv",
    "libero": "vla3_plugin.envs.libero:LiberoEnv",
    "maniskill": "vla3_plugin.envs.maniskill:ManiSkillEnv",
}
_NEEDS = {"libero": "libero", "maniskill": "mani_skill"}  # the module that the extra of the same name installs


def env_names() -> list[str]:
    """The simulators that can be named in ``vla3.env.name``, built-in and third-party."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def env_target(name: str) -> str:
    """'module:Class' of a simulator; a name of that form stands for itself.

    Raises:
        ValueError: no such simulator; the message lists the known ones.
    """
    if ":" in name:
        return name
    found = {**{entry.name: entry.value for entry in entry_points(group=GROUP)}, **BUILT_IN}
    if name not in found:
        near = difflib.get_close_matches(name, found, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"vla3.env.name: {name!r} is not a simulator{hint}; known: {', '.join(sorted(found))}")
    return found[name]


def env_fault(name: str, python: Optional[str]) -> Optional[str]:
    """Why the simulator cannot start, as far as that shows without starting it; None if nothing speaks against it."""
    try:
        env_target(name)
    except ValueError as error:
        return str(error)
    if python is None and name in _NEEDS and importlib.util.find_spec(_NEEDS[name]) is None:
        return f"vla3.env.name: {name!r} needs the module {_NEEDS[name]}: pip install 'vla3-plugin[{name}]'"
    return None


def make_env(env: str, options: dict[str, Any], **settings: Any) -> EnvProcess:
    """The named simulator in a process of its own; ``settings`` go to ``EnvProcess``."""
    if chosen := _assigned(env, options):
        settings["environ"] = {**chosen, **(settings.get("environ") or {})}
    return EnvProcess(env_target(env), options, **settings)


def make_inline_env(env: str, options: dict[str, Any], **settings: Any) -> InlineEnv:
    """The named simulator in this process, which draws on its device from now on; ``settings`` go to ``InlineEnv``."""
    os.environ.update(_assigned(env, options))
    return InlineEnv(env_target(env), options, **settings)


def _assigned(env: str, options: dict[str, Any]) -> dict[str, str]:
    """Variables that say which device to draw on; none where no placement chose one."""
    if os.environ.get(ASSIGNED) is None:
        return {}
    software = options.get("render_backend") == "osmesa"
    return child_environment(os.environ, draws_with_egl=env == "libero" and not software)
