"""Simulators in child interpreters: same results, and every way of failing is an error with a name."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import toy_env

from vla3_plugin.contract import ContractError, Episode
from vla3_plugin.envs import wire
from vla3_plugin.envs.check import check_env
from vla3_plugin.envs.process import EnvError, EnvProcess

HERE = str(Path(__file__).parent)
ROOT = str(Path(__file__).parents[2])
EPISODE = Episode(episode_id=41, task_id=1, init_state_id=0, seed=5, group_id=0)
IDLE = np.zeros((1, 4, 3), np.float32)


def make(kind: str = "ToyEnv", num_slots: int = 1, timeout_s: float = 20.0, **options) -> EnvProcess:
    return EnvProcess(f"toy_env:{kind}", options, num_slots=num_slots, timeout_s=timeout_s, name="toy", paths=[HERE])


def wait_until_gone(pid: int, seconds: float = 10.0) -> bool:
    """Ended: not in the process table, or a zombie that nobody has asked about yet."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def assert_same(a, b):
    np.testing.assert_array_equal(a.state, b.state)
    assert a.instruction == b.instruction and a.images.keys() == b.images.keys()
    for camera in a.images:
        np.testing.assert_array_equal(a.images[camera], b.images[camera])


def test_a_child_stands_back_as_far_as_it_is_told():
    mine = os.nice(0)
    with EnvProcess("toy_env:ToyEnv", timeout_s=20, paths=[HERE], nice=3) as child, make() as other:
        assert psutil.Process(child.process.pid).nice() == mine + 3
        assert psutil.Process(other.process.pid).nice() == mine


def test_a_child_gives_what_the_environment_gives():
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 9, 3)).astype(np.float32)
    here = toy_env.ToyEnv(num_slots=3, max_steps=12)
    with make(num_slots=3, max_steps=12) as there:
        assert there.spec == here.spec and there.num_slots == 3
        for slot, seed in ((0, 1), (2, 2)):
            episode = Episode(seed, seed % 2, 0, seed, 0)
            assert_same(there.reset(slot, episode), here.reset(slot, episode))
        for record in (True, False):  # the second chunk ends both episodes after three steps
            pairs = zip(
                there.chunk_step([2, 0], actions, record), here.chunk_step([2, 0], actions, record), strict=True
            )
            for got, want in pairs:
                for name in ("rewards", "terminated", "truncated", "valid", "frames"):
                    np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
                assert got.success == want.success and got.done == want.done
                assert_same(got.observation, want.observation)
                if want.done:
                    assert_same(got.final_observation, want.final_observation)
        assert got.truncated[2] and not got.valid[3:].any()


def test_results_stay_as_they_were_when_the_next_chunk_overwrites_the_shared_memory():
    with make() as env:
        first = env.reset(0, EPISODE)
        state, image = first.state.copy(), first.images["top"].copy()
        env.chunk_step([0], np.ones((1, 4, 3), np.float32))
        np.testing.assert_array_equal(first.state, state)
        np.testing.assert_array_equal(first.images["top"], image)


def test_several_children_work_at_the_same_time():
    with make() as a, make() as b:
        for env in (a, b):
            env.start_reset(0, EPISODE)
        assert_same(b.finish_reset(), a.finish_reset())
        a.start_chunk([0], IDLE)
        b.start_chunk([0], IDLE + 1)
        moved, still = b.finish_chunk()[0], a.finish_chunk()[0]
        assert not np.array_equal(moved.observation.state, still.observation.state)


def test_an_environment_behind_a_process_passes_the_checker():
    with make("ToyExpert", num_slots=2) as env:
        assert check_env(env) == []


@pytest.mark.parametrize(
    ("fault", "how"),
    [("exit", "exited with status 7"), ("kill", "killed by SIGKILL"), ("sys.exit", "exited with status 1")],
)
def test_a_crash_is_reported_with_the_episode_and_the_last_output(fault, how):
    with make("FaultyEnv", fault=fault, at=1) as env:
        env.reset(0, EPISODE)
        env.chunk_step([0], IDLE)
        with pytest.raises(EnvError, match=how) as caught:
            env.chunk_step([0], IDLE)
        text = str(caught.value)
        assert f"toy (pid {env.process.pid}), slot 0" in text and "episode_id=41" in text
        assert "executing a chunk of 4 actions" in text and "the simulator says hello" in text
        with pytest.raises(EnvError):  # and again, not a hang
            env.reset(0, EPISODE)


