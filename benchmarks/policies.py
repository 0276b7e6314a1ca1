"""What each policy family costs on this machine: prefix and decoding apart, evaluation, training, compilation.

    python benchmarks/policies.py --json out.json

prefix      what is computed once a chunk: cameras and instruction (flow families: ``encode``; OpenVLA: the towers and
            the prompt's pass through Llama; OpenVLA-OFT: the towers and the embedded prompt).
decode      the rest of ``act``: K denoising steps, A tokens one by one, or one pass for the whole chunk.
evaluate    the learner's forward without gradients, ``train`` forward and backward (no optimizer step), per sample.
compiled    one step of the decoding loop in a batch of 8, plain over compiled time, measured in turns; and in how many
            places ``torch.compile`` had to leave the loop as ``act`` runs it.

Times are medians of CPU time on one thread: what an idle core needs, whatever else the machine does (but for caches and
memory, which are shared). Observations are random: a chunk costs the same whatever is in the picture.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from vla3_plugin.contract import Observation
from vla3_plugin.policies.base import VLAPolicy
from vla3_plugin.policies.flow_policy import FlowPolicy
from vla3_plugin.policies.presets import PRESETS
from vla3_plugin.policies.processing import Processing
from vla3_plugin.policies.registry import build_policy

NANO = tuple(name for name in PRESETS if name.endswith("-nano"))
TRAINED = 8  # samples of a forward that is evaluated, trained or compiled


@dataclass
class Result:
    """All in ms but ``graph_breaks``. ``prefix``, ``decode`` and ``chunk`` (their sum over the batch) by batch size."""

    preset: str
    parameters: int
    prefix: dict[int, float] = field(default_factory=dict)  # of a batch
    decode: dict[int, float] = field(default_factory=dict)  # of a batch
    chunk: dict[int, float] = field(default_factory=dict)  # of one chunk
    evaluate: float = 0.0  # of a sample
    train: float = 0.0  # of a sample
    graph_breaks: int | None = None
    step: float | None = None  # of a batch of TRAINED
    compiled_step: float | None = None
    difference: float | None = None  # the largest between what the two compute, in their own units


def build(preset: str, **options: Any) -> VLAPolicy:
    """The preset with fresh weights for two cameras, nine states and seven actions."""
    chosen, rng = PRESETS[preset], np.random.default_rng(0)
    record = Processing.from_demos(
        rng.normal(size=(50, 9)), rng.normal(size=(50, 7)), cameras=["front", "wrist"], image_size=chosen.image_size,
        normalisation=chosen.normalisation, prompt=chosen.prompt, max_tokens=chosen.max_tokens,
    )  # fmt: skip
    return build_policy(preset, record, **options).eval()


def requests(policy: Any, count: int) -> tuple[dict[str, Tensor], list[tuple[int, int, int]]]:
    rng, record = np.random.default_rng(1), policy.processing
    shown = [
        Observation(
            {name: rng.integers(0, 256, (*record.image_size, 3), dtype=np.uint8) for name in record.cameras},
            rng.normal(size=record.state_dim).astype(np.float32),
            "pick up the red cube",
        )
        for _ in range(count)
    ]
    return policy.prepare(shown), [(0, i, 0) for i in range(count)]


def medians(functions: list[Callable[[], Any]], repeats: int) -> list[float]:
    """ms of CPU time of each; they take turns, so that a machine that slows down slows all."""
    times: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + 1):
        for function, found in zip(functions, times, strict=True):
            start = time.process_time()
            function()
            if repeat:  # the first warms up
                found.append((time.process_time() - start) * 1e3)
    return [float(np.median(found)) for found in times]


def prefix_of(policy: Any, inputs: dict[str, Tensor]) -> Any:
    if isinstance(policy, FlowPolicy):
        return policy.encode(inputs)
    if policy.family == "openvla_oft":
        return policy.embed(inputs, policy.stop(inputs["input_ids"]))
    embeds, mask, _ = policy.embed(inputs, inputs["input_ids"][:, :0])
    cache = DynamicCache(config=policy.config)
    return policy.network.run(embeds, mask, cache=cache), mask, cache


def step_of(policy: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """One step of the decoding loop for a batch of ``TRAINED`` as a pure function, and its arguments."""
    inputs, keys = requests(policy, TRAINED)
    if isinstance(policy, FlowPolicy):
        chains, flow = policy.begin(inputs, keys, "train"), policy
        rows = torch.ones(TRAINED, dtype=torch.bool)

        def denoise(prefix: dict[str, Tensor], x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            return flow._step(flow.prefix_from(prefix), x, step, rows)

        return denoise, (chains.prefix, chains.chain[:, 0], chains.step)
    if policy.family == "openvla_oft":
        return policy.parallel, prefix_of(policy, inputs)
    _, mask, cache = prefix_of(policy, inputs)
    mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    token = torch.zeros(TRAINED, 1, policy.config.hidden_size)

    def next_token(token: Tensor, mask: Tensor) -> Tensor:
        hidden = policy.network.run(token, mask, cache=cache)
        cache.crop(-1)  # as long as before, for the next call
        return policy.logprobs(hidden[:, 0])

    return next_token, (token, mask)


def graph_breaks(policy: Any) -> int:
    """Of the decoding loop as ``act`` runs it."""
    inputs, keys = requests(policy, 2)
    torch._dynamo.reset()
    if not isinstance(policy, FlowPolicy):
        found = torch._dynamo.explain(policy._decode)(inputs, None)
    else:
        chains, flow = policy.begin(inputs, keys, "train"), policy

        def loop(chains: Any) -> None:
            for _ in range(flow.num_denoising_steps):
                flow.denoise(chains)

        found = torch._dynamo.explain(loop)(chains)
    return found.graph_break_count


def measure(preset: str, batches: tuple[int, ...], repeats: int, compiled: bool, **options: Any) -> Result:
    policy: Any = build(preset, **options)
    result = Result(preset, sum(p.numel() for p in policy.parameters()))
    with torch.no_grad():
        for batch in batches:
            inputs, keys = requests(policy, batch)
            prefix, whole = medians(
                [lambda i=inputs: prefix_of(policy, i), lambda i=inputs, k=keys: policy.act(i, k, "train")],  # type: ignore[misc]
                repeats,
            )
            result.prefix[batch], result.decode[batch], result.chunk[batch] = prefix, whole - prefix, whole / batch
        inputs, keys = requests(policy, TRAINED)
        chunk = policy.act(inputs, keys, "train")
    stored = {**inputs, **{f"trace.{name}": tensor for name, tensor in chunk.trace.items()}}

    def train() -> None:
        policy.zero_grad()
        output = policy(stored, task="evaluate")
        (output["logprob"].mean() + output["value"].mean()).backward()

    def evaluate() -> None:
        with torch.no_grad():
            policy(stored, task="evaluate")

    result.evaluate, result.train = (ms / TRAINED for ms in medians([evaluate, train], repeats))
    if compiled:
        with torch.no_grad():
            result.graph_breaks = graph_breaks(policy)
            torch._dynamo.reset()
            step, given = step_of(policy)
            faster = torch.compile(step)
            outputs = [torch.utils._pytree.tree_leaves(function(*given)) for function in (step, faster)]
            result.difference = max(float((a - b).abs().max()) for a, b in zip(*outputs, strict=True))
            result.step, result.compiled_step = medians([lambda: step(*given), lambda: faster(*given)], repeats)
    return result


def row(r: Result) -> str:
    def pair(found: dict[int, float]) -> str:
        return " / ".join(f"{found[batch]:.1f}" for batch in sorted(found))

    ratio = ""
    if r.step and r.compiled_step:
        ratio = f"{r.step:.1f} → {r.compiled_step:.1f} ({r.step / r.compiled_step:.2f})"
    return (
        f"| `{r.preset}` | {r.parameters / 1e6:.1f} | {pair(r.prefix)} | {pair(r.decode)} | {pair(r.chunk)} | "
        f"{r.evaluate:.1f} | {r.train:.1f} | {ratio} | {'' if r.graph_breaks is None else r.graph_breaks} |"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=NANO, choices=NANO)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true", help="compiling takes up to a minute a preset")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = " / ".join(map(str, sorted(args.batches)))
    print(
        f"| preset | M parameters | prefix, ms, batch {sizes} | decode | a chunk | evaluate, ms a sample | train | "
        f"step, ms, batch {TRAINED}, compiled (ratio) | graph breaks |\n|{'---|' * 9}"
    )
    results = []
    for preset in args.presets:
        results.append(measure(preset, tuple(args.batches), args.repeats, not args.no_compile))
        print(row(results[-1]), flush=True)
    if args.json:
        found = {"settings": vars(args), "torch": torch.__version__, "results": [asdict(r) for r in results]}
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
