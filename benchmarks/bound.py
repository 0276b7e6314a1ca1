"""How fast a latency preset can possibly go, from its numbers alone: ``python benchmarks/bound.py peer-reference``.

Three figures, all in environment chunk steps a second:

- each resource alone (simulators that never wait for an action, inference in full batches, the learner): the least of
  them is the bound of the workload, and names the busiest resource;
- the closed loop: a simulator cannot go on before its action has come, so a chunk step costs its shard at least the
  shard's own time and one inference, the shorter the smaller the batch, and batches must be large enough to keep up.
  No schedule and neither form of batching can be faster;
- what remains when requests also have to queue: the same loop simulated, with a batcher that fires when its replica is
  free. This is what there is to reach; the plugin is measured against it and against the bound.
"""

from __future__ import annotations

import heapq
import json
import math
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from vla3_plugin.envs.latency import episode_length
from vla3_plugin.envs.latency_draw import Duration, parse_duration
from vla3_plugin.policies.latency import LatencySettings
from vla3_plugin.resources import resource_dir

Preset = str | Path | Mapping[str, Any]


@dataclass(frozen=True)
class Workload:
    """A preset's numbers. Times in ms; ``per`` and ``per_env_ms`` as in ``LatencyEnv``."""

    name: str
    shards: int
    slots: int  # of one shard
    chunk: Duration
    per: str
    per_env_ms: float
    reset_ms: float
    episode_chunks: float  # mean
    bootstrap: float  # share of episodes whose end needs one more inference
    policy: LatencySettings
    replicas: int
    max_batch: int
    ranks: int
    micro_batch: int
    epochs: int

    def shard_ms(self) -> float:
        """Mean time of a shard's chunk step, with its part of the resets, which a process does one by one."""
        if self.per == "env":
            step = self.chunk.mean_of_max_ms(self.slots)
        else:
            step = self.chunk.mean_ms + self.per_env_ms * self.slots
        return step + self.slots * self.reset_ms / self.episode_chunks

    def inferences(self) -> float:
        """Requests a chunk step."""
        return 1.0 + self.bootstrap / self.episode_chunks


def read(preset: Preset) -> Workload:
    """The workload of a preset by name or file, or of a run's whole config.

    Raises:
        ValueError: no such preset, or a number in it is out of range.
    """
    name, config = "config", preset
    if not isinstance(preset, Mapping):
        path = Path(preset) if Path(preset).suffix else resource_dir("configs") / "latency" / f"{preset}.yaml"
        if not path.is_file():
            known = sorted(p.stem for p in (resource_dir("configs") / "latency").glob("*.yaml"))
            raise ValueError(f"preset {str(preset)!r}: {path} is no file; known: {', '.join(known)}")
        name = path.stem
        merged = OmegaConf.merge(
            {"vla3": {"algorithm": {"adv_type": "gae"}}},
            OmegaConf.load(resource_dir("configs") / "env" / "latency.yaml"),
            OmegaConf.load(path),
        )
        config = OmegaConf.to_container(merged, resolve=True)  # type: ignore[assignment]
    elif OmegaConf.is_config(preset):
        config = OmegaConf.to_container(preset, resolve=True)  # type: ignore[assignment]
    assert isinstance(config, Mapping)
    env, options = config["vla3"]["env"], config["vla3"]["env"]["options"]
    roles = config["actor_rollout_ref"]
    rollout, trainer = roles.get("rollout", {}), config.get("trainer", {})
    low, high = episode_length(options.get("episode_chunks", 20), "vla3.env.options.episode_chunks")
    success = options.get("success", 0.5)
    ends = success if low < high else 0.0  # share of episodes that end by themselves
    algorithm = config["vla3"]["algorithm"]
    return Workload(
        name=name,
        shards=env.get("workers", 1) * env.get("shards_per_worker", 2),
        slots=env.get("envs_per_shard", 1),
        chunk=parse_duration(options.get("chunk_ms", 100.0), "vla3.env.options.chunk_ms"),
        per=options.get("per", "env"),
        per_env_ms=float(options.get("chunk_ms_per_env", 0.0)),
        reset_ms=parse_duration(options.get("reset_ms", 0.0), "vla3.env.options.reset_ms").mean_ms,
        episode_chunks=ends * (low + high) / 2 + (1 - ends) * high,
        bootstrap=(1 - ends) if algorithm.get("adv_type", "gae") == "gae" else 0.0,
        policy=LatencySettings.of(roles["model"].get("options", {})),
        replicas=rollout.get("n_gpus_per_node", 1) * rollout.get("nnodes", 1),
        max_batch=config["vla3"].get("stages", {}).get("interaction", {}).get("max_batch_size", 32),
        ranks=trainer.get("n_gpus_per_node", 1) * trainer.get("nnodes", 1),
        micro_batch=roles["actor"]["ppo_micro_batch_size_per_gpu"],
        epochs=algorithm.get("update_epoch", 1),
    )