def test_a_hang_ends_at_the_deadline():
    with make("FaultyEnv", fault="hang", timeout_s=0.5) as env:
        env.reset(0, EPISODE)
        start = time.monotonic()
        with pytest.raises(EnvError, match=r"slot 0 \(Episode.*no answer within 0.5 s.*env.timeout_s"):
            env.chunk_step([0], IDLE)
        assert time.monotonic() - start < 5
        assert wait_until_gone(env.process.pid)


def test_a_hang_at_the_start_ends_at_the_deadline():
    with pytest.raises(EnvError, match="while starting: no answer within 2 s"):
        EnvProcess("toy_env:FaultyEnv", {"fault": "hang", "at": -1}, start_timeout_s=2, name="toy", paths=[HERE])


def test_an_exception_comes_back_as_text_and_the_child_lives_on():
    with make("FaultyEnv", fault="raise") as env:
        env.reset(0, EPISODE)
        with pytest.raises(EnvError, match="RuntimeError: the physics diverged") as caught:
            env.chunk_step([0], IDLE)
        assert "in _fail" in str(caught.value)
        env.reset(0, EPISODE)
        assert env.chunk_step([0], IDLE)[0].valid.all()


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("toy_env:FaultyEnv", {"fault": "raise", "at": -1}, "the physics diverged"),
        ("toy_env:FaultyEnv", {"fault": "exit", "at": -1}, "exited with status 7"),
        ("toy_env:FaultyEnv", {"fault": "ask", "at": -1}, "EOFError"),
        ("toy_env:ToyEnv", {"colour": "mauve"}, "unexpected keyword argument 'colour'"),
        ("toy_env:NoSuchEnv", {}, "NoSuchEnv"),
        ("no_such_module:Env", {}, "No module named 'no_such_module'"),
    ],
)
def test_a_child_that_cannot_start_says_why(target, options, message):
    with pytest.raises(EnvError, match=message):
        EnvProcess(target, options, paths=[HERE])


def test_an_interpreter_that_does_not_exist_is_named():
    with pytest.raises(EnvError, match="/no/such/python.*env.python"):
        EnvProcess("toy_env:ToyEnv", python="/no/such/python")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan state", r"toy, slot 0: state is not finite \(first at index \[1\]: nan\)"),
        ("image shape", r"images\[top\] has shape \[64, 64, 1\], expected \[64, 64, 3\]"),
        ("image type", r"images\[top\] has dtype float32, expected uint8"),
        ("late reward", "rewards after the end of the episode"),
    ],
)
def test_data_that_breaks_the_contract_is_named(fault, message):
    with make("FaultyEnv", fault=fault, max_steps=3) as env:
        env.reset(0, EPISODE)
        with pytest.raises(EnvError, match=message):
            env.chunk_step([0], IDLE)


def test_bad_actions_are_refused_before_the_child_sees_them():
    with make() as env:
        env.reset(0, EPISODE)
        bad = IDLE.copy()
        bad[0, 2, 1] = np.inf
        with pytest.raises(ContractError, match=r"actions for toy: actions is not finite \(first at index \[0, 2, 1\]"):
            env.chunk_step([0], bad)
        with pytest.raises(ContractError, match=r"shape \[1, 4, 2\]"):
            env.chunk_step([0], IDLE[..., :2])
        with pytest.raises(ValueError, match="a chunk of 65 steps"):
            env.chunk_step([0], np.zeros((1, 65, 3), np.float32))
        with pytest.raises(ValueError, match="slot 1, expected 0 to 0"):
            env.chunk_step([1], IDLE)
        with pytest.raises(ValueError, match="each once"):
            env.chunk_step([0, 0], np.zeros((2, 4, 3), np.float32))
        assert env.chunk_step([0], IDLE)[0].valid.all()


def test_halves_in_the_wrong_order_are_refused():
    with make() as env:
        with pytest.raises(EnvError, match="there is no request"):
            env.finish_chunk()
        env.start_reset(0, EPISODE)
        with pytest.raises(EnvError, match="was not fetched before the next request"):
            env.start_chunk([0], IDLE)
        env.finish_reset()
        env.chunk_step([0], IDLE)


def test_closing_twice_is_fine_and_use_after_it_is_an_error():
    env = make()
    env.close()
    env.close()
    assert env.process.returncode == 0
    with pytest.raises(EnvError, match="toy is closed"):
        env.reset(0, EPISODE)
    with pytest.raises(EnvError, match="toy is closed"):
        env.chunk_step([0], IDLE)


