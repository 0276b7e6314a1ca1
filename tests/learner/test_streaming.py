"""The streamed gradient against the full batch's, in float64, through the engine's own code."""

import asyncio
import types

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from vla3_plugin.config import AlgorithmConfig, TrainingStage
from vla3_plugin.learner import fields
from vla3_plugin.learner.actor_worker import ActorWorker
from vla3_plugin.learner.engine_fsdp import VLAFSDPEngine
from vla3_plugin.learner.objective import Objective, kept_logprobs
from vla3_plugin.learner.streamed_counts import StreamedCounts

CHUNK, DIM = 3, 2


class TinyPolicy(nn.Module):
    """Gaussian with a linear mean: enough for every term of the loss to have a gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.mean, self.value = nn.Linear(4, CHUNK * DIM).double(), nn.Linear(4, 1).double()
        self.log_std = nn.Parameter(torch.zeros(DIM, dtype=torch.float64))

    def forward(self, batch, task):
        mean = self.mean(batch["state"]).view(-1, CHUNK, DIM)
        logprob = -0.5 * ((batch["trace.raw"] - mean) / self.log_std.exp()).square() - self.log_std
        return {
            "logprob": logprob,
            "entropy": self.log_std.expand_as(logprob),
            "value": self.value(batch["state"]),
        }


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def engine():
    """verl's engine around a module that is not sharded: what is tested is the accumulation, not FSDP."""
    found = VLAFSDPEngine.__new__(VLAFSDPEngine)
    found.module, found.scaler = TinyPolicy(), None
    found.model_config = types.SimpleNamespace(cpu_threads=1)
    found.engine_config = types.SimpleNamespace(use_no_sync_for_gradient_accumulation=True)
    found.optimizer = torch.optim.SGD(found.module.parameters(), lr=0.0)
    found.get_data_parallel_group = lambda: None
    found.get_data_parallel_size = lambda: 1
    found.kept = {}

    def step():
        found.kept = {name: p.grad.clone() for name, p in found.module.named_parameters()}
        return 0.0

    found.optimizer_step = step
    return found


def samples(count, seed, spread=True):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    lengths = torch.randint(1, CHUNK + 1, (count, 1), generator=g)
    valid = torch.arange(CHUNK) < lengths
    policy_mask = (torch.rand(count, 1, 1, generator=g) < (0.7 if spread else 1.0)).double()
    return TensorDict(
        {
            "in.state": normal(count, 4),
            "trace.raw": normal(count, CHUNK, DIM),
            fields.STEP_MASK: valid,
            fields.LOGPROB: normal(count, CHUNK, DIM) - 1,
            fields.VALUE: normal(count, 1),
            fields.ADVANTAGES: normal(count, 1),
            fields.RETURNS: normal(count, 1),
            fields.POLICY_MASK: policy_mask,
            fields.VALUE_MASK: torch.ones(count, 1, dtype=torch.float64),
            fields.REF_LOGPROB: normal(count, CHUNK, DIM) - 1,
            fields.VERSION: torch.randint(3, 6, (count, 1), generator=g),
        },
        batch_size=count,
    )


def gradients(objective, data, micro_batches):
    """Of the full batch in one pass, and of the same samples streamed in ``micro_batches`` (lists of rows)."""
    from verl.utils import tensordict_utils as tu

    full = engine()
    everything = data.clone()
    tu.assign_non_tensor(everything, micro_batch_size_per_gpu=len(data), learner_version=5, first_pass=True)
    full.forward_backward_batch(everything, objective)
    expected = {name: p.grad for name, p in full.module.named_parameters()}
    streamed = engine()
    for i, rows in enumerate(micro_batches):
        piece = data[torch.tensor(rows)].clone()
        tu.assign_non_tensor(piece, learner_version=5, first_pass=True)
        streamed.accumulate(piece, objective, first=i == 0, last=i == len(micro_batches) - 1)
    return expected, streamed.kept


@st.composite
def orders(draw):
    count = draw(st.integers(2, 24))
    rows = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=6)))
    return count, [list(rows[a:b]) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]


OBJECTIVES = {
    "ppo": Objective(AlgorithmConfig()),
    "grpo with a reference": Objective(AlgorithmConfig(adv_type="grpo", loss_type="actor", group_size=2, kl_beta=0.3)),
    "decoupled": Objective(AlgorithmConfig(), TrainingStage(enabled=True, behave_weight_threshold=None)),
    "truncated": Objective(AlgorithmConfig(), TrainingStage(enabled=True, correction="truncated")),
    "interpolated": Objective(AlgorithmConfig(), TrainingStage(enabled=True, proximal="interpolate")),
    "entropy": Objective(AlgorithmConfig(entropy_bonus=0.1, adv_type="grpo", loss_type="actor", group_size=2)),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=25, deadline=None)
