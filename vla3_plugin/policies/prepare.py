"""What an env worker needs of a policy: its ``prepare``, without its network where the family allows that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vla3_plugin.contract import EnvSpec, Observation
from vla3_plugin.policies.processing import Processing, ProcessingError
from vla3_plugin.policies.prompts import PromptTokenizer, load_tokenizer
from vla3_plugin.policies.registry import load_policy
from vla3_plugin.resources import embedded_weights


class Preparer:
    """``VLAPolicy.prepare`` from ``processing.json`` and ``tokenizer.json`` alone."""

    def __init__(self, processing: Processing, tokenizer: PromptTokenizer) -> None:
        self.processing, self.tokenizer = processing, tokenizer

    def prepare(self, observations: Sequence[Observation]) -> dict[str, Tensor]:
        inputs = self.processing.stack(observations)
        inputs["input_ids"], inputs["attention_mask"] = self.tokenizer([o.instruction for o in observations])
        return inputs


def load_preparer(path: str | Path, **overrides: Any) -> Any:
    """Something with ``prepare`` and ``processing``: light for directories of ours, else the whole policy."""
    directory = Path(embedded_weights(path))
    if (directory / "processing.json").is_file() and (directory / "tokenizer.json").is_file():
        processing = Processing.load(directory)
        tokenizer = PromptTokenizer(load_tokenizer(directory), processing.prompt, processing.max_tokens)
        return Preparer(processing, tokenizer)
    return load_policy(path, **overrides)


def check_env(processing: Processing, spec: EnvSpec) -> None:
    """Refuse a policy made for another environment, by every number that can differ.

    Raises:
        ProcessingError: cameras, state or action dimensions differ; the message says which key to change.
    """
    faults = []
    absent = [camera for camera in processing.cameras if camera not in spec.cameras]
    if absent:
        faults.append(f"cameras {absent} are missing (it has {sorted(spec.cameras)}); set vla3.env.options.cameras")
    if processing.state_dim != spec.state_dim:
        faults.append(f"the state has {spec.state_dim} values, the policy was trained on {processing.state_dim}")
    if processing.action_dim != spec.action_dim:
        faults.append(f"actions have {spec.action_dim} dimensions, the policy was trained on {processing.action_dim}")
    if faults:
        raise ProcessingError(
            f"the policy does not fit environment {spec.name}: " + "; ".join(faults) + ". Choose one trained on it "
            "(actor_rollout_ref.model.path)"
        )


def policy_summary(path: str | Path, **overrides: Any) -> dict[str, Any]:
    """Family and sizes for the preflight, from files alone: a full-size policy must not be loaded to be announced.

    Raises:
        ValueError: the path is no checkpoint, or its weights are missing or damaged.
    """
    directory = Path(embedded_weights(path))
    if not directory.is_dir():
        return {"source": f"{path} (not on this machine: a preset or a hub id)"}
    from safetensors import SafetensorError, safe_open

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} holds no .safetensors file; name a checkpoint directory, a preset or a hub id")
    count = 0
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():
                    size = 1
                    for dimension in weights.get_slice(name).get_shape():
                        size *= dimension
                    count += size
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or truncated: {error}; copy the checkpoint again") from None
    config = json.loads((directory / "config.json").read_text()) if (directory / "config.json").is_file() else {}
    return {"family": config.get("family", config.get("model_type", "unknown")), "parameters": count}
