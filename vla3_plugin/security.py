"""What keeps a run to itself: its own Ray cluster on loopback with a token, no secrets in configs, one place to write.

The trust model is in ``docs/security.md``.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_SECRET_NAME = re.compile(
    r"(^|[_.-])(token|secret|passw(or)?d|api_?key|access_?key|private_?key|credentials?)$", re.IGNORECASE
)
_TEXT_TOKEN = re.compile(r"(^|_)(bos|eos|pad|unk|sep|cls|mask|image|video|audio|text)_token$", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|sk-[\w-]{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[\w-]{10,})|[a-z][a-z0-9+.-]*://[^/\s:@]+:[^/\s@]+@"
)
_SHORTEST = 8  # characters of an environment variable's value that could be a secret
# Keys of the config that name a place to write to; whatever else a run writes is below vla3.run_dir already.
WRITE_KEYS = (
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "ray_kwargs.timeline_json_file",
)


# ---------------------------------------------------------------- secrets


def _is_secret_name(key: str) -> bool:
    name = key.rsplit(".", 1)[-1]
    return bool(_SECRET_NAME.search(name)) and not _TEXT_TOKEN.search(name)


def _environment_secrets() -> set[str]:
    return {v for k, v in os.environ.items() if _is_secret_name(k) and len(v) >= _SHORTEST}


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, (list, tuple)):
        for i, value in enumerate(node):
            yield from _leaves(value, f"{key}.{i}")
    else:
        yield key, node


def exposed_secrets(config: Mapping[str, Any]) -> list[str]:
    """Faults: keys of a (resolved, plain) config that hold what looks like a secret, or an environment secret's value.

    verl prints the config, it is stored beside the run and goes to the loggers. No fault repeats the value.
    """
    known = _environment_secrets()
    faults = []
    for key, value in _leaves(config):
        if not isinstance(value, str) or not value:
            continue
        if _is_secret_name(key) or _SECRET_VALUE.search(value) or any(secret in value for secret in known):
            faults.append(
                f"{key}: its value looks like a secret, and a config is printed, stored and sent to loggers; set an "
                "environment variable before the start instead, every process of the run inherits it"
            )
    return faults


def exposed_in_arguments(arguments: Sequence[str]) -> list[str]:
    """The same for Hydra overrides (``key=value``), before Hydra prints or stores them."""
    pairs = (argument.partition("=") for argument in arguments)
    return exposed_secrets({key.lstrip("+~"): value for key, _, value in pairs})


# ---------------------------------------------------------------- places to write


def outside(run_dir: str | Path, path: str | Path) -> bool:
    """Whether ``path`` lies outside ``run_dir``; lexical, so that a link the user put inside may lead elsewhere."""
    root, place = os.path.abspath(run_dir), os.path.abspath(path)
    return os.path.commonpath([root, place]) != root


def stray_paths(config: Mapping[str, Any], run_dir: str) -> list[str]:
    """Faults: names and places in a (resolved, plain) config that would make the run write outside ``run_dir``."""
    faults = []
    trainer = config.get("trainer", {})
    for key in ("experiment_name", "project_name"):
        name = str(trainer.get(key) or "")
        if "/" in name or "\\" in name or name in (".", ".."):
            faults.append(f"trainer.{key}: {name!r}, expected a name, not a path; vla3.run_dir says where to write")
    for key in WRITE_KEYS:
        node: Any = config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        if isinstance(node, str) and node and outside(run_dir, node):
            faults.append(
                f"{key}: {node!r} is outside vla3.run_dir = {run_dir!r}, and a run writes only there; choose a place "
                "inside, or set vla3.run_dir"
            )
    return faults


# ---------------------------------------------------------------- the cluster that a run starts


def secure_local_cluster() -> None:
    """Set this process up so that the Ray cluster it starts listens on loopback and asks for a token of its own.

    Ray's processes and TransferQueue's sockets bind to the node's address, and Ray turns a loopback address that it is
    given into the machine's own, unless it is told that no other machine joins. ``RAY_AUTH_MODE`` set by the user is
    left alone, and so are socket interfaces that are set.
    """
    _bind_to_loopback()
    if os.environ.get("RAY_AUTH_MODE"):
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.pop("RAY_AUTH_TOKEN", None)  # would win over the file; the token is this cluster's alone
    os.environ["RAY_AUTH_TOKEN_PATH"] = os.fspath(_fresh_token())
    # verl has imported ray already, and ray reads its configuration once, at import
    import ray

    ray._raylet.Config.initialize("")  # type: ignore[attr-defined]
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]


def _bind_to_loopback() -> None:
    from ray._private import ray_constants

    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # off elsewhere by default, despite its name
    ray_constants.ENABLE_RAY_CLUSTER = False
    if os.path.isdir("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _fresh_token() -> Path:
    """A new token in a file that its user alone can read (0600, folder 0700); gone when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="vla3-ray-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path
