"""``vla3 profile``: how long a policy and a simulator take on this hardware. No Ray, no learner engine: each by itself.

Lines are least squares on relative distances with no negative part, and the profile says how far the points lie off.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from vla3_plugin.contract import Episode, Observation
from vla3_plugin.placement.profile_file import EnvProfile, Hardware, PolicyProfile, Profile

_PACKAGES = ("vla3-plugin", "verl", "torch", "transformers", "ray", "numpy")


def fit(columns: Sequence[Sequence[float]], ms: Sequence[float]) -> tuple[list[float], float]:
    """Coefficients, none negative, of ``ms`` over ``columns`` [points][unknowns], and the largest relative residual.

    Points weigh by their relative distance, so that small batches count as much as large ones. With so few unknowns all
    choices of which are zero can be tried.
    """
    a, y = np.array(columns, float), np.array(ms, float)
    weight = 1.0 / np.maximum(y, 1e-9)
    best: tuple[float, np.ndarray] | None = None
    for kept in itertools.chain.from_iterable(
        itertools.combinations(range(a.shape[1]), size) for size in range(1, a.shape[1] + 1)
    ):
        solved = np.linalg.lstsq(a[:, kept] * weight[:, None], y * weight, rcond=None)[0]
        if (solved < 0).any():
            continue
        x = np.zeros(a.shape[1])
        x[list(kept)] = solved
        distance = float((((a @ x - y) * weight) ** 2).sum())
        if best is None or distance < best[0] - 1e-12:
            best = (distance, x)
    x = best[1] if best is not None else np.zeros(a.shape[1])
    return [float(v) for v in x], float(np.max(np.abs(a @ x - y) * weight))


def median_ms(function: Callable[[], Any], seconds: float, least: int = 3, most: int = 50) -> float:
    """Median duration of ``function`` after one call that warms up, over about ``seconds``."""
    function()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < least or (time.perf_counter() < end and len(taken) < most):
        start = time.perf_counter()
        function()
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken)


# ---------------------------------------------------------------- the policy


def measure_policy(
    policy: Any,
    observation: Observation,
    batches: Sequence[int],
    micro_batches: Sequence[int],
    seconds: float = 0.5,
    threads: tuple[int, int] = (1, 1),
) -> PolicyProfile:
    """Inference, training and publication of a loaded policy, ``seconds`` a point. ``threads``: of the policy worker
    and of the learner, where they compute on a CPU; this process is left with the latter.

    Raises:
        ValueError: fewer than two batch sizes: there is no line through one point; a policy that vLLM samples.
    """
    import torch

    from vla3_plugin.policies.serve import ServedPolicy

    for name, sizes in (("batches", batches), ("micro_batches", micro_batches)):
        if len(set(sizes)) < 2:
            raise ValueError(f"{name}: {list(sizes)}, expected at least two different sizes")
    if getattr(getattr(policy, "policy", None), "rollout_backend", "in_process") == "vllm":
        raise ValueError(
            "policy.rollout_backend: 'vllm', which is not measured; set policy.rollout_backend: in_process"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    served = ServedPolicy(policy, device)
    torch.set_num_threads(threads[0])

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def rows(size: int) -> tuple[dict[str, np.ndarray], list[tuple[int, int, int]]]:
        prepared = policy.prepare([observation] * size)
        return {k: v.numpy() for k, v in prepared.items()}, [(0, i, 0) for i in range(size)]

    points: dict[str, list[list[float]]] = {}
    shares = served.shares_steps
    points["prefix"], points["step"] = [], []
    for size in batches:
        inputs, keys = rows(size)

        def whole(inputs: Any = inputs, keys: Any = keys) -> None:
            served.act(inputs, keys, "train")
            wait()

        if not shares:
            points["prefix"].append([size, median_ms(whole, seconds)])
            continue

        def prefix(inputs: Any = inputs, keys: Any = keys) -> Any:
            chains = served.begin(inputs, keys, "train")
            wait()
            return chains

        points["prefix"].append([size, median_ms(prefix, seconds)])
        points["step"].append([size, _step_ms(served, prefix, wait, seconds)])
        points.setdefault("whole", []).append([size, median_ms(whole, seconds)])
    steps = policy.num_denoising_steps if shares else 1
    residual: dict[str, float] = {}
    lines: dict[str, tuple[float, float]] = {"step": (0.0, 0.0)}
    for name in ("prefix", "step") if shares else ("prefix",):
        (base, row), residual[name] = fit([[1.0, p[0]] for p in points[name]], [p[1] for p in points[name]])
        lines[name] = (base, row)
    if shares:  # what the parts say of the whole
        said = [sum(lines[n][0] + lines[n][1] * p[0] for n in ("prefix", *["step"] * steps)) for p in points["whole"]]
        residual["whole"] = max(abs(s - p[1]) / p[1] for s, p in zip(said, points["whole"], strict=True))
    memory_gb = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0  # before training adds its own
    inputs, keys = rows(max(micro_batches))
    answer = served.act(inputs, keys, "train")
    stored = inputs | {name: value for name, value in answer.items() if name != "actions"}
    sample_bytes = sum(value.nbytes for value in stored.values()) // len(keys)
    torch.set_num_threads(threads[1])
    points["train"], points["forward"] = _training(policy, inputs, answer, micro_batches, seconds, wait)
    (base, row), residual["train"] = fit([[1.0, p[0]] for p in points["train"]], [p[1] for p in points["train"]])
    share = statistics.median(f[1] / t[1] for f, t in zip(points["forward"], points["train"], strict=True))
    parameters = list(policy.parameters())
    return PolicyProfile(
        family=policy.family,
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        denoising_steps=steps,
        prefix_ms=lines["prefix"],
        step_ms=lines["step"],
        train_ms=(base, row),
        forward_share=min(1.0, share),
        publish_ms=_publication(policy, seconds),
        sample_bytes=int(sample_bytes),
        dtype=str(parameters[0].dtype).removeprefix("torch."),
        memory_gb=memory_gb,
        points=points,
        residual={name: round(value, 4) for name, value in residual.items()},
    )


def _step_ms(served: Any, begin: Callable[[], Any], wait: Callable[[], None], seconds: float) -> float:
    """Median of one denoising step; the last of a chain, which also computes densities, is among them."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 8 or time.perf_counter() < end:
        chains = begin()
        while not bool(chains.complete.any()):
            start = time.perf_counter()
            served.denoise(chains)
            wait()
            taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken)


