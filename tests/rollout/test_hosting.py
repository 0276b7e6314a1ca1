"""Env workers in their policy's process: images go on by reference, and everything else is as it is elsewhere."""

import asyncio
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toy_env
from whole_runs import Living, mode_overrides, wait_for

from vla3_plugin.contract import ContractError, Episode
from vla3_plugin.envs.inline import InlineEnv
from vla3_plugin.envs.process import EnvError, EnvProcess
from vla3_plugin.policies.base import ActionChunk, VLAPolicy
from vla3_plugin.policies.processing import Normalisation, Processing
from vla3_plugin.policies.serve import ServedPolicy
from vla3_plugin.rollout.episodes import Assignment, EpisodeQueue
from vla3_plugin.rollout.hosting import EnvHost, LocalPolicy
from vla3_plugin.rollout.inference_lane import BatchedLane, DirectLane
from vla3_plugin.rollout.interaction import Interaction
from vla3_plugin.rollout.policy_client import NoAnswer, PolicyClient
from vla3_plugin.rollout.supervision import EnvReplaced, Limits, SupervisedEnv
from vla3_plugin.telemetry.ledger import read_ledger
from vla3_plugin.telemetry.timeline import Timeline

ENVS = str(Path(__file__).parents[1] / "envs")
SLOTS = 3
STAGE = {"max_batch_size": SLOTS, "max_wait_ms": 2000.0, "max_queue": 64, "batching": "run_to_completion"}


