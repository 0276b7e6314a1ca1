"""Demonstrations from scripted experts, through the same environment interface that a policy meets.

An expert is an environment that drives itself (``envs.base.ExpertEnv``): the child process asks its own expert at every
control step and hands back the expert's actions beside the ordinary ``ChunkResult``. Observations are what a policy
sees: nothing privileged is stored.

Format, the same for every simulator. ``demos-<worker>.npz`` (no pickle), N samples of chunks of C actions:

====================  =====================  ==========================================================================
``images.<camera>``   uint8 [N, H, W, 3]     at the decision point
``state``             float32 [N, S]         the simulator's units
``actions``           float32 [N, C, A]      what the expert wanted in the next C control steps, environment units
``action_mask``       bool [N, C]            false after the episode's end (``actions`` are 0 there)
``instruction``       str [N]
``episode``           int64 [N]              id of the episode the sample is from
``task``              int64 [N]
====================  =====================  ==========================================================================

``card.json`` beside them says how they were made and how often the expert succeeded. Only successes are kept.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vla3_plugin.contract import EnvSpec, Episode, Observation
from vla3_plugin.envs.base import ExpertEnv
from vla3_plugin.envs.process import EnvProcess

EXPERTS = {
    "maniskill": "vla3_plugin.envs.maniskill_expert:ManiSkillExpert",
    "libero": "vla3_plugin.envs.libero_expert:LiberoExpert",
}
DEMO_STREAM = 4  # keeps the seeds of demonstrations apart from those of training (1, 2) and evaluation (3)


@dataclass(frozen=True)
class DemoConfig:
    """What to make.

    ``episodes`` successes are collected over all ``tasks``, in turn. ``stride``: a sample is taken every so many
    control steps; None: every ``chunk``. ``noise``: see ``ActionNoise``; the share ``clean`` of the episodes has none.
    ``give_up``: stop when fewer than this share of at least 20 episodes succeeds.
    """

    episodes: int = 100
    chunk: int = 8
    stride: int | None = None
    noise: float = 0.0
    clean: float = 0.25
    seed: int = 0
    tasks: tuple[int, ...] | None = None
    held_out_init_states: int = 0
    give_up: float = 0.2

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.chunk < 1 or (self.stride is not None and not 1 <= self.stride <= self.chunk):
            raise ValueError(
                f"demos: episodes={self.episodes}, chunk={self.chunk}, stride={self.stride}: expected at least 1, "
                "and a stride of at most a chunk"
            )
        if self.noise < 0 or not 0 <= self.clean <= 1:
            raise ValueError(f"demos: noise={self.noise} and clean={self.clean}: expected >= 0, and 0 to 1")


@dataclass
class Demonstration:
    """One episode: observations every ``stride`` control steps and the expert's action at every control step."""

    episode: Episode
    observations: list[Observation]
    actions: list[np.ndarray] = field(default_factory=list)  # float32 [<= stride, A] each
    success: bool = False

    @property
    def control_steps(self) -> int:
        return sum(len(a) for a in self.actions)


