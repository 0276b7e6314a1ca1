"""megatron-core's data parallelism around a policy: real ranks over gloo, held to the full batch and to FSDP's engine.

What a rank finds it writes down; the tests read it. Without megatron-core only the refusals run.
"""

import importlib.metadata
import importlib.util
import itertools
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vla3_plugin import config_megatron
from vla3_plugin.config import AlgorithmConfig, TrainingStage
from vla3_plugin.learner import fields
from vla3_plugin.learner.objective import Objective

ROOT = Path(__file__).parents[1]
OBJECTIVES = {
    "ppo": Objective(AlgorithmConfig()),
    "grpo": Objective(AlgorithmConfig(adv_type="grpo", loss_type="actor", group_size=2, kl_beta=0.3)),
    "decoupled": Objective(AlgorithmConfig(), TrainingStage(enabled=True, behave_weight_threshold=None)),
}
# rows of a mini-batch of 12, by world size, rank and micro-batch: as they happen to arrive
ARRIVALS = {1: [[[3], [0, 7, 8, 11, 1], [2, 4], [5, 6, 9, 10]]], 2: [[[3, 0, 7, 8, 11]], [[1], [2, 4, 5, 6], [9, 10]]]}
WRAPPERS = {
    f"overlap={overlap} sharded={sharded}": {"overlap_grad_reduce": overlap, "use_distributed_optimizer": sharded}
    for overlap, sharded in itertools.product((False, True), (True, False))
}
PRESET = "pi0-nano-maniskill"
STEPS, VALUE_LR, LR = 4, 3e-3, 1e-3


# ---------------------------------------------------------------- what a rank does


def streamed_gradients(engine_class):
    """Largest error relative to each parameter's largest gradient, of the full batch in one piece in plain torch."""
    from test_streaming import TinyPolicy, samples
    from verl.utils import tensordict_utils as tu

    rank, world = dist.get_rank(), dist.get_world_size()

    class GradientAlone(engine_class):
        """In float64, which megatron's optimizers do not take."""

        def initialize(self):
            from vla3_plugin.learner.megatron_cpu import megatron_device

            with megatron_device():
                self.module = self._wrapped(TinyPolicy())

        def optimizer_zero_grad(self):
            self.module.zero_grad_buffer()

        def _take_step(self):
            self.steps = getattr(self, "steps", 0) + 1
            if self.module.ddp_config.use_distributed_optimizer:
                for group, size in itertools.product(self.module.bucket_groups, [dist.get_world_size()]):
                    for bucket in group.buckets:
                        part = bucket.grad_data.chunk(size)[dist.get_rank()].clone()
                        dist.all_gather(list(bucket.grad_data.chunk(size)), part)
            self.kept = {name: p.main_grad.clone() for name, p in self._inner.named_parameters()}
            return 0.0

    found = {}
    for (name, objective), (wrapper, settings) in itertools.product(OBJECTIVES.items(), WRAPPERS.items()):
        data = samples(12, seed=3, spread=objective.algorithm.loss_type == "actor")
        whole, policy = data.clone(), TinyPolicy()
        counts = {f"{term}_count": count for term, count in objective.counts(data).items()}
        tu.assign_non_tensor(whole, learner_version=5, first_pass=True, **counts)
        objective(policy(fields.policy_batch(whole), "evaluate"), whole)[0].backward()
        expected = {name: p.grad for name, p in policy.named_parameters()}

        engine = build(engine_class=GradientAlone, grad_reduce_in_fp32=False, bucket_size=8, **settings)
        errors = []
        for _ in range(2):  # with overlap the first is the one in which megatron learns the order
            for i, rows in enumerate(ARRIVALS[world][rank]):
                time.sleep(0.02 * rank)
                piece = data[torch.tensor(rows)].clone()
                tu.assign_non_tensor(piece, learner_version=5, first_pass=True)
                engine.accumulate(piece, objective, first=i == 0, last=i == len(ARRIVALS[world][rank]) - 1)
            errors.append(largest(engine.kept, expected))
        mine = data[torch.tensor([row for rows in ARRIVALS[world][rank] for row in rows])].clone()
        tu.assign_non_tensor(mine, learner_version=5, first_pass=True, micro_batch_size_per_gpu=2)
        with engine.train_mode():
            engine.train_batch(mine, objective)
        errors.append(largest(engine.kept, expected))
        found[name, wrapper] = errors, engine.steps
    return found