def _training(
    policy: Any, inputs: Any, answer: Any, sizes: Sequence[int], seconds: float, wait: Callable[[], None]
) -> tuple[list[list[float]], list[list[float]]]:
    """Forward and backward, and forward alone, of each micro-batch size, in ms."""
    import torch

    device = next(policy.parameters()).device
    trace = {name: value for name, value in answer.items() if name.startswith("trace.")}
    tensors = {name: torch.from_numpy(np.array(value)).to(device) for name, value in (inputs | trace).items()}

    def loss(size: int) -> Any:
        output = policy({name: value[:size] for name, value in tensors.items()}, task="evaluate")
        return output["logprob"].mean() + output["value"].mean()

    def train(size: int) -> None:
        loss(size).backward()
        for parameter in policy.parameters():
            parameter.grad = None
        wait()

    def forward(size: int) -> None:
        with torch.no_grad():
            loss(size)
        wait()

    policy.train()
    try:
        return (
            [[size, median_ms(lambda size=size: train(size), seconds)] for size in sizes],  # type: ignore[misc]
            [[size, median_ms(lambda size=size: forward(size), seconds)] for size in sizes],  # type: ignore[misc]
        )
    finally:
        policy.eval()


def _publication(policy: Any, seconds: float) -> float:
    """Packing and checking a version, unpacking and loading it: both ends, without the wire."""
    from vla3_plugin.learner.weights import pack, unpack

    def publish() -> None:
        manifest, buffer = pack(iter(policy.state_dict().items()), 0)
        policy.load_state_dict(dict(unpack(manifest, buffer, 0)))

    return median_ms(publish, seconds)


# ---------------------------------------------------------------- the simulator


