"""Messages that are lost between Ray actors, by Ray's own fault injection: a call, or its answer, does not arrive.

TCP loses nothing; what Ray loses, it loses with a connection, for instance when a switch restarts. The caller cannot
tell a lost call from a lost answer, so whatever it asks again must not be done twice.
"""

import json
import signal

import pytest
from whole_runs import MODES, marked, mode_overrides, wait_for

from vla3_plugin.telemetry.ledger import read_ledger

# each message that is lost costs a restart, of a worker or of all, and what was restarted may lose as many again
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

# per process: at most so many, of a hundred calls one on the way there and one on the way back
LOST = {"CoreWorkerService.grpc_client.PushTask": {"num_failures": 1, "req_failure_prob": 1, "resp_failure_prob": 1}}


@pytest.mark.parametrize("mode", MODES)
def test_lost_messages_cost_a_restart_at_most_and_no_episode(start_run, line, tmp_path, mode):
    directory = tmp_path / "run"
    process, tag, log = start_run(
        directory, *line, *mode_overrides(mode), "trainer.total_training_steps=6", "trainer.val_before_train=false",
        "trainer.save_freq=1", "vla3.max_restarts=20", "vla3.max_worker_restarts=50", "vla3.heartbeat_s=15",
        RAY_testing_rpc_failure=json.dumps(LOST),
    )  # fmt: skip
    try:
        assert wait_for(lambda: process.poll() is not None, 800), log.read_text()[-3000:]
        said = log.read_text()
        assert process.returncode == 0, said[-3000:]
        assert "Unavailable" in said or "unavailable" in said, "nothing was lost, so nothing was tested"
        assert wait_for(lambda: not marked(tag), 30), [p.cmdline()[:3] for p in marked(tag)]
        account = read_ledger(directory, last_step=6)
        assert sorted(account.trained) == list(range(1, 7)) and account.twice == []
        state = json.loads((directory / "checkpoints" / "global_step_6" / "trainer.json").read_text())["admission"]
        known = account.groups | {*state["replay"], *state["dropped_groups"]}
        assert known == set(range(state["next_group"])), "none skipped"
    finally:
        process.send_signal(signal.SIGTERM)
        for left in marked(tag):
            left.kill()