def largest(found, expected):
    return max(float((found[name] - g).abs().max()) / max(1e-12, float(g.abs().max())) for name, g in expected.items())


def build(engine_class=None, model=None, optim=None, **settings):
    from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine import EngineRegistry

    from vla3_plugin.learner.model_config import VLAModelConfig

    sharded, forward_only = settings.pop("use_distributed_optimizer", True), settings.pop("forward_only", False)
    options = {"freeze_vlm": True}
    given = {
        "model_config": VLAModelConfig(**({"path": PRESET, "options": options, "value_lr": VALUE_LR} | (model or {}))),
        "engine_config": McoreEngineConfig(
            use_distributed_optimizer=sharded, forward_only=forward_only, override_ddp_config=settings
        ),
        "optimizer_config": McoreOptimizerConfig(**optimizer_settings(), lr_decay_style="constant", **(optim or {})),
        "checkpoint_config": None,
    }
    engine = (
        engine_class(**given)
        if engine_class
        else EngineRegistry.new(model_type="vla_policy", backend="megatron", **given)
    )
    engine.initialize()
    return engine


def optimizer_settings():
    return {
        "lr": LR, "weight_decay": 0.1, "betas": (0.8, 0.95), "clip_grad": 0.5, "lr_warmup_steps": 2,
        "total_training_steps": 100,
    }  # fmt: skip


def fsdp():
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
    from verl.workers.engine import EngineRegistry

    from vla3_plugin.learner.model_config import VLAModelConfig

    engine = EngineRegistry.new(
        model_type="vla_policy",
        backend="fsdp2",
        model_config=VLAModelConfig(path=PRESET, options={"freeze_vlm": True}, value_lr=VALUE_LR),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", use_torch_compile=False, mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"}
        ),
        optimizer_config=FSDPOptimizerConfig(**optimizer_settings()),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def batch(policy, count, seed):
    """Samples of the policy's own, with made-up advantages and returns; the same on every rank."""
    from policy_inputs import keys, stored
    from tensordict import TensorDict

    g = torch.Generator().manual_seed(seed)
    processing = policy.processing
    pixels = (count, len(processing.cameras), *processing.image_size, 3)
    inputs = {
        "pixels": torch.randint(0, 255, pixels, dtype=torch.uint8, generator=g),
        "state": torch.randn(count, processing.state_dim, generator=g),
        "input_ids": torch.ones(count, 6, dtype=torch.int64),
        "attention_mask": torch.ones(count, 6, dtype=torch.int64),
    }
    chunk = policy.eval().act(inputs, keys(count), "train")
    inner = stored(inputs, chunk)
    ones = torch.ones(count, 1)
    data = {name if name.startswith("trace.") else f"in.{name}": tensor for name, tensor in inner.items()}
    data = {k if v.dim() > 1 else f"{k}{fields.SCALAR}": v if v.dim() > 1 else v[:, None] for k, v in data.items()}
    data |= {
        fields.STEP_MASK: torch.ones(chunk.logprob.shape[:2], dtype=torch.bool),
        fields.LOGPROB: chunk.logprob + 0.001 * torch.randn(chunk.logprob.shape, generator=g),
        fields.VALUE: chunk.value,
        fields.ADVANTAGES: torch.randn(count, 1, generator=g),
        fields.RETURNS: chunk.value + torch.randn(chunk.value.shape, generator=g),
        fields.POLICY_MASK: ones[:, :, None],
        fields.VALUE_MASK: torch.ones_like(chunk.value),
        fields.VERSION: 5 * torch.ones(count, 1, dtype=torch.int64),
    }
    return TensorDict(data, batch_size=count)