def measure_env(
    name: str,
    make: Callable[[int, int], Any],
    processes: Sequence[int],
    slots: Sequence[int],
    chunk: int,
    seconds: float = 5.0,
    gpu: bool = False,
    tasks: Sequence[int] = (),
) -> tuple[EnvProfile, Observation]:
    """Chunk steps of random actions, with each number of processes and of environments in one, ``seconds`` each.

    Args:
        make: a simulator in a process of its own, from its index and its number of environments.
        chunk: control steps of a chunk.
        tasks: those that the run plays; all of them by default. A simulator may build a scene where they change.
    """
    points: dict[str, list[list[float]]] = {"chunk": []}
    resets: list[float] = []
    alone: list[float] = []
    cpu_ms = memory = 0.0
    grown: list[tuple[int, float]] = []  # environments in a process, its memory
    observation: Observation | None = None
    chunks = 1.0
    for count, size in itertools.product(processes, slots):
        envs = [make(i, size) for i in range(count)]
        try:
            spec = envs[0].spec
            chunks = max(1.0, math.ceil(spec.max_steps / chunk))  # the last one may be cut
            taken, used, first = _play(envs, size, chunk, seconds, resets, tasks)
            observation = observation or first
            rss = _memory_gb(envs)
        finally:
            for env in envs:
                env.close()
        points["chunk"].append([count, size, statistics.mean(taken), statistics.median(taken), max(taken), used])
        if count == min(processes) and size == min(slots):
            alone, cpu_ms, memory = sorted(taken), used / size, rss
        if count == min(processes):
            grown.append((size, rss))
    assert observation is not None
    at_one = [p for p in points["chunk"] if p[0] == min(processes)]
    slope, residual = 0.0, {}
    if len(at_one) > 1:
        (_, slope), residual["chunk"] = fit([[1.0, p[1]] for p in at_one], [p[2] for p in at_one])
    points["residual"] = [[residual.get("chunk", 0.0)]]
    (few, least), (many, most) = min(grown), max(grown)
    each = max(0.0, most - least) / (many - few) if many > few else 0.0
    shifted = tuple(round(ms - slope * (min(slots) - 1), 3) for ms in _thin(alone))
    return (
        EnvProfile(
            name, shifted, slope, statistics.median(resets), cpu_ms, chunks, memory, round(each, 4), gpu, points
        ),
        observation,
    )


def _play(
    envs: Sequence[Any], slots: int, chunk: int, seconds: float, resets: list[float], tasks: Sequence[int] = ()
) -> tuple[list[float], float, Observation]:
    """(ms of every chunk step, processor ms of one, the first observation); all processes at the same time."""
    import psutil

    spec = envs[0].spec
    low, high = np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32)
    low, high = np.maximum(low, -1e3), np.minimum(high, 1e3)
    taken: list[float] = []
    seen: list[Observation] = []
    episodes = itertools.count()
    children = [psutil.Process(pid) for pid in _pids(envs)]

    chosen = list(tasks) or list(range(spec.num_tasks))

    def begin(env: Any, slot: int) -> float:
        start, index = time.perf_counter(), next(episodes)
        states = max(1, spec.num_init_states)
        seen.append(env.reset(slot, Episode(index, chosen[index % len(chosen)], index % states, index, index)))
        return 1e3 * (time.perf_counter() - start)

    def work(env: Any, number: int, end: float) -> None:
        rng = np.random.default_rng(number)
        first = True
        while first or time.perf_counter() < end:
            actions = rng.uniform(low, high, (slots, chunk, len(low))).astype(np.float32)
            start = time.perf_counter()
            results = env.chunk_step(list(range(slots)), actions)
            taken.append(1e3 * (time.perf_counter() - start))
            first = False
            for slot, result in enumerate(results):
                if result.done:
                    resets.append(begin(env, slot))

    for env in envs:
        for slot in range(slots):
            built = begin(env, slot)  # with all that is done once
    before = sum(sum(c.cpu_times()[:2]) for c in children)
    end = time.perf_counter() + seconds
    threads = [threading.Thread(target=work, args=(env, i, end)) for i, env in enumerate(envs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not resets:  # no episode has ended: there is no other
        resets.append(built)
    used = 1e3 * (sum(sum(c.cpu_times()[:2]) for c in children) - before) / len(taken)
    return taken, used, seen[0]


def _pids(envs: Sequence[Any]) -> list[int]:
    found = [getattr(getattr(env, "process", None), "pid", None) for env in envs]
    return [pid for pid in found if pid is not None]


def _memory_gb(envs: Sequence[Any]) -> float:
    import psutil

    sizes = [psutil.Process(pid).memory_info().rss / 1e9 for pid in _pids(envs)]
    return round(max(sizes), 3) if sizes else 0.0


def _thin(values: Sequence[float], most: int = 256) -> list[float]:
    """At most so many, at even quantiles."""
    if len(values) <= most:
        return list(values)
    return [values[int((i + 0.5) * len(values) / most)] for i in range(most)]


# ---------------------------------------------------------------- where it was measured


def hardware() -> Hardware:
    import psutil
    import torch

    memory = psutil.virtual_memory().total / 1e9
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        return Hardware(card.name, card.total_memory / 1e9, cores, memory)
    return Hardware(f"CPU, {_processor()}", memory, cores, memory)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def profile_of(policy: PolicyProfile, env: EnvProfile, **settings: Any) -> Profile:
    return Profile(policy, env, hardware(), versions=versions(), **settings)
