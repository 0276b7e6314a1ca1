"""The profile: what ``vla3 profile`` measured, as a JSON file that ``vla3 plan`` reads; and an assumed one of the same
form, for hardware that nobody has here. It names versions and hardware, never hosts, users or paths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from vla3_plugin.envs.latency_draw import Duration
from vla3_plugin.placement.simulate_model import EnvTimes, HostCosts
from vla3_plugin.policies.latency import LatencySettings

FORMAT = 1


@dataclass(frozen=True)
class PolicyProfile:
    """Times in ms: a prefix and a denoising step, each a base and a part per row (a token policy has a prefix alone);
    forward and backward of a micro-batch likewise. ``points`` are what was measured, ``residual`` the largest relative
    distance of a point from its line. ``publish_ms``: packing, checking and loading a version on one machine.
    """

    family: str
    parameters: int
    trainable: int
    denoising_steps: int
    prefix_ms: tuple[float, float]
    step_ms: tuple[float, float]
    train_ms: tuple[float, float]
    forward_share: float
    publish_ms: float
    sample_bytes: int
    dtype: str = "float32"
    memory_gb: float = 0.0  # of a replica, measured or assumed; 0: not known
    activation_gb: float = 0.0  # of a micro-batch's sample, kept for backward; 0: not known
    points: dict[str, list[list[float]]] = field(default_factory=dict)
    residual: dict[str, float] = field(default_factory=dict)

    @property
    def settings(self) -> LatencySettings:
        """Its times, as the simulation wants them."""
        return LatencySettings(
            denoising_steps=self.denoising_steps, prefix_ms_base=self.prefix_ms[0],
            prefix_ms_per_sample=self.prefix_ms[1], step_ms_base=self.step_ms[0], step_ms_per_sample=self.step_ms[1],
            train_ms_base=self.train_ms[0], train_ms_per_sample=self.train_ms[1], forward_share=self.forward_share,
        )  # fmt: skip


@dataclass(frozen=True)
class EnvProfile:
    """A simulator. ``chunk_ms``: sorted durations of a chunk step of one environment in one process; ``per_env_ms``:
    what each further environment in the process adds. ``cpu_ms``: processor time of a chunk step of one environment,
    which limits how many run at once on the cores of a node. ``gpu``: it runs on an accelerator beside the policy.
    """

    name: str
    chunk_ms: tuple[float, ...]
    per_env_ms: float
    reset_ms: float
    cpu_ms: float
    mean_chunks: float
    memory_gb: float = 1.0  # of a process with one environment
    memory_per_env_gb: float = 0.0
    gpu: bool = False
    points: dict[str, list[list[float]]] = field(default_factory=dict)

    def times(self, slots: int, processes: float, cores: float) -> EnvTimes:
        """As the simulation wants them, where ``processes`` of ``slots`` environments share ``cores``: as soon as they
        ask for more processor time than there is, all become slower together."""
        mean = sum(self.chunk_ms) / len(self.chunk_ms) + self.per_env_ms * (slots - 1)
        wanted = processes * slots * self.cpu_ms / mean if mean else 0.0
        slower = max(1.0, wanted / cores) if cores else 1.0
        chunks = max(1, round(self.mean_chunks))
        base = tuple(slower * max(0.0, ms - self.per_env_ms) for ms in self.chunk_ms)
        return EnvTimes(
            chunk_ms=Duration(base[len(base) // 2], samples_ms=base),
            per="shard", per_env_ms=slower * self.per_env_ms, reset_ms=Duration(slower * self.reset_ms),
            low=chunks, high=chunks, success=0.0,
        )  # fmt: skip


@dataclass(frozen=True)
class Hardware:
    """A node. Bandwidths in GB/s, one direction, per GPU: ``within`` a node and ``between`` nodes."""

    device: str
    memory_gb: float  # of an accelerator; of the machine where there is none
    cores: int  # of a node
    host_memory_gb: float
    within_gb_s: float = 0.0
    between_gb_s: float = 0.0


@dataclass(frozen=True)
class Profile:
    policy: PolicyProfile
    env: EnvProfile
    hardware: Hardware
    host: HostCosts = field(default_factory=HostCosts)
    versions: dict[str, str] = field(default_factory=dict)
    micro_batch: int = 8
    group_size: int = 1
    epochs: int = 1
    mini_batches: int = 1
    advantage_statistics: str = "batch"  # as the recipe has it, like the next two
    normalize_advantages: bool = True
    adv_type: str | None = None  # gae or grpo; None: gae where a group is one episode
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("micro_batch", "group_size", "epochs", "mini_batches"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: {value!r}, expected a whole number from 1 up")
        choices = {"advantage_statistics": ("batch", "mini_batch", "previous"), "adv_type": (None, "gae", "grpo")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                expected = ", ".join(str(choice) for choice in known if choice)
                raise ValueError(f"{name}: {getattr(self, name)!r}, expected one of {expected}")

    @property
    def critic(self) -> bool:
        """Whether the advantages are GAE's."""
        return self.adv_type == "gae" if self.adv_type else self.group_size == 1

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    def but(self, **changes: Any) -> Profile:
        return replace(self, **changes)


def read_profile(path: Path | str) -> Profile:
    """
    Raises:
        ValueError: no profile, of another format, or a field missing or unknown; names the file and the field.
    """
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"profile {path}: not readable ({error}); make one with vla3 profile") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"profile {path}: format {found!r}, expected {FORMAT}; make it anew with vla3 profile")
    data.pop("format")
    parts: dict[str, Any] = {"policy": PolicyProfile, "env": EnvProfile, "hardware": Hardware, "host": HostCosts}
    for name, kind in parts.items():
        data[name] = _typed(kind, data.get(name), f"profile {path}: {name}")
    return _typed(Profile, data, f"profile {path}")


def _typed(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: {data!r}, expected a mapping")
    known = {f.name: f for f in fields(kind)}
    if unknown := sorted(set(data) - set(known)):
        raise ValueError(f"{where}.{unknown[0]}: unknown; known: {', '.join(known)}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {str(error).split(') ')[-1]}") from None
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None