class Watching(VLAPolicy):
    """Acts at random, and remembers where its images lay and what was in them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def act(self, inputs, noise_keys, mode):
        pixels = inputs["pixels"]
        self.seen.append((pixels.data_ptr(), pixels.nbytes, pixels.clone()))
        noise = [np.random.default_rng([k & 0xFFFF for k in key]).uniform(-1, 1, (4, 3)) for key in noise_keys]
        zeros = torch.zeros(len(noise_keys), 4, 3)
        value = pixels.flatten(1).float().mean(1, keepdim=True)  # says what was looked at
        return ActionChunk(torch.tensor(np.array(noise, np.float32)), zeros, value, {"x": zeros})


class BlockEnv(toy_env.ToyEnv):
    """Draws the images of all slots into one block."""

    def __init__(self, **options):
        super().__init__(**options)
        self.block = np.zeros((self.num_slots, 64, 64, 3), np.uint8)

    def _observe(self, slot):
        observation = super()._observe(slot)
        self.block[slot] = observation.images["top"]
        observation.images["top"] = self.block[slot]
        return observation


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def processing():
    as_it_is = Normalisation("identity")
    return Processing(["top"], (64, 64), state_dim=2, action_dim=3, state=as_it_is, action=as_it_is)


def play(env, lane_of, loop, episodes=9, mode="eval"):
    """Episodes of equal length, so that all slots are asked about together. Returns (policy, trajectories)."""
    policy = Watching()
    served = ServedPolicy(policy, version=0)
    lane = lane_of(served)
    client = PolicyClient([LocalPolicy(SimpleNamespace(served=served, lane=lane), loop)], deadline_s=20)
    record = processing()

    def prepare(observations):
        return {name: tensor.numpy() for name, tensor in record.stack(observations).items()}

    interaction = Interaction([env], prepare, client.act, seed=3)
    plan = [Assignment(Episode(i, i % 2, 0, 100 + i, i), mode, True, False) for i in range(episodes)]
    try:
        found = {t.episode.episode_id: t for _, t in interaction.run(EpisodeQueue(plan, closed=True))}
    finally:
        interaction.close()
        lane.close(RuntimeError("over"))
    return policy, found


LANES = {
    "direct": lambda served: DirectLane(served, Timeline("policy0")),
    "batched": lambda served: BatchedLane(served, Timeline("policy0"), STAGE),
}


@pytest.mark.parametrize("lane", LANES)
def test_a_policy_in_the_simulators_process_sees_the_simulators_own_images(loop, lane):
    env = InlineEnv(f"{__name__}:BlockEnv", {"ignore_terminations": True}, num_slots=SLOTS)
    block = env._env.block.__array_interface__["data"][0]
    policy, found = play(env, LANES[lane], loop)
    assert policy.seen and all((address, size) == (block, env._env.block.nbytes) for address, size, _ in policy.seen)
    assert len(found) == 9


@pytest.mark.parametrize("lane", LANES)
def test_between_processes_the_child_writes_an_image_once_and_the_policy_reads_it_there(loop, lane):
    env = EnvProcess(
        "toy_env:ToyEnv", {"ignore_terminations": True}, num_slots=SLOTS, timeout_s=20, paths=[ENVS], borrow=True
    )
    block = env._block["0.observation.top"].__array_interface__["data"][0]
    policy, found = play(env, LANES[lane], loop)
    assert policy.seen and {address for address, _, _ in policy.seen} == {block}
    assert len(found) == 9


def test_what_is_kept_of_an_episode_is_what_the_policy_saw_and_not_what_lay_there_later(loop):
    env = InlineEnv(f"{__name__}:BlockEnv", {"ignore_terminations": True}, num_slots=SLOTS)
    policy, found = play(env, LANES["direct"], loop, episodes=SLOTS)
    looks = [pixels for _, _, pixels in policy.seen]
    for slot, episode in enumerate(sorted(found)):
        kept = found[episode].samples["in.pixels"]
        assert len(kept) == len(looks) > 2 and len(np.unique(kept, axis=0)) > 1
        np.testing.assert_array_equal(kept, np.stack([pixels[slot].numpy() for pixels in looks]))


@pytest.mark.parametrize("kind", ["inline", "child"])
def test_an_episodes_end_is_valued_as_it_was_though_its_slot_has_begun_another(loop, kind):
    """The next episode is reset, into the same memory, before the policy is asked about the end of the last."""
    options = {"ignore_terminations": True, "max_steps": 8}
    if kind == "inline":
        env = InlineEnv(f"{__name__}:BlockEnv", options, num_slots=2)
    else:
        env = EnvProcess("toy_env:ToyEnv", options, num_slots=2, timeout_s=20, paths=[ENVS], borrow=True)
    _, found = play(env, LANES["direct"], loop, episodes=6, mode="train")
    copier = toy_env.ToyEnv(num_slots=1, **options)
    for index, trajectory in found.items():
        copier.reset(0, Episode(index, index % 2, 0, 100 + index, index))
        for chunk in range(2):
            noise = np.random.default_rng([k & 0xFFFF for k in (3, index, chunk)]).uniform(-1, 1, (1, 4, 3))
            end = copier.chunk_step([0], noise.astype(np.float32))[0]
        assert trajectory.samples["bootstrap"][-1] == pytest.approx(
            end.final_observation.images["top"].mean(), rel=1e-5
        )


def test_lent_images_are_those_that_are_copied_out():
    """And a slot's stay as they were while another slot goes on."""
    actions = np.random.default_rng(0).uniform(-1, 1, (1, 4, 3)).astype(np.float32)
    with (
        EnvProcess("toy_env:ToyEnv", num_slots=2, timeout_s=20, paths=[ENVS], borrow=True) as lender,
        EnvProcess("toy_env:ToyEnv", num_slots=2, timeout_s=20, paths=[ENVS]) as copier,
    ):
        for slot in (0, 1):
            lent, copied = (env.reset(slot, Episode(slot, slot, 0, 7 + slot, 0)) for env in (lender, copier))
            np.testing.assert_array_equal(lent.images["top"], copied.images["top"])
        kept, mine = lent.images["top"], lent.images["top"].copy()
        lender.chunk_step([0], actions)
        np.testing.assert_array_equal(kept, mine)
        lender.chunk_step([1], actions)
        assert (kept != mine).any(), "lent, not given"


class Hesitant:
    """A lane that does not answer."""

    async def act(self, inputs, keys, mode):
        await asyncio.sleep(3600)


def test_a_policy_that_does_not_answer_in_time_is_named_and_its_request_is_withdrawn(loop):
    local = LocalPolicy(SimpleNamespace(served=SimpleNamespace(version=0), lane=Hesitant()), loop)
    with pytest.raises(NoAnswer):
        local.act({}, [(0, 0, 0)], "train", timeout=0.05)
    with pytest.raises(TimeoutError, match="no policy worker answered 1 requests within vla3.deadline_s = 0.2 s"):
        PolicyClient([local], deadline_s=0.2).act({}, [(0, 0, 0)], "train")
    time.sleep(0.1)
    assert not asyncio.all_tasks(loop)


def test_an_error_of_the_policy_that_is_a_timeout_is_not_taken_for_its_silence(loop):
    class Failing:
        async def act(self, inputs, keys, mode):
            raise TimeoutError("the tokenizer waits for a lock")

    local = LocalPolicy(SimpleNamespace(served=SimpleNamespace(version=0), lane=Failing()), loop)
    with pytest.raises(TimeoutError, match="waits for a lock"):
        PolicyClient([local], deadline_s=20).act({}, [(0, 0, 0)], "train")


