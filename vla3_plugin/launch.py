"""What ``python -m verl.trainer.main recipe=NAME …`` runs, and what every entry does before Ray starts.

``main`` only puts the ``+`` that Hydra wants before ``recipe=`` and hands over to verl's own ``main_ppo``. Both entries
then meet in ``before_start``: validate, derive, check the fit, say what will run.
"""

import difflib
import os
import secrets
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from vla3_plugin.config import ConfigError, VLA3Config, parse
from vla3_plugin.resources import recipe_names


def _fail(lines: list[str]) -> None:
    print("vla3-plugin: this run cannot start:\n  " + "\n  ".join(lines), file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    arguments = ["+" + a if a.startswith("recipe=") else a for a in sys.argv[1:]]
    chosen = [a.split("=", 1)[1] for a in arguments if a.startswith("+recipe=")]
    known = recipe_names()
    for name in chosen:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            _fail([f"recipe: {name!r} is not a recipe{hint} The known ones are: {', '.join(known)}"])
    if not chosen and not any(a in ("--help", "-h", "--hydra-help", "--version") for a in arguments):
        _fail([f"no recipe was given; use recipe=NAME with one of: {', '.join(known)}"])
    from verl.trainer import main_ppo

    sys.argv[1:] = arguments
    main_ppo.main()


def before_start(config: DictConfig) -> None:
    """Called by both entries between composing and starting; leaves on the first set of faults, with all of them."""
    try:
        vla3 = parse(config.vla3)
        faults = _cross_checks(config, vla3)
    except ConfigError as error:
        faults = error.faults
    if faults:
        _fail(faults)
    _derive(config, vla3)
    from vla3_plugin.trainer.preflight import announce, preflight

    summary, faults = preflight(config, vla3)
    if faults:
        _fail(faults)
    announce(summary, Path(config.vla3.run_dir))
    _prepare_local_cluster(config)


def _cross_checks(config: DictConfig, vla3: VLA3Config) -> list[str]:
    """Keys of verl and of vla3 that must agree."""
    faults = []
    groups, count = vla3.algorithm.group_size, config.data.train_batch_size
    if count % groups:
        faults.append(
            f"data.train_batch_size: {count} episodes do not divide into groups of vla3.algorithm.group_size = "
            f"{groups}; use {max(1, count // groups) * groups}"
        )
    if not config.trainer.total_training_steps or config.trainer.total_training_steps < 1:
        faults.append(
            f"trainer.total_training_steps: {config.trainer.total_training_steps}, expected at least 1: the episode "
            "plan has no end of its own"
        )
    if config.critic.get("enable") is not False:
        faults.append("critic.enable: expected false: the value head is part of the policy")
    if config.actor_rollout_ref.actor.strategy not in ("fsdp2", "fsdp"):
        faults.append(
            f"actor_rollout_ref.actor.strategy: {config.actor_rollout_ref.actor.strategy!r}, expected fsdp2 or fsdp"
        )
    cpu = config.trainer.device == "cpu"
    if cpu and config.actor_rollout_ref.actor.strategy == "fsdp":
        faults.append("actor_rollout_ref.actor.strategy: 'fsdp' cannot shard CPU parameters; use fsdp2")
    if cpu and config.actor_rollout_ref.rollout.checkpoint_engine.backend != "vla3_gloo":
        faults.append(
            "actor_rollout_ref.rollout.checkpoint_engine.backend: "
            f"{config.actor_rollout_ref.rollout.checkpoint_engine.backend!r} needs an accelerator; use vla3_gloo"
        )
    micro = config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
    if not isinstance(micro, int) or micro < 1:
        faults.append(f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: {micro}, expected at least 1")
    return faults + _stage_checks(config, vla3)


def _stage_checks(config: DictConfig, vla3: VLA3Config) -> list[str]:
    faults = []
    algorithm, actor, streaming = vla3.algorithm, config.actor_rollout_ref.actor, vla3.stages.streaming.enabled
    groups = config.data.train_batch_size // algorithm.group_size
    if (streaming or algorithm.mini_batches == "episodes") and algorithm.num_mini_batches > groups:
        faults.append(
            f"vla3.algorithm.num_mini_batches: {algorithm.num_mini_batches} mini-batches of whole groups, but a step "
            f"has {groups}; use at most {groups}"
        )
    for key in ("param_offload", "optimizer_offload"):
        if streaming and actor.fsdp_config.get(key):
            faults.append(
                f"actor_rollout_ref.actor.fsdp_config.{key}: true with vla3.stages.streaming.enabled: what is "
                "offloaded between updates cannot take a micro-batch at any time; turn one of them off"
            )
    rollout = config.actor_rollout_ref.rollout
    replicas = rollout.n_gpus_per_node * rollout.nnodes // rollout.tensor_model_parallel_size
    if vla3.env.workers < replicas:
        faults.append(
            f"vla3.env.workers: {vla3.env.workers} for {replicas} policy workers, expected at least as many: an env "
            f"worker asks one policy worker, so {replicas - vla3.env.workers} would never work; set it to {replicas}"
        )
    return faults


def _derive(config: DictConfig, vla3: VLA3Config) -> None:
    """What follows from other keys, so that nobody has to say it twice."""
    from vla3_plugin.placement.fit import demand

    with open_dict(config):
        config.vla3 = OmegaConf.structured(vla3)
        config.vla3.run_dir = os.fspath(Path(vla3.run_dir).absolute())
        config.trainer.default_local_dir = os.fspath(Path(config.trainer.default_local_dir).absolute())
        config.actor_rollout_ref.actor.use_kl_loss = vla3.algorithm.kl_beta > 0
        config.actor_rollout_ref.rollout.n = 1  # groups are the episode plan's; verl must not multiply by them again
        ray_init = config.ray_kwargs.ray_init
        if not ray_init.get("address"):
            needed = demand(config)
            ray_init.num_cpus = max(needed.cpus, ray_init.get("num_cpus") or os.cpu_count() or 1)
            if config.trainer.device == "cpu":
                ray_init.num_gpus = needed.gpus
            ray_init.include_dashboard = False
    OmegaConf.resolve(config)  # the resolvers of profile.py exist in this process alone
    os.environ.setdefault("TENSORBOARD_DIR", os.path.join(config.vla3.run_dir, "tensorboard"))


def _prepare_local_cluster(config: DictConfig) -> None:
    """A Ray head listens on every interface whatever node address it is given, so ours asks for a token."""
    if config.ray_kwargs.ray_init.get("address"):
        return
    os.environ.setdefault("RAY_worker_niceness", "0")  # ray's 15 lets any other job starve the trainer
    # ray's record of every task, for a dashboard that is off: each request is a task, and it grew by 0.25 MB a second
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    if os.environ.get("RAY_AUTH_MODE"):
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # verl has imported ray already, and ray reads its configuration once, at import
    import ray

    ray._raylet.Config.initialize("")  # type: ignore[attr-defined]
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
