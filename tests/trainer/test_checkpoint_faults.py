"""A disk that fills up and a process that is killed while it saves: the checkpoint before stays, the rest goes."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from vla3_plugin.trainer import checkpoint, checkpoint_state

HIDDEN = (".saving_", ".replaced_", ".discarded_")


def settings(root):
    return SimpleNamespace(resume_mode="auto", resume_from_path=None, default_local_dir=str(root))


def saves(size):
    def write(directory):
        (directory / "actor").mkdir()
        (directory / "actor" / "model.bin").write_bytes(os.urandom(size))

    return write


def leftovers(root):
    return [path.name for path in root.iterdir() if path.name.startswith(HIDDEN)]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here; the injected and the file-size-limit faults stand in")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_on_a_full_disk_the_previous_checkpoint_stays_usable(small_disk):
    root = small_disk / "checkpoints"
    checkpoint.save(root, 1, saves(400_000), {}, keep=2)
    with pytest.raises(OSError) as full:
        checkpoint.save(root, 2, saves(800_000), {}, keep=2)
    assert full.value.errno == errno.ENOSPC
    assert checkpoint.find(settings(root)).name == "global_step_1" and not leftovers(root)
    checkpoint.save(root, 3, saves(400_000), {}, keep=2)
    assert checkpoint.find(settings(root)).name == "global_step_3", "what had been half-written no longer takes room"


def test_a_checkpoint_for_which_there_is_no_room_is_not_begun(small_disk):
    root = small_disk / "checkpoints"
    checkpoint.save(root, 1, saves(600_000), {}, keep=2)
    with pytest.raises(OSError, match="MB are free, the last one took 0.6 MB"):
        checkpoint.save(root, 2, lambda directory: pytest.fail("must not be asked"), {}, keep=2)


def test_a_limit_on_file_sizes_is_a_failed_save_like_any_other(tmp_path):
    checkpoint.save(tmp_path, 1, saves(1000), {}, keep=2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError) as refused:
            checkpoint.save(tmp_path, 2, saves(200_000), {}, keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.errno == errno.EFBIG
    assert checkpoint.find(settings(tmp_path)).name == "global_step_1" and not leftovers(tmp_path)


class Disk:
    """Counts what a save asks of the disk, and refuses the n-th request."""

    def __init__(self, monkeypatch, refuse):
        self.asked, self.refuse = 0, refuse
        of_path, of_module = [(Path, "mkdir"), (Path, "rename")], [(checkpoint, "_write"), (checkpoint, "_digest")]
        for owner, name in [(os, "fsync"), *of_path, *of_module]:
            monkeypatch.setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, original):
        def call(*args, **kwargs):
            self.asked += 1
            if self.asked == self.refuse:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*args, **kwargs)

        return call


@pytest.mark.parametrize("again", [False, True], ids=["another step", "the same step again"])
def test_wherever_the_disk_fails_a_usable_checkpoint_is_left(tmp_path, monkeypatch, again):
    """One save for each request that a save makes of the disk; that request is refused."""
    refuse, whole = 0, False
    while not whole:
        refuse += 1
        root = tmp_path / f"run{refuse}"
        checkpoint.save(root, 1, saves(100), {"save": 1}, keep=2)
        with monkeypatch.context() as patch:
            disk = Disk(patch, refuse)
            try:
                checkpoint.save(root, 1 if again else 2, saves(100), {"save": 2}, keep=1)
                whole = disk.asked < refuse
            except OSError as error:
                assert error.errno == errno.ENOSPC
        found = checkpoint.find(settings(root))
        assert found is not None and checkpoint.fault(found) is None
        assert not leftovers(root)
    assert checkpoint.read_state(found) == {"save": 2} and refuse > 10


CHILD = """
import os, sys
from pathlib import Path
from vla3_plugin.trainer import checkpoint

def write(directory):
    (directory / "actor").mkdir()
    for part in range(4):
        with (directory / "actor" / f"{part}.bin").open("wb") as file:
            for _ in range(8):
                file.write(os.urandom(100_000))

root, step = Path(sys.argv[1]), int(sys.argv[2])
while True:
    step += 1
    checkpoint.save(root, 1 + step % 3, write, {"count": step}, keep=2)  # steps come back: replacing is tried too
    print(step, flush=True)
"""


@pytest.mark.slow
def test_killed_at_any_moment_of_a_save_the_last_announced_checkpoint_or_a_newer_one_is_found(tmp_path):
    """Twenty kills, at moments spread over the time that a save takes."""
    root, announced, period = tmp_path / "run", 0, 0.0
    for kill in range(20):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(root), str(announced)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        start = time.monotonic()
        for _ in range(3):
            announced, earlier = int(child.stdout.readline()), start
            start = time.monotonic()
            period = start - earlier
        time.sleep(period * kill / 20)
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
        child.wait()
        announced = int(rest[-1]) if rest else announced
        found = checkpoint.find(settings(root))
        assert found is not None and checkpoint.fault(found) is None
        count = checkpoint.read_state(found)["count"]
        assert count in (announced, announced + 1)
        assert not leftovers(root), "cleared at the start"
        announced = count


class Record:
    def __init__(self):
        self.notes, self.best = [], None

    def note(self, text):
        self.notes.append(text)

    def best_of(self, steps):
        return None


class Learner:
    """Writes what verl's FSDP manager would; ``error`` in its place."""

    def __init__(self, error=None):
        self.error = error

    def save_checkpoint(self, path):
        if self.error is not None:
            raise self.error
        Path(path).mkdir(parents=True)
        (Path(path) / "model_world_size_1_rank_0.pt").write_text("weights")


