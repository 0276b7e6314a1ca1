"""Whole runs, each in a process of its own, as a user starts them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from preloaded import run_module

from vla3_plugin.telemetry.faults import FAULTS_FILE

HERE = Path(__file__).parent
_ON = [f"vla3.stages.{stage}.enabled=true" for stage in ("interaction", "streaming", "training")]
_ON += ["vla3.algorithm.advantage_statistics=previous", "vla3.algorithm.mini_batches=episodes"]
_GRPO = ["vla3.algorithm.adv_type=grpo", "vla3.algorithm.loss_type=actor", "vla3.algorithm.group_size=4"]
# what a fault is survived in: test parameters, the first of them in every test run
MODES = [
    "ppo-asynchronous",
    *(pytest.param(m, marks=pytest.mark.long) for m in ("grpo-synchronous", "ppo-synchronous", "grpo-asynchronous")),
]


def with_path(directory):
    return os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))


def mode_overrides(mode):
    return [*(_GRPO if "grpo" in mode else []), *(_ON if "-asynchronous" in mode else [])]


@pytest.fixture(scope="session")
def third_party(tmp_path_factory):
    """A directory into which the third-party package has really been installed."""
    target = tmp_path_factory.mktemp("third_party")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
    subprocess.run([*command, str(HERE / "third_party")], check=True, capture_output=True)
    return target


@pytest.fixture(scope="session")
def gaussian(third_party, tmp_path_factory):
    """A saved policy of the third-party family."""
    path = tmp_path_factory.mktemp("gaussian") / "policy"
    code = (
        "import torch, pathlib; torch.manual_seed(0); from third_party_policy import GaussianPolicy; "
        f"GaussianPolicy().save(pathlib.Path({str(path)!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": with_path(third_party)})
    return path


@pytest.fixture(scope="session")
def toy_record(tmp_path_factory):
    """The third-party environment's processing record, as a file: for policies whose weights start fresh."""
    from vla3_plugin.policies.processing import Normalisation, Processing

    directory = tmp_path_factory.mktemp("toy_record")
    as_it_is = Normalisation("identity")
    Processing(["front"], (64, 64), state_dim=2, action_dim=1, state=as_it_is, action=as_it_is).save(directory)
    return directory / "processing.json"


def marked(tag):
    """Living processes whose environment carries ``tag``: everything a run started, however it is parented now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("VLA3_TEST_TAG") == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
    return condition()


@pytest.fixture(scope="session")
def start_run(third_party):
    """``start_run(directory, *overrides)`` starts a run and returns (process, tag for ``marked``, log file)."""

    def start(directory: Path, *overrides: str, recipe="vla3_maniskill_sync", **variables: str):
        tag = f"{os.getpid()}-{directory}"
        command = [sys.executable, "-m", "verl.trainer.main", f"recipe={recipe}", f"vla3.run_dir={directory}"]
        environment = {**os.environ, "PYTHONPATH": with_path(third_party), "VLA3_PROFILE": "cpu", "VLA3_TEST_TAG": tag}
        environment |= variables
        for what in ("CLOCK", "BAD_GRADIENT"):  # see the third-party package
            environment[f"VLA3_TEST_{what}"] = str(directory.parent / what.lower())
        directory.mkdir(parents=True, exist_ok=True)
        log = directory.parent / f"{directory.name}.log"
        with log.open("a") as file:
            process = subprocess.Popen(
                [*command, *overrides],
                cwd=directory,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
                # where these tests run as a shell's background job, an ignored interrupt would be inherited
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        return process, tag, log

    return start


class Living:
    """A run that is under way."""

    def __init__(self, start_run, directory, *overrides):
        self.directory = directory / "run"
        self.process, self.tag, self.log = start_run(self.directory, *overrides)

    def processes(self, pattern):
        return [p for p in self.marked() if re.search(pattern, " ".join(p.cmdline()))]

    def marked(self):
        return marked(self.tag)

    @property
    def steps(self):
        file = self.directory / "metrics.jsonl"
        return file.read_text().count("\n") if file.is_file() else 0

    @property
    def faults(self):
        file = self.directory / FAULTS_FILE
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    def until(self, moment):
        """``after a step``: weights are being published; ``within a step``: half of a step later."""
        seen = self.steps
        assert wait_for(lambda: self.steps > seen, 120), self.tail()
        if moment == "within a step":
            times = [json.loads(line)["time"] for line in self.rows()[-3:]]
            time.sleep(min(5.0, (times[-1] - times[0]) / 4))

    def rows(self):
        return (self.directory / "metrics.jsonl").read_text().splitlines()

    def given_up(self):
        return {e for f in self.faults if f["kind"] == "episode_quarantined" for e in f["episodes"]}

    def goes_on(self, steps, seconds):
        target = self.steps + steps
        assert wait_for(lambda: self.steps >= target or self.process.poll() is not None, seconds), self.tail()
        assert self.process.poll() is None, self.tail()

    def tail(self):
        return self.log.read_text()[-3000:]


class Run:
    """A finished run: exit status, output, and the records it left."""

    def __init__(self, directory: Path, done: subprocess.CompletedProcess) -> None:
        self.directory, self.status, self.output = directory, done.returncode, done.stdout + done.stderr

    @property
    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def evaluations(self) -> list[dict]:
        return [json.loads(line) for line in (self.directory / "evaluations.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def launch(third_party):
    """``launch(directory, *overrides, recipe=..., module=...)`` starts a run and waits for it."""

    def start(directory: Path, *overrides: str, recipe="vla3_maniskill_sync", module="verl.trainer.main", timeout=600):
        plus = "" if module == "verl.trainer.main" else "+"
        environment = {**os.environ, "PYTHONPATH": with_path(third_party), "VLA3_PROFILE": "cpu"}
        arguments = [f"{plus}recipe={recipe}", f"vla3.run_dir={directory}", *overrides]
        directory.mkdir(parents=True, exist_ok=True)
        done = run_module(module, *arguments, cwd=directory, env=environment, timeout=timeout)
        return Run(directory, done)

    return start


@pytest.fixture(scope="session")
def line(gaussian):
    """Overrides for the third-party environment and policy: runs of seconds."""
    return [
        "vla3.env.name=toy",
        "~vla3.env.options.task",
        "vla3.env.shards_per_worker=2",
        "vla3.env.envs_per_shard=3",
        f"actor_rollout_ref.model.path={gaussian}",
        "actor_rollout_ref.model.options={}",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.model.value_lr=1e-2",
        "data.train_batch_size=24",
        "vla3.algorithm.num_mini_batches=2",
        "vla3.evaluation.episodes_per_task=8",
        "vla3.evaluation.videos=1",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    ]
