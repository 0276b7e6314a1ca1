"""What verl's workers read as ``actor_rollout_ref.model`` for a vision-language-action policy."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.base_config import BaseConfig


class ModelCard:
    """The few things verl's checkpoint manager and FLOPs counter ask of ``model.config``."""

    tie_word_embeddings = False
    num_attention_heads = 0

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type

    def save_pretrained(self, path: str) -> None:
        Path(path, "config.json").write_text(json.dumps({"model_type": self.model_type}))


@dataclass
class VLAModelConfig(BaseConfig):
    """``path`` is a preset name or a checkpoint directory; ``options`` are passed to the policy's constructor."""

    _mutable_fields = {"model_type", "hf_config"}

    path: str = "pi0-nano"
    model_type: str = "vla_policy"
    options: dict = field(default_factory=dict)
    value_lr: float | None = None  # learning rate of the value head; None: the policy's
    # what verl's engine reads from any model config
    use_remove_padding: bool = False
    use_fused_kernels: bool = False
    use_shm: bool = False
    trust_remote_code: bool = False
    enable_gradient_checkpointing: bool = False
    enable_activation_offload: bool = False
    cpu_threads: int = 1  # intra-op threads of learner and replica where they run on a CPU
    rollout_cpu_threads: int | None = None  # the replica's, which computes beside simulators; None: as many
    lora_rank: int = 0
    lora_alpha: int = 16
    lora_adapter_path: str | None = None
    lora: dict = field(default_factory=lambda: {"rank": 0, "merge": True})
    target_modules: Any = "all-linear"
    target_parameters: Any = None
    exclude_modules: Any = None
    hf_config: Any = None
    tokenizer: Any = None
    processor: Any = None

    def __post_init__(self) -> None:
        self.hf_config = ModelCard(self.model_type)

    def get_processor(self) -> None:
        return None
