"""What is asked of a config with ``model_engine=megatron``, whether megatron-core is installed or not."""

import importlib.metadata
import importlib.util
import re

import pytest

from vla3_plugin import config_megatron
from vla3_plugin.placement.memory import estimate


@pytest.mark.parametrize(
    ("actor", "message"),
    [
        ({"megatron": {"tensor_model_parallel_size": 2}}, "megatron.tensor_model_parallel_size: 2, expected 1: every"),
        ({"megatron": {"pipeline_model_parallel_size": 4}}, "pipeline_model_parallel_size: 4, expected 1.*fsdp2"),
        ({"megatron": {"context_parallel_size": 2}}, "context_parallel_size: 2, expected 1"),
        ({"megatron": {"virtual_pipeline_model_parallel_size": 2}}, "2, expected null or 1"),
        ({"megatron": {"param_offload": True}}, "param_offload: true, expected false: .* set it to false"),
        ({"megatron": {"optimizer_offload": True}}, "optimizer_offload: true"),
        ({"megatron": {"dtype": "float16"}}, "dtype: 'float16', expected 'bfloat16'"),
        ({"megatron": {"override_ddp_config": {"use_megatron_fsdp": True}}}, "override_ddp_config.use_megatron_fsdp"),
        ({"optim": {"optimizer": "muon"}}, "optim.optimizer: 'muon', expected 'adam'"),
        ({"checkpoint": {"async_save": True}}, "checkpoint.async_save: true, expected false"),
        ({"checkpoint": {"save_contents": ["model", "extra"]}}, "save_contents: optimizer left out"),
        ({"megatron": {"override_ddp_config": {"overlap_grad_reduce": "maybe"}}}, "'maybe', expected true or false"),
        ({"megatron": {"override_ddp_config": {"bucket_size": -1}}}, "bucket_size: -1, expected int above 0"),
        ({"optim": {"lr_decay_style": "inverse_square_root"}}, "expected 'constant' or 'linear' or 'cosine'"),
    ],
)
def test_settings_that_the_engine_does_not_have_are_refused_with_key_value_and_fix(actor, message):
    (fault,) = config_megatron.faults(actor)
    assert fault.startswith("actor_rollout_ref.actor.") and re.search(message, fault), fault
    assert config_megatron.faults({}) == []


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ({"lr": 1e-3, "lr_warmup_steps": 10}, "lr_warmup_steps: 10 of 10 steps"),
        ({"lr": 1e-3, "lr_warmup_steps": -1, "lr_warmup_steps_ratio": 1.0}, "lr_warmup_steps: 10 of 10 steps"),
        ({"lr": 1e-3, "min_lr": 2e-3}, "min_lr: 0.002 is above"),
        ({"lr": 1e-3, "lr_warmup_init": 1.0}, "lr_warmup_init: 1.0 is above"),
    ],
)
def test_a_schedule_that_megatron_would_assert_in_a_worker_is_refused_before(optim, message):
    (fault,) = config_megatron.schedule_faults(Settings(optim), 10)
    assert message in fault
    assert config_megatron.schedule_faults(Settings(lr=1e-3, lr_warmup_steps=9), 10) == []


class Settings(dict):
    __getattr__ = dict.__getitem__


def test_another_megatron_core_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.12.0")
    assert "megatron-core 0.12.0, expected 0.16" in config_megatron.missing()


def test_each_rank_holds_the_whole_policy_and_its_part_of_adams_states():
    def bytes_of(**how):
        parts = estimate(parameters=1000, actor_workers=4, **how)["parts"]
        return [parts[name]["bytes"] for name in ("actor weights", "actor gradients", "adamw states")]

    assert bytes_of() == [4000, 4000, 8000]
    assert bytes_of(shards=1, state_shards=4) == [16000, 16000, 8000]
    assert bytes_of(shards=1) == [16000, 16000, 32000]