def test_who_asks_for_an_env_worker_that_is_still_being_started_is_told_nothing(loop):
    """A step that ended while a killed policy worker built its simulators anew used to end the run: KeyError."""
    host = EnvHost(None)
    for method in ("drain_timeline", "close"):
        assert asyncio.run_coroutine_threadsafe(host.call(0, method), loop).result(5) == []
    with pytest.raises(KeyError):
        asyncio.run_coroutine_threadsafe(host.call(0, "assign", []), loop).result(5)


def test_a_policy_without_weights_is_not_asked(loop):
    empty = LocalPolicy(SimpleNamespace(served=SimpleNamespace(version=-1), lane=Hesitant()), loop)
    with pytest.raises(TimeoutError, match="the policy of this process: NotServingError: it was restarted"):
        PolicyClient([empty], deadline_s=0.3).act({}, [(0, 0, 0)], "train")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "the physics diverged"),
        ("nan state", "state is not finite"),
        ("image type", "expected uint8"),
    ],
)
def test_a_simulator_in_this_process_is_held_to_the_same_declaration(fault, said):
    env = InlineEnv("toy_env:FaultyEnv", {"fault": fault}, name="toy/0")
    env.reset(0, Episode(41, 1, 0, 5, 0))
    with pytest.raises(
        EnvError, match=f"toy/0, in this process, while executing a chunk.*episode_id=41.*{said}"
    ) as bad:
        env.chunk_step([0], np.zeros((1, 4, 3), np.float32))
    assert isinstance(bad.value.__cause__, RuntimeError if fault == "raise" else ContractError)
    with pytest.raises(EnvError, match="while starting: TypeError.*bad_option"):
        InlineEnv("toy_env:ToyEnv", {"bad_option": 1})


class ShortEnv(toy_env.ToyEnv):
    """Breaks a promise: it forgets the last step. And once it has failed it cannot be closed."""

    def chunk_step(self, slots, actions, record=False):
        return super().chunk_step(slots, actions[:, :-1], record)

    def close(self):
        raise RuntimeError("no context")


def test_one_that_fails_and_cannot_be_closed_either_is_replaced(capsys):
    told = []
    env = SupervisedEnv(lambda: InlineEnv(f"{__name__}:ShortEnv", name="toy/0"), Limits(failures=2), told.append)
    for _ in range(2):
        env.reset(0, Episode(41, 1, 0, 5, 0))
        with pytest.raises((EnvReplaced, EnvError), match="3 steps for a chunk of 4"):
            env.chunk_step([0], np.zeros((1, 4, 3), np.float32))
    assert [event["kind"] for event in told] == ["env_replaced"]
    assert "toy/0, in this process, while closing: RuntimeError: no context" in capsys.readouterr().err


HOSTED = ["vla3.env.host=policy_worker", "vla3.env.workers=2", "actor_rollout_ref.rollout.n_gpus_per_node=2"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_policy_worker_that_is_killed_takes_its_env_worker_along_and_both_come_back(start_run, line, tmp_path):
    run = Living(
        start_run, tmp_path, *line, *mode_overrides("ppo-asynchronous"), *HOSTED,
        "trainer.total_training_steps=100000", "trainer.val_before_train=false", "trainer.save_freq=50",
        "vla3.env.shards_per_worker=1", "vla3.env.envs_per_shard=4", "vla3.heartbeat_s=8", "vla3.worker_start_s=90",
        "+vla3.env.options.delay_s=0.05", "vla3.env.nice=2",
    )  # fmt: skip
    try:
        run.goes_on(3, 200)
        assert not run.processes("ray::EnvWorker"), "it has no process of its own"
        for name, further in (("vla3_plugin.envs.child", 2), ("ray::PolicyWorker", 0)):
            assert {p.nice() for p in run.processes(name)} == {os.nice(0) + further}, name
        run.processes("ray::PolicyWorker")[-1].kill()
        run.goes_on(4, 120)
        wanted = {"policy_worker_lost", "policy_worker_restarted", "env_worker_lost", "env_worker_restarted"}
        assert wait_for(lambda: wanted <= {fault["kind"] for fault in run.faults}, 60), (run.faults, run.tail())
        run.goes_on(2, 120)
        run.process.terminate()
        assert wait_for(lambda: run.process.poll() is not None, 45), run.tail()
        assert wait_for(lambda: not run.marked(), 10)
        newest = max((run.directory / "checkpoints").glob("global_step_*"), key=lambda p: int(p.name.split("_")[-1]))
        account = read_ledger(run.directory, last_step=int(newest.name.split("_")[-1]))
        assert account.twice == []
    finally:
        for process in run.marked():
            process.kill()
