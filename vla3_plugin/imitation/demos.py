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
import threading
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

    ``episodes`` successes are collected, equally many of each of the ``tasks``. ``stride``: a sample is taken every so
    many control steps; None: every ``chunk``. ``noise``: see ``ActionNoise``; the share ``clean`` of the episodes has
    none. ``give_up``: stop when fewer than this share of at least 20 episodes of a task succeeds.
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


class Dealer:
    """Hands out episodes until every task has its share of successes; one for all workers.

    No more episodes of a task are under way than it still lacks successes, so what is kept are the first successes by
    number, whoever ran them and in whatever order they ended. A worker stays with its task where it can: changing tasks
    is slow in some simulators.
    """

    def __init__(self, config: DemoConfig, spec: EnvSpec) -> None:
        self._config, self._spec = config, spec
        self.tasks = list(range(spec.num_tasks)) if config.tasks is None else list(config.tasks)
        share, rest = divmod(config.episodes, len(self.tasks))
        self._lacking = [share + (i < rest) for i in range(len(self.tasks))]  # successes, of each task
        self._dealt, self._under_way = [0] * len(self.tasks), [0] * len(self.tasks)
        self._kept = [0] * len(self.tasks)
        self._workers: dict[int, int] = {}  # worker to the position of its task
        self._lock, self._stopped = threading.Lock(), False

    def episode(self, position: int, number: int) -> Episode:
        """The ``number``-th episode of a task: initial states in turn, a seed of its own."""
        index = number * len(self.tasks) + position
        states = max(1, self._spec.num_init_states - self._config.held_out_init_states)
        seed = int(np.random.SeedSequence([self._config.seed, DEMO_STREAM, index]).generate_state(1)[0] >> 1)
        return Episode(index, self.tasks[position], number % states, seed, index)

    def next(self, worker: int) -> Episode | None:
        with self._lock:
            open_ = [p for p in range(len(self.tasks)) if self._under_way[p] < self._lacking[p]]
            if self._stopped or not open_:
                return None
            position = self._workers.get(worker, -1)
            if position not in open_:
                busy = [p for w, p in self._workers.items() if w != worker]
                position = min(open_, key=lambda p: (busy.count(p), p))
            self._workers[worker] = position
            number = self._dealt[position]
            self._dealt[position] += 1
            self._under_way[position] += 1
            return self.episode(position, number)

    def done(self, demo: Demonstration) -> None:
        with self._lock:
            position = demo.episode.episode_id % len(self.tasks)
            self._under_way[position] -= 1
            self._lacking[position] -= demo.success
            self._kept[position] += demo.success
            finished = self._dealt[position] - self._under_way[position]
            if finished >= 20 and self._kept[position] < self._config.give_up * finished:
                self._stopped = True
                raise RuntimeError(
                    f"{self._kept[position]} of {finished} episodes of task {self.tasks[position]} "
                    f"({self._spec.instructions[self.tasks[position]]!r}) succeeded: the expert does not fit it"
                )

    def stop(self) -> None:
        self._stopped = True

    def counts(self) -> tuple[int, int]:
        """(episodes kept, episodes tried)"""
        return sum(self._kept), sum(self._dealt) - sum(self._under_way)


def collect(env: ExpertEnv, assign: Callable[[], Episode | None], config: DemoConfig) -> Iterator[Demonstration]:
    """Let the expert of ``env`` run what ``assign`` gives; successes and failures are yielded as they end."""
    stride = config.stride or config.chunk
    running: dict[int, Demonstration] = {}
    while True:
        for slot in range(env.num_slots):
            if slot not in running and (episode := assign()) is not None:
                running[slot] = Demonstration(episode, [env.reset(slot, episode)])
        if not running:
            return
        noisy = {slot: noise_of(config, demo.episode) for slot, demo in running.items()}
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


def noise_of(config: DemoConfig, episode: Episode) -> float:
    """The episode's noise: ``config.noise``, or none for the share ``config.clean``."""
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

    ``expert``: 'module:Class' of an ``ExpertEnv`` that takes the environment's options; None: the built-in one. The
    result does not depend on the number of ``workers`` (processes) and slots.
    """
    target = expert or EXPERTS.get(env_name)
    if target is None:
        raise ValueError(f"no scripted expert for {env_name!r}; there are ones for {sorted(EXPERTS)}, or name your own")
    out.mkdir(parents=True, exist_ok=True)
    if stale := sorted(out.glob("demos-*.npz")):
        raise FileExistsError(f"{out} already holds {len(stale)} demonstration files; choose another directory")
    started = time.monotonic()
    lock = threading.Lock()
    shared: list[Dealer] = []

    def work(rank: int) -> tuple[list[Demonstration], EnvSpec]:
        with EnvProcess(
            target,
            env_options,
            num_slots=slots_per_process,
            python=python,
            timeout_s=timeout_s,
            name=f"{env_name} expert {rank}",
        ) as env:
            with lock:
                if not shared:
                    shared.append(Dealer(config, env.spec))
            dealer, kept = shared[0], []
            try:
                for demo in collect(env, lambda: dealer.next(rank), config):
                    dealer.done(demo)
                    if demo.success:
                        kept.append(demo)
                    done, tried = dealer.counts()
                    if tried % 25 == 0 or done == config.episodes:
                        report(f"demos: {done} of {config.episodes} episodes kept, {tried} tried")
            except BaseException:
                dealer.stop()
                raise
            return sorted(kept, key=lambda d: d.episode.episode_id), env.spec

    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="demos") as pool:
        parts = list(pool.map(work, range(workers)))
    for rank, (kept, _) in enumerate(parts):
        if kept:
            _save(out / f"demos-{rank}.npz", [samples(demo, config.chunk) for demo in kept])
    everything = [demo for kept, _ in parts for demo in kept]
    _, tried = shared[0].counts()
    card = {
        "env": env_name,
        "options": env_options,
        "expert": target,
        "config": asdict(config),
        "spec": parts[0][1].to_json(),
        "episodes": len(everything),
        "tried": tried,
        "success_rate": len(everything) / tried,
        "samples": sum(len(d.observations) for d in everything),
        "control_steps": sum(d.control_steps for d in everything),
        "workers": workers,
        "seconds": round(time.monotonic() - started, 1),
    }
    text = json.dumps(card, indent=1)
    _write(out / "card.json", text.encode())
    return json.loads(text)


def _save(path: Path, parts: Sequence[dict[str, np.ndarray]]) -> None:
    arrays: dict[str, Any] = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    _write(path, buffer.getvalue())


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, path)