def take_step(engine, seed):
    """One streamed mini-batch of 12, as it arrives; returns its metrics and the learning rate after it."""
    from verl.utils import tensordict_utils as tu

    from vla3_plugin.policies.registry import load_policy

    rank, world = dist.get_rank(), dist.get_world_size()
    # parts of the ranks are alike in number: FSDP gathers in every forward
    arrivals = [torch.arange(12).chunk(world)[rank][a:b] for a, b in ((0, 1), (1, 4), (4, 12)) if a < 12 // world]
    data = batch(load_policy(PRESET), 12, seed)
    for i, rows in enumerate(arrivals):
        piece = data[rows].clone()
        tu.assign_non_tensor(piece, learner_version=5, first_pass=True)
        output = engine.accumulate(piece, OBJECTIVES["ppo"], first=i == 0, last=i == len(arrivals) - 1)
    return output["metrics"], engine.lr_scheduler_step()


def weights(engine):
    return dict(engine.get_per_tensor_param()[0])


def steps_beside_fsdp():
    ours, theirs = build(), fsdp()
    start = weights(ours)
    found = {"start": largest(start, weights(theirs)), "trains": set(dict(ours.trained_tensors()))}
    found["same names"] = start.keys() == weights(theirs).keys() == ours.policy.state_dict().keys()
    found["same trained names"] = found["trains"] == set(dict(theirs.trained_tensors()))
    buffers = [p for buffer in ours.module.buffers for p in buffer.params]
    found["in buffers"] = {n for n, p in ours.policy.named_parameters() if any(p is q for q in buffers)}
    found["requires gradient"] = {n for n, p in ours.policy.named_parameters() if p.requires_grad}
    for step in range(STEPS):
        (mine, lr), (other, other_lr) = take_step(ours, step), take_step(theirs, step)
        found["norms", step] = float(mine["grad_norm"]), float(other["grad_norm"])
        found["lr", step] = lr, other_lr
    found["group lrs"] = sorted(group["lr"] for group in ours.optimizer.param_groups)
    now, expected = weights(ours), weights(theirs)
    found["moved"] = {name for name in start if not torch.equal(now[name], start[name])}
    found["error"] = max(float((now[name] - expected[name]).abs().max()) for name in start)
    found["ranks agree"] = all(agree(tensor) for tensor in now.values())
    before = weights(ours)
    ours.optimizer_zero_grad()
    for parameter in ours.module.parameters():
        if parameter.requires_grad:
            parameter.main_grad.fill_(float("nan") if dist.get_rank() == 0 else 1.0)
    ours.module.finish_grad_sync()
    ours.optimizer_step()
    found["skipped"] = ours.skipped_updates, all(torch.equal(t, before[n]) for n, t in weights(ours).items())
    return found


def agree(tensor):
    sent = tensor.detach().clone()
    dist.broadcast(sent, 0)
    return torch.equal(sent, tensor)


def checkpoint(directory, engine_class):
    from vla3_plugin.policies.registry import load_policy

    class Rounded(engine_class):
        """As on a GPU: bfloat16 parameters, float32 gradients and what Adam updates."""

        def _parameter_dtype(self):
            return torch.bfloat16

    found = {}
    for wrapper, sharded, kind in (("sharded", True, None), ("replicated", False, None), ("rounded", True, Rounded)):
        saving = build(engine_class=kind, use_distributed_optimizer=sharded)
        for step in range(2):
            take_step(saving, step)
        path = directory / wrapper / "actor"
        saving.save_checkpoint(str(path))
        drawn = torch.rand(3)
        take_step(saving, 2)
        loading = build(engine_class=kind, use_distributed_optimizer=sharded, optim={"lr_decay_steps": 50})
        take_step(loading, 7)  # somewhere else
        loading.load_checkpoint(str(path))
        found[wrapper, "generator"] = torch.equal(torch.rand(3), drawn)
        plain = load_policy(directory / wrapper / "policy").state_dict()
        found[wrapper, "policy"] = all(torch.equal(tensor, plain[name]) for name, tensor in weights(loading).items())
        take_step(loading, 2)
        now, expected = weights(loading), weights(saving)
        found[wrapper, "next step"] = all(torch.equal(now[name], expected[name]) for name in now)
        rates = [[group["lr"] for group in engine.optimizer.param_groups] for engine in (loading, saving)]
        schedule = loading.lr_scheduler
        # its place is the checkpoint's, its horizon the run's: one that is given more steps must not end its decay
        found[wrapper, "lr"] = rates[0] == rates[1] and (schedule.num_steps, schedule.lr_decay_steps) == (3, 50)
        found[wrapper, "dtypes"] = {tensor.dtype for tensor in now.values()}
        found[wrapper, "gradients"] = {buffer.grad_data.dtype for buffer in loading.module.buffers}
        dist.barrier()
        if wrapper == "sharded":
            torch.save({"x": Evil()}, path / f"model_world_size_{dist.get_world_size()}_rank_0.pt")
            dist.barrier()
            try:
                loading.load_checkpoint(str(path))
            except ValueError as error:
                found["pickled code"] = str(error)
    return found


class Evil:
    def __reduce__(self):
        return print, ("code ran",)


def adapters_and_refusals():
    from vla3_plugin.policies.registry import load_policy

    found = {}
    engine = build(model={"lora_rank": 4, "options": {}}, use_distributed_optimizer=True)
    take_step(engine, 0)
    take_step(engine, 1)  # the first has a learning rate of zero
    plain = load_policy(PRESET).state_dict()
    now, again = weights(engine), dict(engine.trained_tensors())
    found["names"] = now.keys() == plain.keys() and again.keys() <= now.keys()
    changed = {name for name in now if not torch.equal(now[name], plain[name])}
    found["changed"] = 0 < len(changed) and changed <= again.keys()
    found["in buffers"] = all(
        "lora_" in name or "value_head" in name
        for name, p in engine._inner.named_parameters()
        if hasattr(p, "main_grad")
    )
    from verl.utils import tensordict_utils as tu

    data = batch(load_policy(PRESET), 4, 0)
    tu.assign_non_tensor(data, micro_batch_size_per_gpu=3)
    with engine.eval_mode():
        asked = engine.infer_batch(data.clone())["model_output"]
        with engine.disable_adapter():
            reference = engine.infer_batch(data.clone())["model_output"]
    found["adapters matter"] = not torch.equal(asked["learner_logprob"], reference["learner_logprob"])
    alone = build(model={"options": {}}, forward_only=True)
    with alone.eval_mode():
        again = alone.infer_batch(data.clone())["model_output"]
    found["alone"] = torch.equal(again["learner_logprob"], reference["learner_logprob"])
    found["reference"] = float((reference["learner_logprob"] - data[fields.LOGPROB]).abs().max())
    try:
        build(overlap_param_gather=True)
    except ValueError as error:
        found["refused"] = str(error)
    unused = build(overlap_grad_reduce=True)
    unused.optimizer_zero_grad()
    try:
        with unused._gradient_sync_context(is_last_micro_batch=True):
            next(p for p in unused.module.parameters() if p.requires_grad).sum().backward()
    except ValueError as error:
        found["unused"] = str(error)
    return found


def bytes_of_an_update():
    from vla3_plugin.learner import collectives
    from vla3_plugin.telemetry import traffic

    engine, world = build(), dist.get_world_size()
    collectives.install(["here"] * world)
    traffic.drain("before")
    take_step(engine, 0)
    (sent, _) = (
        traffic.traffic_metrics(traffic.drain("rank"))[f"traffic/learner/{hop}"] for hop in traffic.HOPS["learner"]
    )
    held = sum(4 * buffer.grad_data.numel() for buffer in engine.module.buffers)
    return sent, 2 * (world - 1) * held // world


def run_rank(rank, world, directory):
    torch.set_num_threads(1)
    sys.path += [str(ROOT), str(ROOT / "learner")]
    import verl  # loads the plugin
    import verl.workers.engine  # noqa: F401

    from vla3_plugin.learner.engine_megatron import VLAMegatronEngine

    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", world), rank=rank, world_size=world)
    found = {"gradients": streamed_gradients(VLAMegatronEngine), "steps": steps_beside_fsdp()}
    found |= {"checkpoint": checkpoint(Path(directory), VLAMegatronEngine), "adapters": adapters_and_refusals()}
    found["bytes"] = bytes_of_an_update()
    torch.save(found, f"{directory}/{rank}.pt")
    dist.destroy_process_group()


# ---------------------------------------------------------------- tests


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def ranks(request, tmp_path_factory):
    pytest.importorskip("megatron.core")
    directory, world = tmp_path_factory.mktemp("ranks"), request.param
    started = [subprocess.Popen([sys.executable, __file__, str(r), str(world), str(directory)]) for r in range(world)]
    try:
        assert [rank.wait(540) for rank in started] == [0] * world
    finally:
        for rank in started:
            rank.kill()
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(world)]