def trainer(root, step, error=None, ranks=1):
    config = SimpleNamespace(
        trainer=SimpleNamespace(default_local_dir=str(root), n_gpus_per_node=ranks, nnodes=1),
        actor_rollout_ref=SimpleNamespace(actor=SimpleNamespace(strategy="fsdp2")),
    )
    return SimpleNamespace(
        config=config, global_steps=step, total_training_steps=3, env_steps=0, architecture={}, feeder=None,
        scale=SimpleNamespace(previous=None), record=Record(), actor_rollout_wg=Learner(error), dp_size=ranks,
        vla3=SimpleNamespace(keep_checkpoints=2), stop=lambda: False, row={}, evaluator=SimpleNamespace(step=None),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def plain_config(monkeypatch):
    monkeypatch.setattr(checkpoint_state, "made_with", lambda config: {})


FULL = OSError(errno.ENOSPC, "No space left on device")


def in_a_worker(error):
    """The error as the driver gets it from a Ray actor."""
    return ray.exceptions.RayTaskError("save_checkpoint", str(error), error).as_instanceof_cause()


@pytest.mark.parametrize("error", [FULL, in_a_worker(FULL), in_a_worker(RuntimeError("file write failed"))])
def test_a_save_that_fails_is_told_and_the_run_goes_on(tmp_path, error):
    checkpoint_state.save(trainer(tmp_path, 1))
    failing = trainer(tmp_path, 2, error)
    checkpoint_state.save(failing)
    (note,) = failing.record.notes
    assert note.startswith(f"checkpoint of step 2 could not be written to {tmp_path}")
    assert "global_step_1" in note and "goes on" in note and "MB free" in note


def test_under_megatron_it_is_the_optimizers_file_that_every_rank_must_leave(tmp_path):
    config = trainer(tmp_path, 1, ranks=2).config
    config.actor_rollout_ref.actor.strategy = "megatron"
    for name in ("model_world_size_2_rank_0.pt", "optim_world_size_2_rank_0.pt"):
        (tmp_path / name).write_text("of rank 0")
    with pytest.raises(checkpoint.CheckpointError, match=r"optim_world_size_2_rank_1\.pt: learner rank 1"):
        checkpoint_state.check_shards(tmp_path, config)
    (tmp_path / "optim_world_size_2_rank_1.pt").write_text("of rank 1")
    checkpoint_state.check_shards(tmp_path, config)


def test_the_last_save_of_a_run_must_not_fail(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="checkpoint of step 3 .* there is none yet"):
        checkpoint_state.save(trainer(tmp_path, 3, FULL))


def test_the_save_of_a_run_that_was_asked_to_stop_must_not_fail(tmp_path):
    stopping = trainer(tmp_path, 2, FULL)
    stopping.stop = lambda: True
    with pytest.raises(checkpoint.CheckpointError, match="checkpoint of step 2"):
        checkpoint_state.save(stopping)


@pytest.mark.parametrize(
    ("error", "ranks"),
    [(ray.exceptions.RayActorError(), 1), (ray.exceptions.GetTimeoutError("late"), 1), (in_a_worker(FULL), 2)],
    ids=["dead", "hanging", "one of two"],
)
def test_a_learner_that_cannot_go_on_ends_the_run(tmp_path, error, ranks):
    with pytest.raises(checkpoint.CheckpointError, match="checkpoint of step 2"):
        checkpoint_state.save(trainer(tmp_path, 2, error, ranks))


def test_a_shard_that_was_written_on_another_node_is_missed(tmp_path):
    failing = trainer(tmp_path, 1)
    failing.config.trainer.nnodes = 2
    checkpoint_state.save(failing)
    assert "rank_0.pt: learner rank 0 has written it elsewhere" in failing.record.notes[0]
    assert checkpoint.steps(tmp_path) == [], "and no checkpoint is left that could not be resumed"


def test_removing_an_old_checkpoint_fails_without_failing_the_save(tmp_path, monkeypatch, capsys):
    checkpoint.save(tmp_path, 1, saves(10), {}, keep=1)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None if ignore_errors else refuse(path))
    checkpoint.save(tmp_path, 2, saves(10), {}, keep=1)
    assert "global_step_1 could not be removed" in capsys.readouterr().out
    assert checkpoint.find(settings(tmp_path)).name == "global_step_2"