@given(order=orders(), seed=st.integers(0, 1000))
def test_streamed_gradient_is_the_full_batch_gradient_whatever_the_order(name, order, seed):
    count, micro_batches = order
    objective = OBJECTIVES[name]
    data = samples(count, seed, spread=objective.algorithm.loss_type == "actor")
    expected, streamed = gradients(objective, data, micro_batches)
    if not data[fields.POLICY_MASK].any():
        assert not streamed, "nothing weighs anything: no optimizer step"
        return
    for parameter, gradient in expected.items():
        scale = max(1e-12, float(gradient.abs().max()))
        assert float((streamed[parameter] - gradient).abs().max()) <= 1e-10 * scale, parameter


def test_terms_counted_in_varying_ratios_are_refused_not_mixed_up():
    counts = StreamedCounts()
    assert counts.add({"policy": 4.0, "value": 2.0}) == {"policy_count": 1.0, "value_count": 0.5}
    assert counts.add({"policy": 0.0, "value": 0.0}) == {"policy_count": 1.0, "value_count": 1.0}, "padding"
    with pytest.raises(ValueError, match=r"vla3\.algorithm\.reward_type.*vla3\.stages\.streaming"):
        counts.add({"policy": 3.0, "value": 2.0})
    assert counts.policy == 7.0


def old_samples():
    data = samples(6, 3, spread=False)
    data[fields.VERSION] = torch.tensor([[5], [5], [4], [4], [3], [3]])
    return data


def test_samples_of_the_learners_own_version_are_clipped_around_the_behaviour_policy():
    """At lag 0 the decoupled objective is plain PPO, whatever was recomputed."""
    from verl.utils import tensordict_utils as tu

    data = old_samples()
    data[fields.VERSION] = torch.full((6, 1), 5)
    data[fields.PROXIMAL] = torch.randn(6, CHUNK, DIM, dtype=torch.float64)
    found = []
    for stage in (TrainingStage(), TrainingStage(enabled=True), TrainingStage(enabled=True, correction="truncated")):
        batch = data.clone()
        tu.assign_non_tensor(batch, learner_version=5, policy_count=1.0, value_count=1.0)
        output = TinyPolicy()(fields.policy_batch(batch), "evaluate")
        found.append(Objective(AlgorithmConfig(), stage)(output, batch)[0].item())
    assert found[1] == pytest.approx(found[0], rel=1e-12) and found[2] == pytest.approx(found[0], rel=1e-12)


def test_the_correction_changes_what_old_samples_weigh():
    from verl.utils import tensordict_utils as tu

    losses = {}
    for correction in ("none", "decoupled", "truncated"):
        batch = old_samples()
        tu.assign_non_tensor(batch, learner_version=5, policy_count=1.0, value_count=1.0, first_pass=True)
        output = TinyPolicy()(fields.policy_batch(batch), "evaluate")
        stage = TrainingStage(enabled=True, correction=correction, behave_weight_threshold=1.5)
        losses[correction] = Objective(AlgorithmConfig(), stage)(output, batch)[0].item()
    assert len({round(loss, 9) for loss in losses.values()}) == 3


def test_in_a_later_mini_batch_old_samples_are_clipped_too_although_it_is_their_first_pass():
    """They were clipped around the learner of that very moment: every ratio was 1, and nothing held the rest of the
    epoch near the policy that the step began with."""
    from verl.utils import tensordict_utils as tu

    objective = Objective(AlgorithmConfig(), TrainingStage(enabled=True))
    logprob, now = torch.randn(6, CHUNK, DIM, dtype=torch.float64), 5
    found = {}
    for moved in (False, True):
        batch = old_samples()
        tu.assign_non_tensor(batch, learner_version=now, first_pass=True, moved=moved)
        found[moved] = objective._proximal(batch, logprob, batch[fields.LOGPROB])
        old = batch[fields.VERSION].flatten() < now
        kept = kept_logprobs(batch, logprob)
        torch.testing.assert_close(kept[old], found[moved][old])  # later epochs are clipped around the same
    behaviour = batch[fields.LOGPROB]
    for age, share in ((1, 1 / 2), (2, 2 / 3)):
        rows = batch[fields.VERSION].flatten() == now - age
        torch.testing.assert_close(found[False][rows], logprob[rows])
        torch.testing.assert_close(found[True][rows], torch.lerp(behaviour, logprob, share)[rows])
    fresh = batch[fields.VERSION].flatten() == now
    for proximal in found.values():
        torch.testing.assert_close(proximal[fresh], behaviour[fresh])


