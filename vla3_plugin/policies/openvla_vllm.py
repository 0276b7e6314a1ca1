"""vLLM's own OpenVLA as what samples in a policy worker (``policy.rollout_backend: vllm``).

The policy's module stays in host memory: publications are kept and verified there, and go to vLLM from there. vLLM runs
vision towers and language model; prompt, pixels, tokens and actions stay the module's. It hands out no hidden states,
so there are no values: GRPO and evaluation can use it, PPO cannot. Greedily it answers as the module does; sampling
draws other numbers from the same noise keys.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor

from vla3_plugin.policies.base import ActionChunk, NoiseKey
from vla3_plugin.policies.noise import keyed_seed
from vla3_plugin.policies.openvla_prompts import OpenVLAPrompts
from vla3_plugin.policies.presets import PRESETS
from vla3_plugin.policies.prompts import FILE
from vla3_plugin.profile import has_gpu

if TYPE_CHECKING:
    from vla3_plugin.policies.openvla_base import TokenPolicy
    from vla3_plugin.policies.openvla_config import TokenSettings
    from vla3_plugin.policies.openvla_processing import OpenVLAProcessing

TESTED = "0.27.1"  # takes the torch and the transformers that this package is tested with
IMAGE, PATCH = 224, 14  # the only towers that vLLM's class builds
# of images; its processor knows no others. They are the published ones rounded to bfloat16, hence the tolerance.
MEANS = [[0.484375, 0.455078125, 0.40625], [0.5, 0.5, 0.5]]
STDS = [[0.228515625, 0.2236328125, 0.224609375], [0.5, 0.5, 0.5]]
ROUNDED = 2e-3
COLDEST = 0.01  # vLLM samples at no lower temperature
OURS: dict[str, Any] = {
    "load_format": "dummy",
    "limit_mm_per_prompt": {"image": 1},
    "logprobs_mode": "processed_logprobs",  # among the action tokens, at the sampling temperature
    # both would keep what older weights computed
    "enable_prefix_caching": False,
    "mm_processor_cache_gb": 0,
}


class VllmSampler:
    """``policy``'s network in vLLM, in this process, with the arguments ``options`` of ``vllm.LLM``."""

    def __init__(self, policy: TokenPolicy, options: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are handed over by reference
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # GPUs would get another than the one tested
        if not dist.is_initialized():  # vLLM's own group, of this one process, would listen on every interface
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if has_gpu() else "gloo", rank=0, world_size=1, store=dist.HashStore()
            )
        from vllm import LLM

        self.policy = policy
        record = policy.processing
        longest = (IMAGE // PATCH) ** 2 + record.max_tokens + record.action_dim
        with tempfile.TemporaryDirectory(prefix="vla3-vllm-") as directory:
            _describe(policy, Path(directory))
            self.engine = LLM(
                **{
                    "dtype": str(policy.dtype).removeprefix("torch."),
                    "max_model_len": longest,
                    "gpu_memory_utilization": 0.5,  # there are simulators, and buffers of the weights that arrive
                    "generation_config": "vllm",
                    **options,
                    **OURS,
                    "model": directory,
                }
            )
        self.load()

    def load(self) -> None:
        """Take the module's present weights, and forget what older ones made of images."""
        weights = iter(self.policy.network.state_dict().items())
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.engine.llm_engine.reset_encoder_cache()

    def act(
        self, inputs: dict[str, Tensor], noise_keys: Sequence[NoiseKey], mode: Literal["train", "eval"]
    ) -> ActionChunk:
        """See ``VLAPolicy.act``; values are zeros, or not finite where the weights are not."""
        from vllm import SamplingParams

        sizes, record = self.policy.network.sizes, self.policy.processing
        images = record.resized(inputs["pixels"][:, 0].cpu())
        prompts: list[Any] = [
            {
                "prompt_token_ids": ids[mask.bool()].tolist(),
                "multi_modal_data": {"image": image.numpy()},
            }
            for ids, mask, image in zip(inputs["input_ids"], inputs["attention_mask"], images, strict=True)
        ]
        parameters = [
            SamplingParams(
                temperature=self.policy.policy.temperature if mode == "train" else 0.0,
                seed=keyed_seed(key) >> 1,  # it takes 63 bits
                max_tokens=record.action_dim,
                ignore_eos=True,
                allowed_token_ids=list(range(sizes.first_token, sizes.end_token)),
                logprobs=0,  # of the chosen token alone
                detokenize=False,
            )
            for key in noise_keys
        ]
        answers = [answer.outputs[0] for answer in self.engine.generate(prompts, parameters, use_tqdm=False)]
        ids = torch.tensor([list(answer.token_ids) for answer in answers])[:, None]
        rows = [zip(answer.logprobs, answer.token_ids, strict=True) for answer in answers]
        logprob = torch.tensor([[step[token].logprob for step, token in row] for row in rows])[:, None]
        actions, value = record.token_actions(ids - sizes.first_token), 0 * logprob.sum((1, 2))[:, None]
        if mode == "eval":
            return ActionChunk(actions, torch.zeros_like(logprob), value)
        return ActionChunk(actions, logprob, value, {"ids": ids})


def check(policy: TokenPolicy) -> None:
    """Refuse what vLLM cannot sample.

    Raises:
        ValueError: it is not installed, or its OpenVLA is not this network.
    """
    faults = _missing(), _other_settings(policy.policy), _other_input(policy.processing), _other_network(policy)
    if (fault := next(filter(None, faults), None)) is not None:
        raise ValueError(f"policy.rollout_backend is 'vllm': {fault}; or set policy.rollout_backend: in_process")


def _missing() -> str | None:
    found = importlib.util.find_spec("vllm")  # not its submodules: that would import it, here and in every learner
    if found is None:
        return f"vllm is not installed: pip install vllm=={TESTED} timm on the GPU machines"
    roots = found.submodule_search_locations or []
    if not any(Path(root, "model_executor", "models", "openvla.py").is_file() for root in roots):
        return f"the installed vllm has no OpenVLA: pip install vllm=={TESTED}"
    return None if importlib.util.find_spec("timm") else "vllm's OpenVLA needs timm: pip install timm"


def _other_settings(settings: TokenSettings) -> str | None:
    options = settings.rollout_options
    if taken := sorted({*OURS, "model"} & set(options)):
        return f"rollout_options.{taken[0]} is set by the policy worker: leave it out"
    if several := [key for key, value in options.items() if key.endswith("parallel_size") and value != 1]:
        return (
            f"rollout_options.{several[0]} is {options[several[0]]}: a policy worker is one process, so leave it at 1"
        )
    if settings.temperature < COLDEST:
        return f"vllm samples at a temperature of {COLDEST} or more, policy.temperature is {settings.temperature}"
    return None


def _other_input(record: OpenVLAProcessing) -> str | None:
    if len(record.cameras) != 1:
        return f"vllm's OpenVLA sees one camera, the policy {', '.join(record.cameras)}"
    if record.image_size != (IMAGE, IMAGE):
        return f"vllm's OpenVLA sees {IMAGE} x {IMAGE} pixels, processing.image_size is {list(record.image_size)}"
    if np.abs(np.array([record.means, record.stds]) - [MEANS, STDS]).max() > ROUNDED:
        return (
            f"vllm's OpenVLA has the image means {MEANS} and deviations {STDS}, the policy {record.means} and "
            f"{record.stds}"
        )
    return None


def _other_network(policy: TokenPolicy) -> str | None:
    sizes, published = policy.network.sizes, PRESETS["openvla"].model
    for tower in ("dino", "siglip"):
        found = {key: getattr(getattr(sizes, tower), key) for key in published[tower]}
        if found != published[tower]:
            return f"vllm's OpenVLA has {tower} towers of {published[tower]}, the policy's is {found}"
    return None if sizes.vocab_padding else "the vocabulary has no padding (vocab_padding), where images stand"


def _describe(policy: TokenPolicy, directory: Path) -> None:
    """Config and tokenizer as vLLM reads them; the weights come later."""
    sizes, prompts = policy.network.sizes, policy.processing.prompts
    assert isinstance(prompts, OpenVLAPrompts)
    text = {key: value for key, value in policy.network.config.to_dict().items() if not key.startswith("_")}
    exact = {"head_dtype": "float32"}  # as ``prismatic.OutputHead``; vLLM reads it in either place
    config = {
        **exact,
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "image_sizes": [IMAGE, IMAGE],
        "image_token_index": sizes.end_token,  # of the padding, which no prompt holds
        "n_action_bins": sizes.bins,
        "text_config": {**text, **exact, "architectures": ["LlamaForCausalLM"]},
        "torch_dtype": str(policy.dtype).removeprefix("torch."),
    }
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_str(prompts.tokenizer.to_str())
    # vLLM samples none that the tokenizer does not know; a word-level one ends before the action tokens
    tokenizer.add_special_tokens([f"<action{i}>" for i in range(tokenizer.get_vocab_size(), sizes.end_token)])
    tokenizer.save(str(directory / FILE))
    start = prompts.tokenizer.id_to_token(prompts.start)  # the patches go behind it
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": start})
    )
