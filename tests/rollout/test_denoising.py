"""Joining a running batch changes when a request is answered and nothing else about it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vla3_plugin.contract import Observation
from vla3_plugin.policies.base import VLAPolicy
from vla3_plugin.policies.pi0 import PI0Policy
from vla3_plugin.policies.presets import _pi0_model
from vla3_plugin.policies.processing import Processing
from vla3_plugin.policies.serve import ServedPolicy
from vla3_plugin.rollout.batcher import Batcher
from vla3_plugin.rollout.denoising import RunToCompletion, StepJoin, make_runner

COUNT, STEPS = 8, 4  # different requests; denoising steps
SIZES = _pi0_model(
    width=32, mlp=64, expert=32, expert_mlp=64, depth=2, heads=2, head_dim=16, vocabulary=256,
    vision=dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, patch_size=16, image_size=32,
    ),
    chunk_size=6, max_action_dim=9,
)  # fmt: skip


@cache
def served(sde_mode: str = "mixed") -> ServedPolicy:
    rng = np.random.default_rng(7)
    record = Processing.from_demos(
        rng.normal(size=(50, 9)), rng.normal(size=(50, 7)), cameras=["a"], image_size=(32, 32), max_tokens=8
    )
    policy = PI0Policy.build(
        "pi0-nano", record, model=SIZES, executed=4, value_hidden=16, sde_mode=sde_mode, num_steps=STEPS
    )
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return ServedPolicy(policy, version=3)


@cache
def inputs() -> dict[str, np.ndarray]:
    rng, tasks = np.random.default_rng(11), ["pick up the red cube", "stack", "push the bowl to the left"]
    shown = [
        Observation(
            {"a": rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)},
            rng.normal(size=9).astype(np.float32),
            tasks[i % 3],
        )
        for i in range(COUNT)
    ]
    return {name: tensor.numpy() for name, tensor in served().policy.prepare(shown).items()}


def key(i: int) -> tuple[int, int, int]:
    return (5, 100 + i, i % 3)


def payload(i: int):
    return {name: array[i] for name, array in inputs().items()}, key(i)


@cache
def reference(sde_mode: str, kind: str) -> dict[str, np.ndarray]:
    """All requests in one batch."""
    return served(sde_mode).act(inputs(), [key(i) for i in range(COUNT)], kind)


def assert_row(result, expected, i: int) -> None:
    assert result.keys() == expected.keys()
    for name, value in result.items():
        tolerance = 1e-4 if name == "logprob" else 1e-5
        np.testing.assert_allclose(value, expected[name][i], atol=tolerance, rtol=0, err_msg=name)
        assert value.dtype == expected[name].dtype


def step_join(policy: ServedPolicy, max_batch_size: int = 8) -> tuple[Batcher, StepJoin]:
    batcher = Batcher(max_batch_size, max_wait_ms=0.0)
    return batcher, StepJoin(policy, batcher, max_batch_size)


arrivals = st.lists(  # per round: which requests arrive, in which mode
    st.lists(st.tuples(st.integers(0, COUNT - 1), st.sampled_from(["train", "eval"])), max_size=4),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("sde_mode", ["mixed", "joint"])
@pytest.mark.parametrize("batching", ["step_join", "run_to_completion"])
@given(arrivals=arrivals, max_batch_size=st.integers(1, 6))
@settings(max_examples=20)
def test_a_request_gets_the_same_answer_whenever_and_beside_whomever(sde_mode, batching, arrivals, max_batch_size):
    batcher = Batcher(max_batch_size, max_wait_ms=0.0)
    runner = make_runner(batching, served(sde_mode), batcher, max_batch_size)
    sent, answered = [], 0
    for arriving in arrivals:
        sent += [(i, kind, batcher.submit([payload(i)], kind)[0]) for i, kind in arriving]
        if batcher.depth or runner.running:
            answered += runner.run_once(timeout=5.0)
    while batcher.depth or runner.running:
        answered += runner.run_once(timeout=5.0)
    assert answered == len(sent)
    for i, kind, ticket in sent:
        assert_row(ticket.future.result(timeout=0), reference(sde_mode, kind), i)


def test_each_chain_takes_exactly_its_steps_and_all_share_them(monkeypatch):
    policy = served()
    batcher, runner = step_join(policy)
    seen = []
    denoise = ServedPolicy.denoise
    monkeypatch.setattr(
        ServedPolicy, "denoise", lambda self, c: (seen.append(c.step.tolist()), denoise(self, c)) and None
    )
    first = batcher.submit([payload(0)], "train")[0]
    runner.run_once()
    second = batcher.submit([payload(1)], "train")[0]
    for _ in range(3):
        assert not first.future.done()
        runner.run_once()
    assert first.future.done() and not second.future.done() and runner.running == 1
    runner.run_once()
    assert second.future.done() and runner.running == 0
    assert seen == [[0], [1, 0], [2, 1], [3, 2], [3]]
    assert (runner.steps, runner.rows) == (5, 8)


@pytest.mark.parametrize("sde_mode", ["mixed", "joint"])
def test_the_learner_evaluates_what_step_join_sampled(sde_mode):
    policy = served(sde_mode)
    batcher, runner = step_join(policy)
    tickets = []
    for i in range(COUNT):
        tickets += batcher.submit([payload(i)], "train")
        runner.run_once()
    runner.drain()
    results = [ticket.future.result(timeout=0) for ticket in tickets]
    batch = {name: torch.from_numpy(array) for name, array in inputs().items()}
    batch |= {
        name: torch.from_numpy(np.stack([r[name] for r in results])) for name in ("trace.chain", "trace.sde_step")
    }
    with torch.no_grad():
        output = policy.policy(batch, task="evaluate")
    for name in ("logprob", "value"):
        np.testing.assert_allclose(np.stack([r[name] for r in results]), output[name].numpy(), atol=1e-4, rtol=0)
    assert len({int(r["trace.sde_step"]) for r in results}) > 1 or sde_mode == "joint"


def test_the_running_batch_never_grows_beyond_its_bound_and_nobody_is_left_out():
    batcher, runner = step_join(served(), max_batch_size=3)
    tickets = batcher.submit([payload(i) for i in range(COUNT)], "eval")
    most = 0
    while not all(ticket.future.done() for ticket in tickets):
        runner.run_once()
        most = max(most, runner.running)
    assert most <= 3 and runner.rows == COUNT * STEPS


def running_after_one_more_call(max_batch_size: int, run: int, wait: int) -> int:
    batcher, runner = step_join(served(), max_batch_size)
    batcher.submit([payload(i % COUNT) for i in range(run)], "eval")
    runner.run_once()
    assert runner.running == run
    batcher.submit([payload(i % COUNT) for i in range(wait)], "eval")
    runner.run_once()
    joined = runner.running - run
    runner.drain()
    return joined


@pytest.mark.parametrize(
    ("run", "wait", "joined"),
    [
        (8, 1, 0),  # less than a quarter of those who run: not worth an encoding of its own
        (8, 2, 2),
        (1, 1, 1),
        (12, 4, 4),
        (12, 6, 0),  # more wait than there is room: as many as run on, or none yet
        (8, 9, 8),
        (16, 5, 0),
    ],
)
def test_requests_join_in_groups_that_are_worth_an_encoding(run, wait, joined):
    assert running_after_one_more_call(16, run, wait) == joined


def test_a_single_latecomer_waits_for_one_chain_at_most():
    batcher, runner = step_join(served(), max_batch_size=16)
    batcher.submit([payload(i) for i in range(8)], "eval")
    runner.run_once()
    late = batcher.submit([payload(0)], "eval")[0]
    calls = 0
    while not late.future.done():
        runner.run_once()
        calls += 1
    assert calls == STEPS - 1 + STEPS


def test_requests_go_on_while_others_keep_arriving():
    batcher, runner = step_join(served(), max_batch_size=2)
    first = batcher.submit([payload(0)], "train")[0]
    for i in range(1, STEPS + 1):
        batcher.submit([payload(i)], "train")
        runner.run_once()
    assert first.future.done()


def test_drain_answers_what_runs_and_leaves_what_waits():
    policy = served()
    batcher, runner = step_join(policy)
    running = batcher.submit([payload(0), payload(1)], "train")
    runner.run_once()
    waiting = batcher.submit([payload(2)], "train")[0]
    assert runner.drain() == 2 and runner.running == 0
    assert all(ticket.future.done() for ticket in running) and not waiting.future.done() and batcher.depth == 1
    assert runner.drain() == 0


def small_other() -> ServedPolicy:
    """One of its own: the shared one must not be changed."""
    policy = PI0Policy.build("pi0-nano", served().policy.processing, model=SIZES, executed=4, value_hidden=16)
    return ServedPolicy(policy, version=1)


def test_a_chain_is_of_one_version_from_end_to_end():
    policy = small_other()
    batcher, runner = step_join(policy)
    before, after = batcher.submit([payload(0)], "train")[0], None
    expected = policy.act(*_one(0), "train")
    runner.run_once()
    after = batcher.submit([payload(0)], "train")[0]
    runner.drain()
    with torch.no_grad():
        for parameter in policy.policy.parameters():
            parameter += 0.1
    policy.version = 2
    while not after.future.done():
        runner.run_once()
    assert_row(before.future.result(timeout=0), expected, 0)
    assert (before.future.result(0)["version"], after.future.result(0)["version"]) == (1, 2)
    assert np.abs(after.future.result(0)["actions"] - expected["actions"][0]).max() > 1e-3


def _one(i: int):
    return {name: array[i : i + 1] for name, array in inputs().items()}, [key(i)]


def test_a_swap_inside_a_chain_is_refused_and_the_lane_lives_on():
    policy = small_other()
    batcher, runner = step_join(policy)
    ticket = batcher.submit([payload(0)], "train")[0]
    runner.run_once()
    policy.version = 2
    assert runner.run_once() == 1
    with pytest.raises(RuntimeError, match="version 2 were swapped in while 1 chains of version 1.*drain"):
        ticket.future.result(timeout=0)
    again = batcher.submit([payload(0)], "train")[0]
    runner.run_once()
    runner.drain()
    assert again.future.result(timeout=0)["version"] == 2


@pytest.mark.parametrize("batching", ["step_join", "run_to_completion"])
def test_a_request_that_fails_takes_its_batch_along_and_nobody_else(batching):
    batcher = Batcher(8, max_wait_ms=0.0)
    runner = make_runner(batching, served(), batcher, 8)
    good = batcher.submit([payload(0)], "train")[0]
    runner.run_once()  # step_join: it is running when the bad one comes
    row, noise_key = payload(1)
    bad = batcher.submit([({**row, "state": row["state"][:3]}, noise_key)], "train")[0]
    runner.run_once()
    with pytest.raises((RuntimeError, ValueError)):
        bad.future.result(timeout=0)
    runner.drain()
    assert_row(good.future.result(timeout=0), reference("mixed", "train"), 0)
    after = batcher.submit([payload(2)], "train")[0]
    while not after.future.done():
        runner.run_once()
    assert_row(after.future.result(timeout=0), reference("mixed", "train"), 2)


@pytest.mark.parametrize("part", ["denoise", "finish"])
def test_an_error_in_a_step_fails_those_that_took_it_and_the_lane_lives_on(part, monkeypatch):
    batcher, runner = step_join(served())
    tickets = batcher.submit([payload(0), payload(1)], "train")
    with monkeypatch.context() as patch:
        patch.setattr(ServedPolicy, part, lambda *_: 1 / 0)
        assert sum(runner.run_once() for _ in range(STEPS if part == "finish" else 1)) == 2
    for ticket in tickets:
        with pytest.raises(ZeroDivisionError):
            ticket.future.result(timeout=0)
    assert runner.running == 0
    again = batcher.submit([payload(0)], "train")[0]
    runner.run_once()
    runner.drain()
    assert_row(again.future.result(timeout=0), reference("mixed", "train"), 0)


@pytest.mark.parametrize("batching", ["step_join", "run_to_completion"])
def test_a_number_that_is_not_finite_never_leaves(batching):
    batcher = Batcher(8, max_wait_ms=0.0)
    runner = make_runner(batching, served(), batcher, 8)
    row, noise_key = payload(1)
    row = {**row, "state": np.full_like(row["state"], np.nan)}
    ticket = batcher.submit([(row, noise_key)], "train")[0]
    while not ticket.future.done():
        runner.run_once()
    with pytest.raises(FloatingPointError, match="policy, version 3: .* of request \\(5, 101, 1\\).*not finite"):
        ticket.future.result(timeout=0)


def test_an_idle_lane_comes_back_for_other_work():
    for runner in (RunToCompletion(served(), Batcher(8, 0.0)), step_join(served())[1]):
        assert runner.run_once(timeout=0.01) == 0
        runner.batcher.interrupt()
        assert runner.run_once() == 0


def test_a_policy_without_denoising_steps_is_refused():
    class Plain(VLAPolicy):
        pass

    with pytest.raises(ValueError, match="'step_join' with policy Plain.*batching=run_to_completion"):
        make_runner("step_join", ServedPolicy(Plain()), Batcher(8, 0.0), 8)
    with pytest.raises(ValueError, match="vla3.stages.interaction.batching: 'together', expected one of"):
        make_runner("together", served(), Batcher(8, 0.0), 8)
