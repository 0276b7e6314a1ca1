"""Two hundred random configs, bad and good, through composing and everything that happens before Ray starts.

Each is accepted, or refused with a message that names a key. No traceback comes out, and none takes long. Composing
itself is done once a recipe: then Hydra's own parser and its own way of applying overrides work on copies.
"""

import contextlib
import copy
import functools
import io
import math
import os
import re
import time

import pytest
import verl  # noqa: F401  loads the plugin, as every run does
from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from vla3_plugin import config_verl
from vla3_plugin.config import known_keys, parse
from vla3_plugin.placement import memory
from vla3_plugin.resources import resource_dir
from vla3_plugin.trainer import preflight

pytestmark = pytest.mark.slow
RECIPES = ("vla3_latency", "vla3_maniskill", "vla3_libero_sync")
EXAMPLES, SECONDS = 200, 20.0
# what no override of ours reaches is resolved once; a copy of it then costs little
ASIDE = ("critic", "distillation", "reward_model", "reward", "global_profiler")
KEY = re.compile(r"^[a-z_]\w*(\.\w+)*")


@functools.cache
def composed(recipe: str) -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"+recipe={recipe}"])
    for name in ASIDE:
        OmegaConf.resolve(config[name])
    for role in ("actor", "ref", "rollout"):
        OmegaConf.resolve(config.actor_rollout_ref[role].profiler)
    return config


def leaves(node, prefix=""):
    for key, value in node.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            yield from leaves(value, name)
        else:
            yield name


@functools.cache
def recipe_keys() -> tuple[str, ...]:
    """Every key of verl that a recipe, or a config group of ours, sets; and those of our model group."""
    found = {f"actor_rollout_ref.model.{name}" for name in config_verl.defaults()["actor_rollout_ref"]["model"]}
    for folder in ("recipes", "configs"):
        for path in resource_dir(folder).rglob("*.yaml"):
            if path.parent.name != "model":
                node = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
                found |= {key for key in leaves(node) if not key.startswith(("defaults", "vla3"))}
    return tuple(sorted(found))


