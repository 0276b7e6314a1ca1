"""At equal weights, rollout and learner must agree about the log-probs of the rollout's samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vla3_plugin.learner import fields
from vla3_plugin.rollout import store
from vla3_plugin.trainer.batch import PADDING, Batch

if TYPE_CHECKING:
    from vla3_plugin.trainer.trainer import VLA3Trainer

_ROWS = 32  # samples a check looks at


class ParityError(RuntimeError):
    """Rollout and learner disagree about the likelihood of the rollout's own samples at equal weights."""


def check_parity(trainer: VLA3Trainer, batch: Batch, metrics: dict) -> None:
    """Equal weights, equal samples: the learner must find the rollout's log-probs. On samples that the learner's
    present version made, before it is updated; on copies, so that the batch stays as it is.

    Raises:
        ParityError: they differ by more than ``vla3.parity_tolerance`` in the run's first check.
    """
    fresh = [
        key
        for t in batch.trajectories
        for key, version in zip(t["keys"], t["versions"], strict=True)
        if version == trainer.version
    ]
    if "rollout/logprob_diff_max" in metrics or not fresh:
        return
    rows = _ROWS - _ROWS % -trainer.dp_size
    source = [fresh[i % len(fresh)] for i in range(min(rows, len(fresh) - len(fresh) % -trainer.dp_size))]
    copies = [f"{PADDING}parity{i}" for i in range(len(source))]
    trainer.actor_rollout_wg.copy_samples(source, copies)
    trainer.learner_outputs(trainer.actor_rollout_wg, "compute_log_prob", copies)
    pairs = (fields.LEARNER_LOGPROB, fields.LOGPROB), (fields.LEARNER_VALUE, fields.VALUE)
    found = store.get_fields(copies, [name for pair in pairs for name in pair])
    store.clear(copies)
    gap, value_gap = ((found[one] - found[other]).abs().max().item() for one, other in pairs)
    metrics["rollout/logprob_diff_max"], metrics["rollout/value_diff_max"] = gap, value_gap
    if trainer.checked_parity:
        return
    print(f"vla3: rollout and learner log-probs differ by at most {gap:.2e} over {len(copies)} samples")
    if not gap <= trainer.vla3.parity_tolerance:
        raise ParityError(
            f"rollout and learner log-probs differ by {gap:.3e} at equal weights, vla3.parity_tolerance is "
            f"{trainer.vla3.parity_tolerance}: every likelihood ratio of this run would be wrong. In bf16 raise it to "
            "1e-2; in float32 look for dropout, another attention backend or another dtype on one side"
        )
    trainer.checked_parity = True
