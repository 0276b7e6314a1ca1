"""Will it fit? Memory that a run needs, role by role, against what this machine has left.

An estimate made before anything heavy starts. Weights, gradients and optimizer states are exact; activations follow a
published formula; simulators and processes are measured figures (Python 3.11, Debian 12, software rendering).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

MB, GB = 10**6, 10**9
DTYPE_BYTES = {"float64": 8, "float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}
PROCESS_BYTES = 600 * MB  # a Python process with torch and ray imported
ADAM_STATES = 2  # exp_avg and exp_avg_sq
_OPTIMIZER_STATES = {"adamw": ADAM_STATES, "adam": ADAM_STATES, "sgd": 0}


@dataclass(frozen=True)
class EnvCost:
    """Measured resident bytes of a simulator process: with its first environment, and for each further one."""

    process: int
    further: int


ENV_COSTS = {
    "libero": EnvCost(2000 * MB, 900 * MB),
    "maniskill": EnvCost(800 * MB, 4 * MB),
    "latency": EnvCost(50 * MB, 1 * MB),
}
# A simulator this table does not know (a third party's) is counted as the dearer of the two; the part says so, and on a
# guess no run is refused.
_UNKNOWN_ENV = ENV_COSTS["libero"]


@dataclass(frozen=True)
class Tower:
    """One transformer stack of a policy, for its activations: ``tokens`` is the sequence length of one sample."""

    layers: int
    hidden: int
    heads: int
    tokens: int


class MemoryFitError(RuntimeError):
    """The run does not fit into memory."""


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; accepts ``torch.bfloat16`` and ``bfloat16`` alike."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ValueError(f"dtype: {dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def activation_bytes(towers: Sequence[Tower], batch: int, dtype: str = "float32", checkpointing: bool = False) -> int:
    """Activations kept for backward, in bytes.

    Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models, eq. 1 to 4): at 16 bit a
    layer keeps s·b·h·(34 + 5·a·s/h) bytes, s tokens, b samples, h width, a heads; scaled here to the dtype. With
    checkpointing only the layers' inputs stay (s·b·h elements each) and one layer at a time is whole.
    """
    size, total = dtype_bytes(dtype), 0.0
    for t in towers:
        layer = t.tokens * batch * t.hidden * (34 + 5 * t.heads * t.tokens / t.hidden) * size / 2
        kept = t.layers * t.tokens * batch * t.hidden * size + layer if checkpointing else t.layers * layer
        total += kept
    return int(total)


def estimate(
    *,
    parameters: int,
    trainable: int | None = None,
    dtype: str = "float32",
    optimizer: str = "adamw",
    actor_workers: int = 1,
    policy_workers: int = 1,
    reference: bool = False,
    evaluation_copy: bool = False,
    through_vllm: bool = False,
    shards: int | None = None,
    state_shards: int | None = None,
    micro_batch: int = 1,
    policy_batch: int = 1,
    towers: Sequence[Tower] = (),
    checkpointing: bool = False,
    env: str = "maniskill",
    env_workers: int = 0,
    env_actors: int | None = None,
    env_processes: int = 1,
    slots_per_process: int = 1,
    other_processes: int = 3,
    stored_samples: int = 0,
    sample_bytes: int = 0,
    device: Literal["cpu", "cuda"] = "cpu",
) -> dict[str, Any]:
    """Bytes per role and in all.

    Args:
        parameters, trainable: of the policy; trainable is all of them unless given (LoRA, frozen backbone).
        dtype: of forward and backward; master weights, gradients and AdamW states are float32 as verl's FSDP has them.
        actor_workers, policy_workers: learner ranks and inference replicas (each whole).
        shards, state_shards: how many learner ranks share one copy of weights and gradients, and one of Adam's states:
            all unless given, ``fsdp_size`` in cells, with megatron 1 and (with its distributed optimizer) all.
        reference: a frozen copy of the policy in each learner rank's shard.
        evaluation_copy: each inference replica keeps the version that is being evaluated as well.
        through_vllm: inference replicas keep weights and what arrives in host memory, and sample with vLLM's copy.
        micro_batch, policy_batch: samples of one backward on one rank, and of one inference batch.
        towers: transformer stacks of the policy; none means that activations are not counted, and the part says so.
        env_workers, env_processes, slots_per_process: as in ``vla3.env``; env_actors: how many of the env workers have
            a process of their own, all unless given.
        other_processes: driver, trainer, storage units.
        stored_samples, sample_bytes: samples the store holds at once, and the size of one.
        device: where actor and policy workers keep tensors. Simulators and processes stay in host memory.

    Returns:
        ``{"parts": {name: {"bytes", "where", "how"}}, "host", "device", "total"}``; ``where`` is ``host`` or
        ``device``; ``how`` is the arithmetic in words. ``device`` is the sum over all accelerators.
    """
    trainable = parameters if trainable is None else trainable
    counts = dict(parameters=parameters, actor_workers=actor_workers, policy_workers=policy_workers)
    counts |= dict(micro_batch=micro_batch, policy_batch=policy_batch, env_processes=env_processes)
    for name, value in {**counts, "slots_per_process": slots_per_process}.items():
        if value < 1:
            raise ValueError(f"{name}: {value}, expected at least 1")
    if not 0 <= trainable <= parameters:
        raise ValueError(f"trainable: {trainable}, expected 0 to parameters={parameters}")
    if optimizer.lower() not in _OPTIMIZER_STATES:
        raise ValueError(f"optimizer: {optimizer!r}, expected one of {', '.join(_OPTIMIZER_STATES)}")
    size, states = dtype_bytes(dtype), _OPTIMIZER_STATES[optimizer.lower()]
    tensors = "device" if device == "cuda" else "host"
    served = "host" if through_vllm else tensors
    whole, learnt = f"{parameters / 1e6:,.1f}M parameters", f"{trainable / 1e6:,.1f}M trainable"
    shards = actor_workers if shards is None else shards
    held, all_states = actor_workers // shards, actor_workers // (shards if state_shards is None else state_shards)
    times, times_states = (f" in {copies} copies" if copies > 1 else "" for copies in (held, all_states))
    rows: list[tuple[str, int, str, str]] = [
        ("actor weights", 4 * parameters * held, tensors, f"{whole} x 4 B (float32 master){times}"),
        ("actor gradients", 4 * trainable * held, tensors, f"{learnt} x 4 B{times}"),
        (
            f"{optimizer} states",
            4 * states * trainable * all_states,
            tensors,
            f"{learnt} x {states} x 4 B{times_states}",
        ),
        ("reference weights", size * parameters * reference * held, tensors, f"{whole} x {size} B{times}"),
        ("policy weights", size * parameters * policy_workers, served, f"{policy_workers} x {whole} x {size} B"),
        ("policy receive buffer", size * parameters * policy_workers, served, "a version arrives while one serves"),
        (
            "vllm",
            size * parameters * policy_workers * through_vllm,
            tensors,
            "its weights; what else it takes not counted",
        ),
    ]
    if evaluation_copy:
        how = "the version that is evaluated while newer ones serve"
        rows.append(("policy evaluation copy", size * parameters * policy_workers, tensors, how))
    if shards > 1 or size < 4:
        how = f"{whole} x {size} B at most, on each of {actor_workers} rank(s)"
        rows.append(("actor gathered layers", size * parameters * actor_workers, tensors, how))
    if towers:
        backward = actor_workers * activation_bytes(towers, micro_batch, dtype, checkpointing)
        how = f"{actor_workers} rank(s), micro-batch {micro_batch}" + (", checkpointed" if checkpointing else "")
        rows.append(("actor activations", backward, tensors, how))
        # Without gradients one layer is alive at a time.
        forward = max(activation_bytes([replace(t, layers=1)], policy_batch, dtype) for t in towers)
        rows.append(("policy activations", policy_workers * forward, tensors, f"one layer, batch {policy_batch}"))

    cost = ENV_COSTS.get(env, _UNKNOWN_ENV)
    processes = env_workers * env_processes
    each = cost.process + (slots_per_process - 1) * cost.further
    basis = "measured" if env in ENV_COSTS else f"{env} is not in the table, counted as libero"
    how = f"{processes} process(es) of {slots_per_process} slot(s) x {each / GB:.2f} GB, {basis}"
    python = actor_workers + policy_workers + (env_workers if env_actors is None else env_actors) + other_processes
    rows += [
        ("simulators", processes * each, "host", how),
        ("processes", python * PROCESS_BYTES, "host", f"{python} Python processes x {PROCESS_BYTES / GB:.1f} GB"),
        ("sample store", stored_samples * sample_bytes, "host", f"{stored_samples} samples x {sample_bytes} B"),
    ]
    parts: dict[str, dict[str, Any]] = {
        name: {"bytes": amount, "where": where, "how": how} for name, amount, where, how in rows if amount > 0
    }
    if "simulators" in parts and env not in ENV_COSTS:
        parts["simulators"]["guessed"] = True
    if not towers:
        parts["actor activations"] = {"bytes": 0, "where": tensors, "how": "not counted: the policy gives no towers"}
    sums = {side: sum(p["bytes"] for p in parts.values() if p["where"] == side) for side in ("host", "device")}
    return {"parts": parts, **sums, "total": sums["host"] + sums["device"]}


def format_estimate(result: Mapping[str, Any]) -> str:
    """The parts of ``estimate`` as lines, largest first, and their sum."""
    parts = sorted(result["parts"].items(), key=lambda item: -item[1]["bytes"])
    width = max(len(name) for name, _ in parts)
    lines = [f"{n:<{width}}  {p['bytes'] / GB:8.2f} GB  {p['where']:<6}  {p['how']}" for n, p in parts]
    return "\n".join([*lines, f"{'total':<{width}}  {result['total'] / GB:8.2f} GB"])


def check_fit(
    result: Mapping[str, Any], available: int, source: str = "", where: str = "host", margin: float = 0.85
) -> str | None:
    """Compare one side of ``estimate`` (``host``, or ``device``: all accelerators together) with what is free there.

    A guess at a simulator's size may warn; only what is known refuses.

    Returns:
        None where at most ``margin`` of it is needed, else a warning.

    Raises:
        MemoryFitError: it does not fit; the message holds the arithmetic and what to lower.
    """
    need = result[where]
    sum_text = f"{where} memory: about {need / GB:.2f} GB needed, {available / GB:.2f} GB free"
    sum_text += f" ({source})" if source else ""
    if need <= margin * available:
        return None
    if need <= available:
        return f"{sum_text}: it fits with little to spare"
    guessed = sum(p["bytes"] for p in result["parts"].values() if p["where"] == where and p.get("guessed"))
    if need - guessed <= available:
        how = result["parts"]["simulators"]["how"]
        return f"{sum_text}: it may not fit, if the guess of {guessed / GB:.2f} GB for simulators is right ({how})"
    levers = "vla3.env.shards_per_worker or vla3.env.workers" if where == "host" else "the micro-batch"
    raise MemoryFitError(
        f"{sum_text}: it does not fit. Where it goes:\n{format_estimate(result)}\nLower {levers}, or the policy's size."
    )


# ---------------------------------------------------------------- what the machine has


@dataclass(frozen=True)
class AvailableMemory:
    bytes: int
    source: str  # "machine", or the control group that limits further


def available_memory(root: Path | str = "/") -> AvailableMemory:
    """Memory that new processes can still take: the machine's, or less where a control group (container, Slurm job)
    limits it. ``root`` is where /proc and /sys stand (tests use another)."""
    import psutil

    machine = AvailableMemory(int(psutil.virtual_memory().available), "machine")
    limits = [machine, *cgroup_headroom(Path(root))]
    return min(limits, key=lambda limit: limit.bytes)


def available_device_memory() -> AvailableMemory | None:
    """Free memory of all CUDA devices that this process sees, together; None where it sees none."""
    import torch

    if not torch.cuda.is_available():
        return None
    free = [torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count())]
    return AvailableMemory(sum(free), f"{len(free)} device(s)")


def cgroup_headroom(root: Path) -> list[AvailableMemory]:
    """Limit minus use of this process's control group and of each group above it, both hierarchies (v1, v2).

    Page cache that the kernel can take back (inactive_file) counts as free, as in ``MemAvailable``.
    """
    groups = root / "proc/self/cgroup"
    if not groups.exists():
        return []
    found = []
    for line in groups.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # A container sees its own group as the mount's root, whatever path the host knows it by: try each level.
        level = Path(path.lstrip("/"))
        for folder in [mount / level, *(mount / parent for parent in level.parents)]:
            headroom = _headroom(folder, *names)
            if headroom is not None:
                found.append(AvailableMemory(headroom, f"control group {'/' + str(folder.relative_to(root))}"))
    return found


def _headroom(folder: Path, limit_file: str, usage_file: str, cache_key: str) -> int | None:
    """Bytes left in one control group; None where it sets no limit or is not visible."""
    try:
        limit = (folder / limit_file).read_text().strip()
        usage = int((folder / usage_file).read_text())
        stat = dict(line.split()[:2] for line in (folder / "memory.stat").read_text().splitlines() if " " in line)
    except OSError:
        return None
    if limit == "max" or int(limit) >= 2**60:  # v1 says "none" with a number near 2**63
        return None
    return max(0, int(limit) - usage + int(stat.get(cache_key, 0)))