def grammar(value) -> str:
    """``value`` as Hydra's override grammar writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{grammar(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(grammar, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)


NUMBERS = st.sampled_from(
    [0, 1, 2, 3, 7, 8, -1, -2, 0.5, 0.99, 1.5, 1e-8, -0.1, 10**6, 2**31, 2**63, 10**30, -(10**30), 1e300, 1e-300]
    + [math.nan, math.inf, -math.inf]
)
TEXTS = st.sampled_from(
    ["", " ", "two", "true", "None", "gae", "grpo", "auto", "cpu", "cuda", "fsdp", "nccl", "chunk", "a.b", "../.."]
    + ["é" * 9, "x" * 5000, "a\x00b", "a\x1bb", "${trainer.nowhere}", "${vla3.seed}", "${oc.env:NOWHERE}", "???", "{"]
)
SCALARS = st.one_of(NUMBERS, TEXTS, st.booleans(), st.none())
NAMES = st.sampled_from(["a", "b", "name", "enabled", "task", "lr"])
GARBAGE = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)
SCHEMA = known_keys()
CONTAINERS = [
    "vla3", "trainer", "trainer.v1", "data", "actor_rollout_ref", "actor_rollout_ref.actor", "actor_rollout_ref.model",
    "actor_rollout_ref.actor.optim", "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.rollout", "critic",
    "actor_rollout_ref.rollout.checkpoint_engine", "transfer_queue", "transfer_queue.backend", "ray_kwargs",
    "ray_kwargs.ray_init", "algorithm", "reward", "global_profiler", "actor_rollout_ref.actor._target_",
]  # fmt: skip
KEYS = st.one_of(
    st.sampled_from(SCHEMA),
    st.sampled_from(SCHEMA),
    st.deferred(lambda: st.sampled_from(recipe_keys())),
    st.sampled_from(CONTAINERS),
    st.sampled_from(
        [key[:-1] for key in SCHEMA] + ["trainer.total_trainig_steps", "data.train_batch_sise", "vla3.x.y.z"]
    ),
)
SIGNS = st.sampled_from(["", "", "", "++", "+", "~"])
GOOD = st.sampled_from(
    [
        "vla3.seed=7", "vla3.env.workers=2", "vla3.evaluation.mode=both", "vla3.algorithm.gamma=0.9",
        "vla3.keep_checkpoints=1", "data.train_batch_size=64", "trainer.total_training_steps=3", "trainer.save_freq=3",
        "actor_rollout_ref.actor.optim.lr=1e-3", "trainer.logger=[console,tensorboard]", "trainer.resume_mode=auto",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8", "vla3.stages.training.max_staleness=0",
        "actor_rollout_ref.model.value_lr=null", "+trainer.note=1", "actor_rollout_ref.model.rollout_cpu_threads=null",
    ]
)  # fmt: skip


@st.composite
def bad(draw):
    sign, key = draw(SIGNS), draw(KEYS)
    return f"~{key}" if sign == "~" else f"{sign}{key}={grammar(draw(GARBAGE))}"


OVERRIDES = st.one_of(
    st.lists(bad(), min_size=1, max_size=1), st.lists(st.one_of(bad(), GOOD), min_size=1, max_size=4), st.lists(GOOD)
)


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """Relative run directories end up here. What a config cannot change is computed once."""
    before, environment = os.getcwd(), dict(os.environ)
    os.chdir(tmp_path_factory.mktemp("fuzz") / ".")
    os.makedirs("a/b", exist_ok=True)
    os.chdir("a/b")
    os.environ["VLA3_PROFILE"] = "cpu"
    kept, machine, summary = {}, preflight.describe_machine(), preflight.policy_summary

    def policy(path, **options):
        question = repr((path, options))
        if question not in kept:
            kept[question] = summary(path, **options)
        return kept[question]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "describe_machine", lambda: machine)
        patch.setattr(preflight, "policy_summary", policy)
        yield
    os.chdir(before)
    os.environ.clear()
    os.environ.update(environment)


def chain(error: BaseException) -> str:
    """What Hydra prints of an error while composing."""
    lines = []
    while error is not None:
        lines.append(str(error))
        error = error.__cause__
    return "\n".join(lines)


def launch(recipe: str, overrides: list[str]) -> str | None:
    """None where the run would start now, else what it was refused with. Anything else raised is a fault of ours."""
    from verl.trainer import main_ppo

    from vla3_plugin.launch import _validate_before_asking

    config = copy.deepcopy(composed(recipe))
    try:
        ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(overrides), config)
    except HydraException as error:
        return chain(error)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(main_ppo, "need_critic", main_ppo.need_critic)
        patch.setattr(main_ppo, "need_reference_policy", main_ppo.need_reference_policy)
        _validate_before_asking(main_ppo)
        started = []
        patch.setattr(main_ppo, "run_ppo", lambda config, task_runner_class: started.append(config))
        patch.setenv("VLA3_SUPERVISE", "0")
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                main_ppo.main.__wrapped__(config)
            except SystemExit as refused:
                assert refused.code == 2 and not started
                return said.getvalue()
    assert len(started) == 1
    parse(started[0].vla3)
    assert not OmegaConf.is_interpolation(started[0].trainer, "default_local_dir")
    return None


def names(key: str) -> list[str]:
    """How a message may name a key: in full, by its last part, or by the part above it that is wrong already."""
    parts = key.split(".")
    return [key, parts[-1], *(".".join(parts[:n]) for n in range(2, len(parts)))]


def check(recipe: str, overrides: list[str]) -> bool:
    """Whether it was accepted."""
    start = time.perf_counter()
    refusal = launch(recipe, overrides)
    assert time.perf_counter() - start < SECONDS, overrides
    if refusal is None:
        return True
    assert "Traceback" not in refusal
    keys = [override.lstrip("+~").split("=")[0] for override in overrides]
    if "this run cannot start" in refusal:
        for line in refusal.splitlines()[1:]:
            if line.startswith("  ") and not line.startswith("   ") and ": " in line:
                assert KEY.match(line.strip()), line
        sections = {key.split(".")[0] for key in [*keys, "vla3", "trainer", "data", "actor_rollout_ref"]}
        assert any(f"  {section}" in refusal for section in sections), refusal
    assert any(name in refusal for key in keys for name in names(key)), (
        f"{overrides} was refused without the name of what was overridden: {refusal}"
    )
    return False


OUTCOMES: list[bool] = []


@settings(max_examples=EXAMPLES)
@given(recipe=st.sampled_from(RECIPES), overrides=OVERRIDES)
def test_every_config_is_accepted_or_refused_by_the_name_of_a_key(recipe, overrides):
    OUTCOMES.append(check(recipe, overrides))


def test_the_random_configs_were_bad_and_good():
    assert len(OUTCOMES) >= EXAMPLES
    assert sum(OUTCOMES) > EXAMPLES / 20 and OUTCOMES.count(False) > EXAMPLES / 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipes_themselves_are_accepted(recipe, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: memory.AvailableMemory(64 * 2**30, "machine"))
    assert launch(recipe, []) is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.total_training_steps='ten'", "trainer.total_training_steps: 'ten', expected a number"),
        ("trainer.total_training_steps=1.5", "trainer.total_training_steps: 1.5, expected a whole number"),
        ("trainer.save_freq=null", "trainer.save_freq: None, expected a number"),
        ("+trainer.total_trainig_steps=5", "unknown key; did you mean trainer.total_training_steps?"),
        ("trainer.v1=null", "trainer.v1: None, expected a mapping"),
        ("~trainer.v1.trainer_mode", "trainer.v1.trainer_mode: it is missing"),
        ("trainer.logger=[tensorbord]", "trainer.logger: 'tensorbord', expected one of"),
        ("trainer.resume_mode=newest", "trainer.resume_mode: 'newest', expected one of disable, auto"),
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path: None, expected an existing checkpoint"),
        ("trainer.experiment_name='${trainer.nowhere}'", "trainer.experiment_name: '${trainer.nowhere}' cannot be"),
        ("critic=null", "critic: None, expected a mapping"),
        ("algorithm=7", "algorithm: 7, expected a mapping"),
        ("actor_rollout_ref.actor._target_=os.system", "actor._target_: 'os.system', expected verl.workers.config"),
        ("actor_rollout_ref.actor.optim.lr=nan", "actor_rollout_ref.actor.optim.lr: nan, expected a number"),
        ("actor_rollout_ref.actor.optim.lr=0", "actor_rollout_ref.actor.optim.lr: 0, expected more than 0"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=cosin", "assert self.lr_scheduler_type in"),
        ("+actor_rollout_ref.model.lora_rang=4", "unknown key; did you mean actor_rollout_ref.model.lora_rank?"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "tensor_model_parallel_size: 2, expected 1"),
        ("actor_rollout_ref.rollout.n_gpus_per_node=0", "rollout.n_gpus_per_node: 0, expected more than 0"),
        ("transfer_queue.backend.SimpleStorage.total_storage_size=10", "total_storage_size = 10; raise that"),
        ("vla3.env.timeout_s=inf", "vla3.env.timeout_s: inf, expected more than 0"),
        ("vla3.env.timeout_s=nan", "vla3.env.timeout_s: nan, expected a number, more than 0"),
        ("vla3.algorithm.clip_ratio_c=0.5", "clip_ratio_c: 0.5, expected more than 1 (and at most 1e+12), or null for"),
        ("vla3.env.tasks=[]", "vla3.env.tasks: [], expected different numbers"),
        ("vla3.env.tasks=[1,1]", "vla3.env.tasks: [1, 1], expected different numbers"),
        ("vla3.seed=-1", "vla3.seed: -1, expected 0 or more"),
        ("vla3.run_dir='/dev/null/run'", "vla3.run_dir: '/dev/null/run' cannot be written to (Not a directory)"),
        (
            "+vla3.env.options.chunk_mss=5",
            "vla3.env.options.chunk_mss: latency has no such option; did you mean chunk_ms",
        ),
        ("+actor_rollout_ref.model.options.chnk=5", "actor_rollout_ref.model.path: 'latency': "),
        ("vla3.env.python=/nowhere/python", "vla3.env.python: '/nowhere/python' is not a program"),
        ("vla3.env.shards_per_worker=100000", "vla3.env.shards_per_worker: 100000 simulator processes: host memory"),
    ],
)
def test_a_fault_of_each_kind_says_which_key_what_and_why(override, message):
    refusal = launch("vla3_latency", [override])
    assert refusal is not None and message in refusal, refusal


def test_all_faults_outside_the_schema_are_reported_at_once_with_those_inside():
    refusal = launch("vla3_latency", ["trainer.nnodes=0", "actor_rollout_ref.model.cpu_threads=-1", "vla3.seed=-1"])
    assert refusal is not None and refusal.count("expected") == 3
