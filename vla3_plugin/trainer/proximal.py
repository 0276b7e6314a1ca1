"""Samples of older versions beside the learner: log-probs and values of the policy that this step's updates start from.

The ratio of a sample is clipped around that policy's log-probs (decoupled PPO, Hilton et al. 2021). Its values replace
those of the sample's own version as baseline, bootstrap and centre of the value clip: with values of d versions ago the
critic learns from what it was, becomes d + 1 critics that take turns, and advantages swing with them. (IMPALA evaluates
values anew for the same reason, Espeholt et al. 2018.) That of a final observation, no sample itself, moves by as much
as the one before it. ``vla3.stages.training.proximal: recompute`` asks for all this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vla3_plugin.learner import fields
from vla3_plugin.rollout import store
from vla3_plugin.trainer.batch import Batch, put

if TYPE_CHECKING:
    from vla3_plugin.trainer.trainer import VLA3Trainer


def kept(trainer: VLA3Trainer) -> bool:
    """Whether the first epoch, streamed, keeps what the learner says of each sample for later ones."""
    return trainer.vla3.stages.training.recomputes and trainer.vla3.algorithm.update_epoch > 1


def evaluate(trainer: VLA3Trainer, batch: Batch) -> None:
    """Before the updates on a batch that is complete: one pass without gradients."""
    if not trainer.vla3.stages.training.recomputes or not _stale(trainer, batch):
        return
    trainer.learner_outputs(trainer.actor_rollout_wg, "compute_log_prob", trainer.per_rank(batch))
    found = store.get_fields(batch.keys, [fields.LEARNER_LOGPROB])
    put(batch, {fields.PROXIMAL: found[fields.LEARNER_LOGPROB]})
    if trainer.vla3.algorithm.adv_type == "gae":
        _take_values(trainer, batch)


def carry_over(trainer: VLA3Trainer, batch: Batch) -> None:
    """Between the first epoch, streamed, and the later ones: advantages anew, with the values that were kept, and
    normalised together where each mini-batch was by itself."""
    gae = trainer.vla3.algorithm.adv_type == "gae"
    if kept(trainer):
        # samples that weigh nothing were not trained on; a store hands out only fields that all asked-for rows have
        missing = [*(set(batch.keys) - set(batch.trained_keys)), *batch.padding]
        if missing:
            own = store.get_fields(missing, [fields.LOGPROB, fields.VALUE])
            store.put_fields(missing, {fields.PROXIMAL: own[fields.LOGPROB], fields.LEARNER_VALUE: own[fields.VALUE]})
        if gae and _stale(trainer, batch):
            _take_values(trainer, batch)
    if gae and ((kept(trainer) and _stale(trainer, batch)) or trainer.scale.statistics == "mini_batch"):
        trainer.compute_advantages(batch, again=True)


def _stale(trainer: VLA3Trainer, batch: Batch) -> bool:
    return min(batch.versions) < trainer.version


def _take_values(trainer: VLA3Trainer, batch: Batch) -> None:
    names = [fields.VALUE, fields.LEARNER_VALUE, fields.BOOTSTRAP, fields.BOOTSTRAP_VERSION]
    own, learners, bootstrap, bootstrap_version = store.get_fields(batch.keys, names).values()
    drift = learners.to(own) - own
    old, old_bootstrap = (
        (version.view(-1) < trainer.version).view(-1, *[1] * (own.dim() - 1))
        for version in (torch.tensor(batch.versions), bootstrap_version)
    )
    value = torch.where(old, learners.to(own), own)
    put(batch, {fields.VALUE: value, fields.BOOTSTRAP: torch.where(old_bootstrap, bootstrap + drift, bootstrap)})