slow = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("objective", OBJECTIVES)
class TestGradient:
    pytestmark = slow

    def test_streamed_in_any_parts_it_is_the_full_batchs(self, ranks, objective, wrapper):
        for found in ranks:
            (first, again, in_one_call), steps = found["gradients"][objective, wrapper]
            assert max(first, again, in_one_call) <= 1e-10
            assert steps == 3, "one an update"


class TestSteps:
    pytestmark = slow

    def test_updates_are_those_of_fsdps_engine(self, ranks):
        for found in (rank["steps"] for rank in ranks):
            assert found["start"] == 0 and found["same names"] and found["same trained names"]
            for step in range(STEPS):
                mine, other = found["norms", step]
                assert mine == pytest.approx(other, rel=1e-4) and mine > 0.5, "clipped"
                assert found["lr", step][0] == pytest.approx(found["lr", step][1], rel=1e-9)
            assert found["group lrs"] == [LR, VALUE_LR]
            assert found["error"] < 2e-6 and found["ranks agree"]

    def test_frozen_parameters_are_in_no_buffer_and_stay(self, ranks):
        for found in (rank["steps"] for rank in ranks):
            assert found["in buffers"] == found["requires gradient"]
            assert found["moved"] and found["moved"] <= found["trains"]

    def test_an_update_without_a_finite_gradient_changes_nothing_on_any_rank(self, ranks):
        assert all(rank["steps"]["skipped"] == (1, True) for rank in ranks)

    @pytest.mark.parametrize("wrapper", ["sharded", "replicated", "rounded"])
    def test_the_step_after_a_checkpoint_is_the_step_that_would_have_come(self, ranks, wrapper):
        for found in (rank["checkpoint"] for rank in ranks):
            assert {what: found[wrapper, what] for what in ("generator", "policy", "next step", "lr")} == dict.fromkeys(
                ("generator", "policy", "next step", "lr"), True
            )
            assert found[wrapper, "dtypes"] == {torch.bfloat16 if wrapper == "rounded" else torch.float32}
            assert found[wrapper, "gradients"] == {torch.float32}

    def test_an_update_is_one_reduce_scatter_and_one_all_gather_however_many_micro_batches(self, ranks):
        for sent, expected in (rank["bytes"] for rank in ranks):
            assert expected <= sent <= expected + 200, "and the few bytes of counts and norm"

    def test_a_checkpoint_with_code_is_not_opened(self, ranks):
        assert all("could run" in rank["checkpoint"]["pickled code"] for rank in ranks)

    def test_adapters_train_alone_and_are_published_merged(self, ranks):
        for found in (rank["adapters"] for rank in ranks):
            assert found["names"] and found["changed"] and found["in buffers"] and found["adapters matter"]
            assert found["alone"], "a reference policy needs neither wrapper nor optimizer"
            assert found["reference"] < 0.01, "without them it is the policy that sampled"

    def test_what_the_wrapper_cannot_do_here_is_refused(self, ranks):
        for found in (rank["adapters"] for rank in ranks):
            assert "overlap_param_gather: this engine has only bucket_size" in found["refused"]
            assert "got no gradient" in found["unused"] and "set it to false" in found["unused"]


def test_without_megatron_core_the_message_says_what_to_install(monkeypatch):
    pytest.importorskip("verl.workers.engine")
    from vla3_plugin.learner.engine_megatron import VLAMegatronEngine

    def absent(name):
        raise ModuleNotFoundError("No module named 'megatron'")

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    with pytest.raises(ImportError, match=r"pip install 'vla3-plugin\[megatron\]'.*or use model_engine=dp"):
        VLAMegatronEngine(None, None, None)


def test_both_devices_have_an_engine_for_megatron():
    from verl.workers.engine import EngineRegistry

    from vla3_plugin.learner.engine_megatron import VLAMegatronEngine

    found = EngineRegistry._engines["vla_policy"]["megatron"]
    assert found == {"cuda": VLAMegatronEngine, "cpu": VLAMegatronEngine}
    assert math.prod(config_megatron._ALLOWED[f"megatron.{kind}_model_parallel_size"][0][0] for kind in
                     ("tensor", "pipeline", "expert")) == 1  # fmt: skip


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