def test_an_old_samples_values_are_held_near_the_learners_not_near_its_own_versions():
    """A critic that had moved on by more than the clip got no gradient, or was pulled back to where it had been."""
    from verl.utils import tensordict_utils as tu

    objective, values = Objective(AlgorithmConfig(), TrainingStage(enabled=True)), torch.full((6, 1), 9.0).double()
    batch = old_samples()
    tu.assign_non_tensor(batch, learner_version=5, first_pass=True)
    old = batch[fields.VERSION] < 5
    found = objective._old_values(batch, values)
    assert torch.equal(found, torch.where(old, values, batch[fields.VALUE])) and old.any() and not old.all()
    for stage in (TrainingStage(), TrainingStage(enabled=True, correction="none")):
        assert Objective(AlgorithmConfig(), stage)._old_values(batch, values) is batch[fields.VALUE]
    later = batch.clone()
    tu.assign_non_tensor(later, first_pass=False)  # what the first pass said is in the store by then
    assert objective._old_values(later, values) is later[fields.VALUE]


def test_a_later_pass_without_proximal_log_probs_is_refused_not_guessed():
    from verl.utils import tensordict_utils as tu

    batch = old_samples()
    tu.assign_non_tensor(batch, learner_version=5, policy_count=1.0, value_count=1.0)
    with pytest.raises(RuntimeError, match="no proximal log-probs"):
        Objective(AlgorithmConfig(), TrainingStage(enabled=True))(
            TinyPolicy()(fields.policy_batch(batch), "evaluate"), batch
        )


@pytest.mark.parametrize("way", ["whole batch", "streamed"])
def test_the_learner_computes_with_its_own_threads_whatever_took_them_from_it(way):
    """TransferQueue's client leaves the calling thread with one, or whatever torch started with."""
    from verl.utils import tensordict_utils as tu

    found, data = engine(), samples(4, 0)
    found.model_config.cpu_threads = 2
    objective = OBJECTIVES["ppo"]
    seen: list[int] = []
    found.module.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    tu.assign_non_tensor(data, micro_batch_size_per_gpu=4, learner_version=5, first_pass=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        if way == "streamed":
            found.accumulate(data, objective, first=True, last=True)
        else:
            found.forward_backward_batch(data, objective)
    finally:
        torch.set_num_threads(before)
    assert seen == [2]


def test_updates_without_a_finite_gradient_change_nothing_are_counted_and_end_the_run_after_ten():
    found = VLAFSDPEngine.__new__(VLAFSDPEngine)
    found.module, found.scaler = TinyPolicy(), None
    found.optimizer_config, found._qat_enabled = types.SimpleNamespace(clip_grad=1.0), False
    found.optimizer = torch.optim.SGD(found.module.parameters(), lr=0.1)
    before = [p.detach().clone() for p in found.module.parameters()]

    def step(value):
        for parameter in found.module.parameters():
            parameter.grad = torch.full_like(parameter, value)
        found.optimizer_step()

    for _ in range(9):
        step(float("nan"))
    assert found.skipped_updates == 9
    assert all(torch.equal(p, old) for p, old in zip(found.module.parameters(), before, strict=True))
    step(1.0)
    assert not torch.equal(next(iter(found.module.parameters())), before[0])
    with pytest.raises(FloatingPointError, match="10 updates in a row"):
        for _ in range(10):
            step(float("inf"))


@settings(max_examples=20, deadline=None)
@given(arrival=st.permutations(range(5)))
def test_the_gradient_lane_computes_in_the_drivers_order_whatever_arrives_first(arrival):
    """Also where one call fails. Log-probs between micro-batches used to go first on the rank that fetched sooner."""
    worker = ActorWorker.__new__(ActorWorker)
    worker._turn, worker._expected, worker._gradients, worker._since = asyncio.Condition(), 0, None, None
    computed = []

    def compute(turn):
        computed.append(turn)
        if turn == 2:
            raise ValueError("not finite")

    async def all_of_them():
        calls = [asyncio.ensure_future(worker._in_turn(turn, compute, turn)) for turn in arrival]
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(asyncio.wait_for(all_of_them(), 20))
    worker._gradients.shutdown()
    assert computed == list(range(5)) and sum(isinstance(answer, ValueError) for answer in found) == 1