def bound(preset: Preset, forward_passes: float = 0.0, simulate_steps: int = 20_000) -> dict[str, Any]:
    """What limits the workload, and to how much.

    Args:
        preset: see ``read``.
        forward_passes: passes without gradients that the learner makes over each sample, beside training (decoupled
            training with ``proximal: recompute`` makes one).
        simulate_steps: chunk steps to simulate; 0: none.

    Raises:
        ValueError: see ``read``; or the workload takes no time at all.

    Returns:
        ``ms_per_step`` of ``envs``, ``inference`` and ``learner``, each alone; ``binding``, the slowest of them, and
        ``bound``, its chunk steps a second; ``closed_loop`` and, by kind of batching, ``simulated``, likewise (neither
        of these two is above what the learner takes).
    """
    w = read(preset)
    p = w.policy
    batch = max(range(1, min(w.max_batch, w.shards * w.slots) + 1), key=lambda b: b / (p.inference_ms(b) or 1e-9))
    train = w.epochs * p.train_ms(w.micro_batch) + forward_passes * p.forward_share * p.train_ms(w.micro_batch)
    alone = {
        "envs": w.shard_ms() / (w.shards * w.slots),
        "inference": w.inferences() * p.inference_ms(batch) / batch / w.replicas,
        "learner": train / w.micro_batch / w.ranks,
    }
    binding = max(alone, key=lambda name: alone[name])
    if not alone["envs"] + alone["inference"]:
        raise ValueError(f"preset {w.name!r}: neither simulators nor inference take any time, so nothing bounds them")
    ceiling = 1000 / alone[binding]
    result: dict[str, Any] = {
        "preset": w.name,
        "environments": w.shards * w.slots,
        "ms_per_step": {name: round(ms, 3) for name, ms in alone.items()},
        "inference_batch": batch,
        "binding": binding,
        "bound": round(ceiling, 2),
        "closed_loop": round(min(ceiling, closed_loop(w)), 2),
    }
    if simulate_steps:
        learner = 1000 / alone["learner"] if alone["learner"] else math.inf
        result["simulated"] = {
            kind: round(min(learner, simulate(w, kind == "step_join", simulate_steps)), 2)
            for kind in ("run_to_completion", "step_join")
        }
    return result


