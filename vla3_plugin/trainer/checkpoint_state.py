"""What the trainer saves and resumes: the learner's shards, its place in the episode plan, groups in flight.

Nothing else has a memory: noise is keyed by episode and chunk, shuffling by step, and the learner's shards carry
optimizer, schedule and generators. So a synchronous run resumes exactly, and an asynchronous one loses no episode that
had finished when the checkpoint was made.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import OmegaConf

from vla3_plugin.policies.registry import load_policy
from vla3_plugin.rollout import store
from vla3_plugin.telemetry.jsonl import plain
from vla3_plugin.trainer import checkpoint, checkpoint_groups
from vla3_plugin.trainer.checkpoint import CheckpointError

POLICY = "policy"
# without these as they were the learner's shards do not fit
BINDING = (
    "vla3.algorithm.group_size",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size",
    "actor_rollout_ref.actor.megatron.use_distributed_optimizer",
    "actor_rollout_ref.actor.megatron.override_ddp_config",
    "actor_rollout_ref.model.lora_rank",
    "trainer.n_gpus_per_node * trainer.nnodes",
)
# without these as they were the same place in the plan is another episode, or an episode has other samples
EPISODES = (
    "vla3.seed",
    "vla3.env.name",
    "vla3.env.options",
    "vla3.env.tasks",
    "vla3.env.held_out_init_states",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.options",
)
# the optimizer's own state carries these, so a change has no effect
RESTORED = (
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.optim.weight_decay",
    "actor_rollout_ref.model.value_lr",
)


def made_with(config: Any) -> dict[str, Any]:
    """The settings that a checkpoint depends on, by key."""
    found: dict[str, Any] = {}
    for key in (*BINDING, *EPISODES, *RESTORED):
        value = OmegaConf.select(config, key) if " " not in key else _ranks(config)
        found[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return found


def _ranks(config: Any) -> int:
    return config.trainer.n_gpus_per_node * config.trainer.nnodes


def architecture(path: str, options: dict[str, Any]) -> dict[str, list[int]]:
    """Shapes of the policy that a config names, without its memory: {parameter or buffer: shape}."""
    with torch.device("meta"):
        return {name: list(tensor.shape) for name, tensor in load_policy(path, **options).state_dict().items()}


def compare(state: dict[str, Any], now: dict[str, Any], path: Path) -> list[str]:
    """Lines to tell about a checkpoint made with other settings that can still be resumed from.

    Raises:
        CheckpointError: it cannot; all reasons at once.
    """
    then, file = state["made_with"], path / checkpoint.STATE
    changed = {key for key in now if now[key] != then.get(key)}
    faults = [f"{key}: {now[key]}, {file} was made with {then.get(key)}" for key in BINDING if key in changed]
    faults += _other_architecture(then[POLICY], now[POLICY], file)
    if faults:
        fix = "set it back, or start anew from its policy/ with trainer.resume_mode=disable and a run_dir of its own"
        raise CheckpointError("\n".join([*faults, fix]))
    notes = [
        f"{key} is {now[key]}, the checkpoint was made with {then.get(key)}: what follows is another run, and episodes "
        "in flight are played again"
        for key in EPISODES
        if key in changed
    ]
    notes += [
        f"{key} is {now[key]}, but the optimizer that is resumed carries {then.get(key)} and keeps it"
        for key in RESTORED
        if key in changed
    ]
    return notes


def _other_architecture(then: dict[str, list[int]], now: dict[str, list[int]], file: Path) -> list[str]:
    other = [
        f"{name} {then.get(name, 'absent')} there, {now.get(name, 'absent')} here"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
    if not other:
        return []
    return [
        f"actor_rollout_ref.model: another architecture than {file} was made with: {len(other)} of "
        f"{len({*then, *now})} parameters differ: {'; '.join(other[:3])}{'; …' if len(other) > 3 else ''}"
    ]


# ---------------------------------------------------------------- the trainer's


def save(trainer: Any) -> None:
    """Save the step that has just been trained. The run goes on where that fails, unless nothing comes after it.

    Raises:
        CheckpointError: the last step could not be saved, or the failure has left the learner's ranks out of step.
    """
    root, step = Path(trainer.config.trainer.default_local_dir), trainer.global_steps
    groups = trainer.feeder.state() if trainer.feeder is not None else {}
    state = {
        "global_steps": step,
        "env_steps": trainer.env_steps,
        "made_with": made_with(trainer.config) | {POLICY: trainer.architecture},
        "admission": groups,
        "advantage_moments": trainer.scale.previous,
        "best_evaluation": trainer.record.best,
        "metrics": plain(trainer.row),
    }

    def write(directory: Path) -> None:
        # first the samples: a group may be dropped meanwhile, and the learner's shards take long
        checkpoint_groups.write_samples(directory, groups, store.get_rows)
        trainer.actor_rollout_wg.save_checkpoint(os.fspath(directory / "actor"))
        check_shards(directory / "actor", trainer.config)

    # the best of those that were evaluated, and one that may turn out to be
    best = {trainer.record.best_of({*checkpoint.steps(root), step}), trainer.evaluator.step} - {None}
    try:
        checkpoint.save(root, step, write, state, keep=trainer.vla3.keep_checkpoints, best=best)
        trainer.saved_step = step
    except Exception as error:
        text = explain(root, step, error)
        last = step >= trainer.total_training_steps or trainer.stop()
        if last or not survivable(error, trainer.dp_size):
            raise CheckpointError(text) from error
        trainer.record.note(f"{text}; the run goes on without it")


def check_shards(directory: Path, config: Any) -> None:
    """Every learner rank's file must have arrived where the driver looks.

    Raises:
        CheckpointError: one has not; the message names it.
    """
    ranks = _ranks(config)
    expected = [("model", rank) for rank in range(ranks)]
    if config.actor_rollout_ref.actor.strategy == "megatron":  # where the model is rank 0's to write
        expected = [("model", 0), *(("optim", rank) for rank in range(ranks))]
    for kind, rank in expected:
        file = directory / f"{kind}_world_size_{ranks}_rank_{rank}.pt"
        if not file.is_file():
            raise CheckpointError(
                f"{file}: learner rank {rank} has written it elsewhere; trainer.default_local_dir must be on a file "
                "system that all nodes share"
            )


def survivable(error: Exception, ranks: int) -> bool:
    """Whether training can go on after a save that failed with ``error``.

    A dead learner cannot, and of several ranks one that fails leaves the others waiting for it in the save.
    """
    if isinstance(error, ray.exceptions.RayTaskError):
        return ranks == 1
    return not isinstance(error, ray.exceptions.RayError)


def explain(root: Path, step: int, error: Exception) -> str:
    why = (str(error).strip() or type(error).__name__).splitlines()[-1]
    free = f"{shutil.disk_usage(root).free / 1e6:,.0f} MB free" if root.is_dir() else "no such directory"
    usable = [path.name for _, path in checkpoint.written(root)] if root.is_dir() else []
    last = f"the last usable one is {usable[-1]}" if usable else "there is none yet"
    return f"checkpoint of step {step} could not be written to {root} ({free}): {why}; {last}"


def load(trainer: Any) -> None:
    """Resume as ``trainer.resume_mode`` says; sets the trainer's step, counters and place in the plan.

    Raises:
        CheckpointError: what was asked for by name is damaged, or what was found does not fit the config.
    """
    model = trainer.config.actor_rollout_ref.model
    options: Any = OmegaConf.to_container(model.options, resolve=True)
    trainer.global_steps, trainer.architecture = 0, architecture(model.path, options)
    found = checkpoint.find(trainer.config.trainer)
    if found is None:
        if trainer.config.trainer.resume_mode == "auto":
            print(f"vla3: nothing to resume from in {trainer.config.trainer.default_local_dir}: starting anew")
        return
    state = checkpoint.read_state(found)
    now = made_with(trainer.config) | {POLICY: trainer.architecture}
    for note in compare(state, now, found):
        trainer.record.note(note)
    trainer.actor_rollout_wg.load_checkpoint(os.fspath(found / "actor"))
    trainer.global_steps, trainer.env_steps = state["global_steps"], state["env_steps"]
    trainer.scale.previous = state["advantage_moments"]
    trainer.record.resumed(state["global_steps"], state["best_evaluation"], state.get("metrics"))
    groups = state["admission"]
    same = all(now[key] == state["made_with"].get(key) for key in EPISODES)
    if not same or not trainer.vla3.stages.training.enabled:  # on one clock a step plays its own groups
        groups = checkpoint_groups.play_again(groups)
    checkpoint_groups.read_samples(found, groups, store.put_fields)
    trainer.admission_state = groups
    kept, again = len(groups.get("groups", [])), len(groups.get("replay", []))
    print(
        f"vla3: resumed from {found} at step {trainer.global_steps}: {checkpoint_groups.count(groups)} finished "
        f"episodes of {kept} groups restored, {again - kept} groups to be played again",
        flush=True,
    )