def demo_episode(config: DemoConfig, spec: EnvSpec, index: int) -> Episode:
    """The ``index``-th episode: tasks in turn, then initial states in turn, a seed of its own."""
    tasks = list(range(spec.num_tasks)) if config.tasks is None else list(config.tasks)
    states = max(1, spec.num_init_states - config.held_out_init_states)
    seed = np.random.SeedSequence([config.seed, DEMO_STREAM, index]).generate_state(1)[0]
    return Episode(index, tasks[index % len(tasks)], index // len(tasks) % states, int(seed >> 1), index)


def collect(env: ExpertEnv, episodes: Iterator[Episode], config: DemoConfig) -> Iterator[Demonstration]:
    """Let the expert of ``env`` run ``episodes``; successes and failures are yielded as they end."""
    stride = config.stride or config.chunk
    running: dict[int, Demonstration] = {}
    while True:
        for slot in range(env.num_slots):
            if slot not in running and (episode := next(episodes, None)) is not None:
                running[slot] = Demonstration(episode, [env.reset(slot, episode)])
        if not running:
            return
        noisy = {slot: _is_noisy(config, demo.episode) for slot, demo in running.items()}
        for noise in sorted(set(noisy.values())):
            slots = [slot for slot in running if noisy[slot] == noise]
            for slot, chunk in zip(slots, env.expert_chunk(slots, stride, noise), strict=True):
                demo, result = running[slot], chunk.result
                demo.actions.append(chunk.actions[result.valid])
                if not result.done:
                    demo.observations.append(result.observation)
                    continue
                demo.success = result.success
                yield running.pop(slot)


def _is_noisy(config: DemoConfig, episode: Episode) -> float:
    draw = np.random.default_rng([config.seed, DEMO_STREAM, episode.episode_id]).random()
    return 0.0 if draw < config.clean else config.noise


def samples(demo: Demonstration, chunk: int) -> dict[str, np.ndarray]:
    """The arrays of the module's docstring for one demonstration."""
    actions = np.concatenate(demo.actions)
    starts = np.cumsum([0] + [len(a) for a in demo.actions[:-1]])
    count = len(demo.observations)
    windows = np.zeros((count, chunk, actions.shape[1]), np.float32)
    mask = np.zeros((count, chunk), np.bool_)
    for i, start in enumerate(starts):
        piece = actions[start : start + chunk]
        windows[i, : len(piece)], mask[i, : len(piece)] = piece, True
    first = demo.observations[0]
    images = {f"images.{c}": np.stack([o.images[c] for o in demo.observations]) for c in first.images}
    return images | {
        "state": np.stack([o.state for o in demo.observations]),
        "actions": windows,
        "action_mask": mask,
        "instruction": np.array([o.instruction for o in demo.observations]),
        "episode": np.full(count, demo.episode.episode_id, np.int64),
        "task": np.full(count, demo.episode.task_id, np.int64),
    }


def generate(
    env_name: str,
    env_options: dict[str, Any],
    out: Path,
    config: DemoConfig,
    expert: str | None = None,
    workers: int = 1,
    python: str | None = None,
    slots_per_process: int = 1,
    timeout_s: float = 120.0,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write demonstrations of ``env_name`` to the directory ``out``; returns the card.

    ``expert``: 'module:Class' of an ``ExpertEnv`` that takes the environment's options; None: the built-in one.
    Episodes are dealt to ``workers`` processes in turn, so the number of workers decides only who runs which.
    """
    target = expert or EXPERTS.get(env_name)
    if target is None:
        raise ValueError(f"no scripted expert for {env_name!r}; there are ones for {sorted(EXPERTS)}, or name your own")
    out.mkdir(parents=True, exist_ok=True)
    if stale := sorted(out.glob("demos-*.npz")):
        raise FileExistsError(f"{out} already holds {len(stale)} demonstration files; choose another directory")
    started = time.time()
    shares = [config.episodes // workers + (i < config.episodes % workers) for i in range(workers)]
    jobs = [(rank, share) for rank, share in enumerate(shares) if share]

    def work(job: tuple[int, int]) -> dict[str, Any]:
        rank, share = job
        env = EnvProcess(
            target,
            env_options,
            num_slots=min(slots_per_process, share),
            python=python,
            timeout_s=timeout_s,
            name=f"{env_name} expert {rank}",
        )
        try:
            return _fill(env, rank, workers, share, config, out, report)
        finally:
            env.close()

    with ThreadPoolExecutor(max_workers=len(jobs), thread_name_prefix="demos") as pool:
        parts = list(pool.map(work, jobs))
    tried = sum(p["tried"] for p in parts)
    card = {
        "env": env_name,
        "options": env_options,
        "expert": target,
        "config": asdict(config),
        "workers": workers,
        "spec": parts[0]["spec"],
        "episodes": sum(p["kept"] for p in parts),
        "tried": tried,
        "success_rate": sum(p["kept"] for p in parts) / tried,
        "samples": sum(p["samples"] for p in parts),
        "control_steps": sum(p["control_steps"] for p in parts),
        "seconds": round(time.time() - started, 1),
    }
    _write(out / "card.json", json.dumps(card, indent=1).encode())
    return card


def _fill(
    env: EnvProcess, rank: int, workers: int, share: int, config: DemoConfig, out: Path, report: Callable[[str], None]
) -> dict[str, Any]:
    kept: list[Demonstration] = []
    tried = 0

    def assigned() -> Iterator[Episode]:
        index = rank
        while len(kept) < share:
            yield demo_episode(config, env.spec, index)
            index += workers

    for demo in collect(env, assigned(), config):
        tried += 1
        if demo.success and len(kept) < share:
            kept.append(demo)
        if tried >= 20 and len(kept) < config.give_up * tried:
            raise RuntimeError(
                f"{env.name}: {len(kept)} of {tried} episodes succeeded; the expert does not fit the task"
            )
        if tried % 25 == 0 or len(kept) == share:
            report(f"demos: worker {rank}: {len(kept)} of {share} episodes kept, {tried} tried")
    _save(out / f"demos-{rank}.npz", [samples(demo, config.chunk) for demo in kept])
    return {
        "tried": tried,
        "kept": len(kept),
        "samples": sum(len(d.observations) for d in kept),
        "control_steps": sum(d.control_steps for d in kept),
        "spec": env.spec.to_json(),
    }


def _save(path: Path, parts: Sequence[dict[str, np.ndarray]]) -> None:
    arrays: dict[str, Any] = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    _write(path, buffer.getvalue())


def _write(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(temporary, path)