def test_a_child_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr("vla3_plugin.envs.process._GRACE_S", 0.3)
    env = make("FaultyEnv", fault="hang")
    env.reset(0, EPISODE)
    env.start_chunk([0], IDLE)
    env.close()
    assert env.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("memfd", [True, False])
def test_shared_memory_has_no_name_that_could_outlive_it(monkeypatch, memfd):
    if not memfd:
        monkeypatch.delattr(os, "memfd_create")
    with wire.unnamed_file() as file:
        path = os.readlink(f"/proc/self/fd/{file.fileno()}")
        assert path.endswith("(deleted)") and not os.path.exists(path)


def test_nothing_is_left_behind():
    def traces() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    make().close()  # what Python opens once stays out of the count
    before = traces()
    pids = []
    for fault in ("none", "kill", "exit"):
        with make("FaultyEnv", fault=fault) as env:
            pids.append(env.process.pid)
            env.reset(0, EPISODE)
            try:
                env.chunk_step([0], IDLE)
            except EnvError:
                pass
    with pytest.raises(EnvError):
        make("FaultyEnv", fault="raise", at=-1)
    del env
    assert traces() == before
    assert all(wait_until_gone(pid) for pid in pids)


def test_a_child_dies_with_its_parent_even_when_it_hangs():
    program = (
        "import numpy as np, sys, os, signal\n"
        "from vla3_plugin.contract import Episode\n"
        "from vla3_plugin.envs.process import EnvProcess\n"
        f"env = EnvProcess('toy_env:FaultyEnv', {{'fault': 'hang'}}, paths=[{HERE!r}])\n"
        "env.reset(0, Episode(0, 0, 0, 0, 0))\n"
        "env.start_chunk([0], np.zeros((1, 4, 3), np.float32))\n"
        "print(env.process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert wait_until_gone(int(done.stdout))


def test_a_child_outlives_the_thread_that_made_it():
    made: list[EnvProcess] = []
    thread = threading.Thread(target=lambda: made.append(make()))
    thread.start()
    thread.join()
    time.sleep(0.3)
    with made[0] as env:
        assert env.reset(0, EPISODE).instruction == "press on the blue dot"


def test_thread_counts_are_one_unless_said_otherwise(monkeypatch):
    for name in ("OMP_NUM_THREADS", "LP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)

    def environ(env: EnvProcess) -> list[str]:
        return Path(f"/proc/{env.process.pid}/environ").read_text().split("\0")

    with make() as env:
        assert {"OMP_NUM_THREADS=1", "LP_NUM_THREADS=1"} <= set(environ(env))
    with EnvProcess("toy_env:ToyEnv", paths=[HERE], environ={"LP_NUM_THREADS": "3"}) as env:
        assert "LP_NUM_THREADS=3" in environ(env)


def test_what_a_talkative_simulator_prints_does_not_fill_the_disk():
    with make("FaultyEnv", fault="chatter", max_steps=100) as env:
        env.reset(0, EPISODE)
        for _ in range(12):
            env.chunk_step([0], IDLE)
        assert os.fstat(env._output.fileno()).st_size < 6 << 20


def test_a_child_imports_neither_torch_nor_ray_nor_verl():
    program = (
        "import sys, vla3_plugin.contract, vla3_plugin.envs.child, vla3_plugin.envs.maniskill, vla3_plugin.envs.check\n"
        "print([m for m in ('torch', 'ray', 'verl', 'mani_skill', 'gymnasium') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory) -> str:
    """An interpreter of its own with numpy 1 and nothing else."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    install = subprocess.run([python, "-m", "pip", "install", "-q", "numpy<2"], capture_output=True, text=True)
    if install.returncode:
        pytest.skip(f"numpy<2 cannot be installed here: {install.stderr.strip()[-200:]}")
    return python


@pytest.mark.slow
def test_another_interpreter_without_torch_runs_the_environment(bare_python, monkeypatch):
    site_packages = str(Path(np.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", site_packages)  # would bring this interpreter's numpy and torch along
    with EnvProcess("toy_env:BareEnv", python=bare_python, paths=[HERE]) as env:
        about = json.loads(env.spec.name)
        assert about["numpy"].startswith("1.") and about["prefix"] == str(Path(bare_python).parents[1])
        assert not (about["torch"] or about["ray"] or about["verl"])
        here = toy_env.ToyEnv()
        assert_same(env.reset(0, EPISODE), here.reset(0, EPISODE))
        got, want = env.chunk_step([0], IDLE + 0.5)[0], here.chunk_step([0], IDLE + 0.5)[0]
        assert_same(got.observation, want.observation)
