"""How verl meets the plugin, in fresh interpreters, from any directory."""

import fcntl
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from preloaded import run_module

ROOT = Path(__file__).parents[1]


def python(code, *, cwd, **env):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, **env}
    )


def command(module, *arguments, cwd):
    return run_module(module, *arguments, cwd=cwd, env={**os.environ, "VLA3_PROFILE": "cpu"})


@pytest.mark.slow
def test_the_plugin_adds_little_to_importing_verl_and_no_simulator(tmp_path):
    """Measured as the import time of the plugin's own modules; the limit is 100 ms, the machine may be busy."""
    code = (
        "import sys, time; import verl; heavy = [m for m in ('mani_skill', 'libero', 'robosuite', "
        "'vla3_plugin.policies.pi0', 'vla3_plugin.trainer.trainer') if m in sys.modules]; "
        "before = set(sys.modules); "
        "[sys.modules.pop(m) for m in list(sys.modules) if m.startswith('vla3_plugin')]; "
        "t = time.process_time(); import vla3_plugin.plugin; print(round(1000 * (time.process_time() - t)), heavy)"
    )
    done = python(code, cwd=tmp_path)
    milliseconds, heavy = done.stdout.strip().split(" ", 1)
    assert heavy == "[]", "the plugin must not import models or simulators"
    assert int(milliseconds) < 100, done.stdout


@pytest.mark.slow
def test_a_plugin_that_fails_to_load_says_so(tmp_path):
    """verl swallows the exception at DEBUG level; the user must see it all the same."""
    code = "import sys; sys.modules['vla3_plugin.hooks'] = None; import verl; print('verl is there')"
    done = python(code, cwd=tmp_path)
    assert "verl is there" in done.stdout
    assert "vla3-plugin could not be loaded" in done.stderr and "vla3_plugin.hooks" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["vla3_libero", "vla3_maniskill_sync", "vla3_quickstart", "vla3_quickstart_libero"])
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_recipes_compose_in_both_profiles_from_any_directory(recipe, profile, tmp_path):
    done = command("verl.trainer.main", f"recipe={recipe}", f"vla3.profile={profile}", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trainer_mode: vla3" in done.stdout
    path = "lerobot/pi0_base" if profile == "gpu" else "pi0-nano-"
    assert f"path: {path}" in done.stdout


@pytest.mark.slow
def test_main_ppo_takes_the_same_recipes_and_overrides(tmp_path):
    done = command("verl.trainer.main_ppo", "+recipe=vla3_libero", "vla3.seed=41", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0 and "seed: 41" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe=vla3_manskill"], "did you mean vla3_maniskill? The known ones are: vla3_latency, vla3_libero"),
        ([], "no recipe was given; use recipe=NAME with one of: vla3_latency"),
        (["recipe=vla3_maniskill", "vla3.env.shards_per_worker=0"], "shards_per_worker: 0, expected more than 0"),
        (["recipe=vla3_maniskill", "+vla3.env.proceses=2"], "proceses"),
        (["recipe=vla3_maniskill", "vla3.algorithm.gamma=high"], "vla3.algorithm.gamma"),
        (["recipe=vla3_libero", "vla3.algorithm.num_mini_batches=500"], "num_mini_batches: 500 mini-batches of whole"),
        (["recipe=vla3_maniskill", "actor_rollout_ref.rollout.n_gpus_per_node=3"], "vla3.env.workers: 1 for 3 policy"),
        (
            ["recipe=vla3_maniskill", "actor_rollout_ref.actor.fsdp_config.param_offload=true"],
            "param_offload: true with vla3.stages.streaming.enabled",
        ),
        (["recipe=vla3_libero", "data.train_batch_size=30"], "data.train_batch_size: 30 episodes do not divide"),
        (["recipe=vla3_maniskill", "vla3.env.name=manyskill"], "'manyskill' is not a simulator"),
        (["recipe=vla3_maniskill", "actor_rollout_ref.model.path=/nowhere"], "actor_rollout_ref.model.path"),
        (["recipe=vla3_maniskill", "+actor_rollout_ref.model.options.noise=1"], "'noise' is not a setting of pi0"),
        (["recipe=vla3_maniskill", "actor_rollout_ref.actor.strategy=fsdp"], "cannot shard CPU parameters; use fsdp2"),
        (
            [
                "recipe=vla3_maniskill",
                "model_engine=megatron",
                "actor_rollout_ref.actor.megatron.context_parallel_size=2",
            ],
            "actor_rollout_ref.actor.megatron.context_parallel_size: 2, expected 1: every learner rank holds the whole",
        ),
        (
            ["recipe=vla3_maniskill", "actor_rollout_ref.actor.strategy=megatron"],
            "strategy: 'megatron', expected one of",
        ),
        (["recipe=vla3_maniskill", "vla3.env.shards_per_worker=500"], "vla3.env.shards_per_worker: 500"),
        (["recipe=vla3_maniskill", "trainer.total_training_steps=0"], "trainer.total_training_steps: 0"),
    ],
)
def test_bad_input_is_one_clear_error_before_ray_starts(arguments, message, tmp_path):
    done = command("verl.trainer.main", *arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr, done.stderr[-2000:]
    assert "Started a local Ray instance" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_second_start_in_a_used_directory_is_refused_and_leaves_its_records_alone(tmp_path):
    (tmp_path / "preflight.json").write_text("the first run's")
    with (tmp_path / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = command("verl.trainer.main", "recipe=vla3_latency", f"vla3.run_dir={tmp_path}", cwd=tmp_path)
    assert done.returncode == 2 and "another run is under way" in done.stderr, done.stderr[-2000:]
    assert (tmp_path / "preflight.json").read_text() == "the first run's"


@pytest.mark.slow
def test_the_wheel_carries_recipes_configs_patches_and_weights(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)],
        check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(target)
    for name in (
        "vla3_plugin/recipes/vla3_libero.yaml", "vla3_plugin/configs/base/common.yaml",
        "vla3_plugin/patches/cpu_process_group.py", "vla3_plugin/weights/pi0-nano-maniskill/model.safetensors",
        "vla3_plugin/telemetry/report.css", "hydra_plugins/vla3/__init__.py",
    ):  # fmt: skip
        assert name in names
    code = "import vla3_plugin.resources as r; print(r.resource_dir('recipes')); print(r.recipe_names())"
    done = python(code, cwd=tmp_path, PYTHONPATH=str(target))
    assert str(target) in done.stdout and "vla3_quickstart" in done.stdout, "an installed plugin uses its own files"


@pytest.mark.slow
def test_every_patch_says_what_it_is_and_applies(tmp_path):
    code = (
        "import verl, verl.utils.distributed, verl.utils.config, verl.workers.engine.fsdp.transformer_impl; "
        "import verl.workers.rollout.llm_server; "
        "from vla3_plugin import hooks; "
        "print([(p.name, p.state, bool(p.why and p.upstream)) for p in hooks.PATCHES.values()])"
    )
    done = python(code, cwd=tmp_path)
    names = sorted(p.stem for p in (ROOT / "patches").glob("[a-z]*.py"))
    assert done.stdout.strip().splitlines()[-1] == str([(n, "applied", True) for n in names]), done.stderr[-2000:]
