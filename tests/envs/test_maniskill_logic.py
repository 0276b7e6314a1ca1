"""Book-keeping of ``ManiSkillEnv`` over a simulation made of numpy: chunks, rewards, ends, many slots in one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vla3_plugin.contract import Episode
from vla3_plugin.envs import maniskill
from vla3_plugin.envs.maniskill import ManiSkillEnv
from vla3_plugin.rows import stack_rows


class FakeSimulation:
    """Each row counts its steps from its seed; action 0 of a step says what happens: 0.5 success, -0.5 failure."""

    made: list[FakeSimulation] = []

    def __init__(self, num_envs: int, reward: str, cameras: list[str], size: int, **settings: Any) -> None:
        self.settings, self.cameras, self.size = settings, cameras, size
        space = SimpleNamespace(shape=(7,), low=np.full(7, -1.0), high=np.full(7, 1.0))
        joints = [SimpleNamespace(name=f"joint{i}") for i in range(2)]
        robot = SimpleNamespace(active_joints=joints)
        self.env = SimpleNamespace(
            num_envs=num_envs,
            single_action_space=space,
            control_freq=20,
            agent=SimpleNamespace(robot=robot),
            close=lambda: None,
        )
        self.count = np.zeros(num_envs)
        self.captures = 0
        self.stepped: list[np.ndarray] = []
        FakeSimulation.made.append(self)

    def reset(self, row: int, seed: int) -> None:
        self.count[row] = seed

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.count += 1
        self.stepped.append(actions.copy())
        return actions[:, 0] == 0.5, actions[:, 0] == -0.5, actions[:, 1]

    def worth(self) -> np.ndarray:
        return (0.25 * self.count).astype(np.float32)  # after a reset: of its row and its seed

    def capture(self, images: np.ndarray | None = None) -> dict[str, Any]:
        rows = len(self.count)
        if images is not None:
            self.captures += 1
            assert images.shape == (rows, len(self.cameras), self.size, self.size, 3)
            images[:] = self.count[:, None, None, None, None].astype(np.uint8)
        state = {
            "qpos": np.stack([self.count, self.count], axis=1),
            "is_grasped": np.zeros(rows, np.bool_),
            "tcp_pose": np.zeros((rows, 7)),
            "goal_pos": np.zeros((rows, 3)),
        }
        return {"state": state, "images": images}


@pytest.fixture
def make(monkeypatch):
    FakeSimulation.made = []
    monkeypatch.setattr(maniskill, "Simulation", FakeSimulation)

    def build(num_slots: int = 1, sim_backend: str = "cpu", **options) -> ManiSkillEnv:
        return ManiSkillEnv(num_slots=num_slots, sim_backend=sim_backend, **options)

    return build


def episode(seed: int = 0, **changes: int) -> Episode:
    return Episode(**{"episode_id": 0, "task_id": 0, "init_state_id": 0, "seed": seed, "group_id": 0} | changes)


def chunk(*first: float, slots: int = 1) -> np.ndarray:
    actions = np.zeros((slots, len(first), 7), np.float32)
    actions[:, :, 0] = first
    return actions


def test_state_names_tell_what_each_number_is(make):
    env = make()
    assert env.spec.state_names == [
        "joint0", "joint1", "is_grasped",
        "tcp_pose_x", "tcp_pose_y", "tcp_pose_z", "tcp_pose_qw", "tcp_pose_qx", "tcp_pose_qy", "tcp_pose_qz",
        "goal_pos_x", "goal_pos_y", "goal_pos_z",
    ]  # fmt: skip
    assert env.reset(0, episode(5)).state.tolist() == [5.0, 5.0] + [0.0] * 11


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_chunk_is_drawn_once_at_its_end(make, backend):
    env = make(num_slots=3, sim_backend=backend)
    for slot in range(3):
        env.reset(slot, episode(10 * slot))
    before = sum(sim.captures for sim in FakeSimulation.made)
    results = env.chunk_step([0, 1, 2], chunk(0, 0, 0, 0, slots=3))
    drawn = sum(sim.captures for sim in FakeSimulation.made) - before
    assert drawn == (3 if backend == "cpu" else 1)
    assert [r.observation.images["base_camera"][0, 0, 0] for r in results] == [4, 14, 24]


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_what_slots_show_after_a_chunk_lies_in_one_piece(make, backend):
    env = make(num_slots=3, sim_backend=backend)
    for slot in range(3):
        env.reset(slot, episode(10 * slot))
    shown = [result.observation.images for result in env.chunk_step([0, 1, 2], chunk(0, 0, slots=3))]
    batch = stack_rows([stack_rows([images[camera] for camera in env.spec.cameras]) for images in shown])
    assert np.shares_memory(batch, shown[0]["base_camera"]) and np.shares_memory(batch, shown[2]["hand_camera"])
    assert batch[:, 1, 0, 0, 0].tolist() == [2, 12, 22]


def test_success_ends_the_episode_inside_the_chunk(make):
    env = make()
    env.reset(0, episode())
    result = env.chunk_step([0], chunk(0, 0.5, 0, 0))[0]
    result.check(env.spec, "test")
    assert result.valid.tolist() == [True, True, False, False]
    assert result.terminated.tolist() == [False, True, False, False] and not result.truncated.any()
    assert result.rewards.tolist() == [0, 1, 0, 0] and result.success
    assert result.final_observation.images["base_camera"][0, 0, 0] == 2
    assert len(FakeSimulation.made[0].stepped) == 2
    with pytest.raises(RuntimeError, match="after its episode ended"):
        env.chunk_step([0], chunk(0))


def test_failure_ends_the_episode_without_success(make):
    env = make()
    env.reset(0, episode())
    result = env.chunk_step([0], chunk(-0.5, 0))[0]
    assert result.terminated[0] and not result.success and result.rewards[0] == 0


def test_the_step_limit_truncates_and_success_at_the_limit_terminates(make):
    env = make(max_steps=3)
    env.reset(0, episode())
    result = env.chunk_step([0], chunk(0, 0, 0, 0))[0]
    assert result.truncated.tolist() == [False, False, True, False] and not result.terminated.any()
    env.reset(0, episode())
    result = env.chunk_step([0], chunk(0, 0, 0.5, 0))[0]
    assert result.terminated.tolist() == [False, False, True, False] and not result.truncated.any()


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("sparse", [0, 2, 0, 0, 0]),
        ("relative", [0, 2, 0, -2, 2]),
        ("dense", [1, 1, 1, 1, 1]),
        ("progress", [0.5, 0, 0, 0, 0]),  # from the first state's 0.25 to 0.5, times 2, and no further
    ],
)
def test_rewards_of_an_episode_of_fixed_length(make, reward, expected):
    env = make(reward=reward, reward_coef=2.0, ignore_terminations=True, max_steps=5)
    env.reset(0, episode(1))
    actions = chunk(0, 0.5, 0.5, 0, 0.5)
    actions[..., 1] = 0.5
    result = env.chunk_step([0], actions)[0]
    assert result.rewards.tolist() == expected
    assert not result.terminated.any() and result.truncated[-1] and result.valid.all() and result.success


def test_a_recording_has_a_frame_for_each_valid_step(make):
    env = make()
    env.reset(0, episode(7))
    result = env.chunk_step([0], chunk(0, 0, 0.5, 0), record=True)[0]
    assert result.frames[:, 0, 0, 0].tolist() == [8, 9, 10]


def test_slots_of_one_gpu_simulation_end_on_their_own(make):
    env = make(num_slots=3, sim_backend="gpu")
    assert len(FakeSimulation.made) == 1
    for slot in range(3):
        env.reset(slot, episode(100 * slot))
    actions = chunk(0, 0, 0, 0, slots=3)
    actions[1, 1, 0] = 0.5  # slot 2, since slots come in another order
    first, second, third = env.chunk_step([0, 2, 1], actions)
    assert (first.done, second.done, third.done) == (False, True, False)
    assert second.final_observation.images["base_camera"][0, 0, 0] == 202
    assert first.observation.images["base_camera"][0, 0, 0] == 4
    assert third.observation.images["base_camera"][0, 0, 0] == 104
    assert not FakeSimulation.made[0].stepped[2][2].any()  # nothing is asked of an ended slot
    env.reset(2, episode(50))  # others go on where they were
    results = env.chunk_step([0, 1, 2], chunk(0, slots=3))
    assert [int(r.observation.state[0]) for r in results] == [5, 105, 51]


def test_a_running_slot_of_a_gpu_simulation_cannot_be_left_out(make):
    env = make(num_slots=2, sim_backend="gpu")
    for slot in range(2):
        env.reset(slot, episode())
    with pytest.raises(RuntimeError, match=r"slots \[1\] have running episodes"):
        env.chunk_step([0], chunk(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": "shaped"}, "env.reward is 'shaped'.*'sparse', 'relative', 'dense'"),
        ({"sim_backend": "tpu"}, "env.sim_backend"),
        ({"shader": "toon"}, "env.shader"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"render_backend": "none", "cameras": []}, "env.render_backend is 'none', expected one of"),
        ({"reconfigure": True, "sim_backend": "gpu", "num_slots": 2}, "env.reconfigure.*envs_per_shard: 1"),
        ({"reward": "progress", "sim_backend": "gpu", "num_slots": 2}, "env.reward is 'progress'.*envs_per_shard: 1"),
    ],
)
def test_bad_options_are_named(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_an_episode_of_another_task_is_refused(make):
    env = make()
    for change in ({"task_id": 1}, {"init_state_id": 3}):
        with pytest.raises(ValueError, match="both must be 0"):
            env.reset(0, episode(**change))


def test_the_robot_follows_from_the_cameras(make):
    make()
    make(cameras=["base_camera"])
    assert [sim.settings["robot"] for sim in FakeSimulation.made] == ["panda_wristcam", "panda"]
    assert FakeSimulation.made[0].settings["views"].keys() == {"base_camera"}