def closed_loop(w: Workload) -> float:
    """Upper bound in chunk steps a second: N / (shard's time + shortest inference that keeps up with that many).

    With mean batches b of prefixes and c of steps, a replica that serves x rows a ms is busy for x (p/b + p' + K (s/c +
    s')) <= 1 of the time (p, p', s, s': base and per row, of prefix and of step), and a row takes at least p + p' b + K
    (s + s' c). Lagrange's multiplier gives the least of the second under the first: ``keeping_up``.
    """
    p, k = w.policy, w.policy.denoising_steps
    per_row = p.prefix_ms_per_sample + k * p.step_ms_per_sample
    root = math.sqrt(p.prefix_ms_base * p.prefix_ms_per_sample) + k * math.sqrt(p.step_ms_base * p.step_ms_per_sample)
    share = min(w.max_batch, math.ceil(w.slots / w.replicas))  # a shard's rows come together

    def latency(steps_per_ms: float) -> float:
        x = steps_per_ms * w.inferences() / w.replicas
        if x * per_row >= 1:
            return math.inf
        keeping_up = p.prefix_ms_base + k * p.step_ms_base + x * root**2 / (1 - x * per_row)
        return max(p.inference_ms(share), keeping_up)

    low, high = 0.0, w.shards * w.slots / w.shard_ms()
    for _ in range(60):
        middle = (low + high) / 2
        fits = middle * (w.shard_ms() + latency(middle)) <= w.shards * w.slots
        low, high = (middle, high) if fits else (low, middle)
    return 1000 * low


def simulate(w: Workload, step_join: bool, steps: int) -> float:
    """Chunk steps a second of the loop of shards and replicas, discrete events, over ``steps`` of them.

    A free replica takes what waits, first come first served, at most ``max_batch``; with ``step_join`` it takes it
    between denoising steps. Neither training nor weight swaps nor the host's own overhead are in it.
    """
    p, clock, counter = w.policy, 0.0, 0
    events: list[tuple[float, int, str, int]] = []  # (time, tie, kind, shard or replica)
    waiting: deque[int] = deque()  # a shard's number for each of its rows
    missing = [0] * w.shards  # rows that the shard still waits for
    played = [0] * w.shards
    running: list[list[tuple[int, int]]] = [[] for _ in range(w.replicas)]  # (shard, denoising steps left)
    idle = set(range(w.replicas))
    done, begun, start = 0, 0, 0.0

    def shard_step(shard: int) -> float:
        resets = w.slots * w.reset_ms / w.episode_chunks
        rows = range(w.slots if w.per == "env" else 1)
        longest = max(w.chunk.draw(shard, played[shard], row) for row in rows)
        return longest + resets + (0.0 if w.per == "env" else w.per_env_ms * w.slots)

    def push(time: float, kind: str, which: int) -> None:
        nonlocal counter
        counter += 1
        heapq.heappush(events, (time, counter, kind, which))

    def serve(replica: int) -> None:
        """Start the replica's next piece of work: a batch, or one denoising step of those on board."""
        aboard = running[replica]
        fresh = min(len(waiting), w.max_batch - len(aboard)) if step_join or not aboard else 0
        aboard.extend((waiting.popleft(), p.denoising_steps) for _ in range(fresh))
        if not aboard:
            idle.add(replica)
            return
        idle.discard(replica)
        prefix = p.prefix_ms(fresh) if fresh else 0.0
        push(clock + prefix + p.step_ms(len(aboard)), "step", replica)

    for shard in range(w.shards):
        push(0.0, "env", shard)
    while done < steps:
        clock, _, kind, which = heapq.heappop(events)
        if kind == "env":
            missing[which] = w.slots
            waiting.extend([which] * w.slots)
        else:
            running[which] = [(shard, left - 1) for shard, left in running[which]]
            for shard, left in running[which]:
                missing[shard] -= left == 0
                if left == 0 and missing[shard] == 0:
                    push(clock + shard_step(shard), "env", shard)
                    played[shard] += 1
                    done += w.slots
                    if done - w.slots < steps // 10 <= done:  # the start is no steady state
                        start, begun = clock, done
            running[which] = [row for row in running[which] if row[1] > 0]
            serve(which)
        if idle and waiting and not (events and events[0][0] == clock and events[0][2] == "env"):
            serve(min(idle))
    return 1000 * (done - begun) / (clock - start)


def main() -> int:
    names = sys.argv[1:] or sorted(p.stem for p in (resource_dir("configs") / "latency").glob("*.yaml"))
    print(json.dumps([bound(name) for name in names], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
