"""Sizes of GR00T N1.5's network, in the layout of its public ``config.json``, and the defaults of this family.

NVIDIA's config.json has ``action_head_cfg`` and ``backbone_cfg`` and leaves Eagle's sizes to a file of its code;
lerobot's fine-tunes have neither. What is not stated is read off the weights' shapes, and what shapes do not tell
(numbers of heads, rotary base, buckets) is taken from the published model.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any

from transformers import PreTrainedConfig

from vla3_plugin.policies.gr00t_sizes import PUBLISHED

# Where LoRA goes by default: attention and MLPs of SigLIP, Qwen3, the vision-language blocks and the DiT. The
# projections of the embodiments are trained whole (peft's ``modules_to_save``).
LORA_TARGETS = [
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "out_proj", "fc1", "fc2",
    "to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2",
]  # fmt: skip
LORA_WHOLE = ["state_encoder", "action_encoder", "action_decoder"]


class GR00TConfig(PreTrainedConfig):
    """``action_head_cfg``, ``backbone_cfg`` and ``eagle_config`` as published; other keys of the file are not read."""

    model_type = "gr00t_n1_5"

    def __init__(
        self,
        action_head_cfg: dict[str, Any] | None = None,
        backbone_cfg: dict[str, Any] | None = None,
        eagle_config: dict[str, Any] | None = None,
        initializer_range: float = 0.02,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.action_head_cfg = _over(PUBLISHED["action_head_cfg"], action_head_cfg)
        self.backbone_cfg = _over(PUBLISHED["backbone_cfg"], backbone_cfg)
        self.eagle_config = _over(PUBLISHED["eagle_config"], eagle_config)
        self.initializer_range = initializer_range

    def check(self) -> None:
        """Refuse the variants of the architecture that are not built here.

        Raises:
            ValueError: naming the key, its value and what is expected.
        """
        head, backbone, eagle = self.action_head_cfg, self.backbone_cfg, self.eagle_config
        dit, vl, text = head["diffusion_model_cfg"], head["vl_self_attention_cfg"], eagle["text_config"]
        for name, found, expected in (
            ("eagle_config.use_pixel_shuffle", eagle["use_pixel_shuffle"], False),
            ("eagle_config.mlp_connector_layers", eagle["mlp_connector_layers"], 1),
            ("eagle_config.select_layer", eagle["select_layer"], -1),
            ("action_head_cfg.diffusion_model_cfg.norm_type", dit["norm_type"], "ada_norm"),
            ("action_head_cfg.diffusion_model_cfg.interleave_self_attention", dit["interleave_self_attention"], True),
            ("action_head_cfg.diffusion_model_cfg.positional_embeddings", dit["positional_embeddings"], None),
            ("action_head_cfg.vl_self_attention_cfg.positional_embeddings", vl["positional_embeddings"], None),
        ):
            if found != expected:
                raise ValueError(f"{name} is {found!r}, expected {expected!r}: not the architecture of GR00T N1.5")
        width = text["hidden_size"] if backbone["project_to_dim"] is None else backbone["project_to_dim"]
        inner = dit["num_attention_heads"] * dit["attention_head_dim"]
        for name, found, need, why in (
            ("backbone_embedding_dim", head["backbone_embedding_dim"], width, "what the backbone gives"),
            ("diffusion_model_cfg.cross_attention_dim", dit["cross_attention_dim"], width, "what the backbone gives"),
            ("vl_self_attention_cfg heads x head width", vl["num_attention_heads"] * vl["attention_head_dim"], width,
             "what the backbone gives"),
            ("input_embedding_dim", head["input_embedding_dim"], inner, "heads x head width of the DiT"),
            ("diffusion_model_cfg.output_dim", dit["output_dim"], head["hidden_size"], "hidden_size"),
        ):  # fmt: skip
            if found != need:
                raise ValueError(f"action_head_cfg.{name} is {found}, expected {need}, {why}")
        if not 1 <= backbone["select_layer"] <= text["num_hidden_layers"]:
            raise ValueError(
                f"backbone_cfg.select_layer is {backbone['select_layer']}, expected 1 to {text['num_hidden_layers']}, "
                "the layers of the language model"
            )
        if head["action_horizon"] > head["max_seq_len"]:
            raise ValueError(
                f"action_head_cfg.action_horizon is {head['action_horizon']}, max_seq_len only {head['max_seq_len']}"
            )


def sizes_from_shapes(shapes: dict[str, tuple[int, ...]], stated: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``GR00TConfig`` from the shapes of published weights (``gr00t_files.network_key`` names).

    ``stated``: the file's own ``action_head_cfg``, ``backbone_cfg`` and ``eagle_config``, where it has them; they win.
    Tensors that are not there are left for the loader to miss.
    """
    found: dict[str, Any] = copy.deepcopy(PUBLISHED)
    head, eagle = found["action_head_cfg"], found["eagle_config"]
    dit, vl, vision, text = (
        head["diffusion_model_cfg"], head["vl_self_attention_cfg"], eagle["vision_config"], eagle["text_config"],
    )  # fmt: skip

    def read(name: str, axis: int, *places: tuple[dict[str, Any], str]) -> None:
        if name in shapes and len(shapes[name]) > axis:
            for place, key in places:
                place[key] = shapes[name][axis]

    def count(prefix: str, place: dict[str, Any], key: str) -> None:
        numbers = [int(m[1]) for name in shapes if (m := re.match(re.escape(prefix) + r"\.(\d+)\.", name))]
        if numbers:
            place[key] = max(numbers) + 1

    siglip, qwen = "backbone.vision_model", "backbone.language_model"
    read(f"{siglip}.embeddings.patch_embedding.weight", 0, (vision, "hidden_size"))
    read(f"{siglip}.embeddings.patch_embedding.weight", 2, (vision, "patch_size"))
    read(f"{siglip}.encoder.layers.0.mlp.fc1.weight", 0, (vision, "intermediate_size"))
    count(f"{siglip}.encoder.layers", vision, "num_hidden_layers")
    patches = shapes.get(f"{siglip}.embeddings.position_embedding.weight", (0,))[0]
    if patches:
        vision["image_size"] = math.isqrt(patches) * vision["patch_size"]
    read(f"{qwen}.embed_tokens.weight", 0, (text, "vocab_size"))
    read(f"{qwen}.embed_tokens.weight", 1, (text, "hidden_size"), (head, "backbone_embedding_dim"),
         (dit, "cross_attention_dim"))  # fmt: skip
    read(f"{qwen}.layers.0.mlp.gate_proj.weight", 0, (text, "intermediate_size"))
    read(f"{qwen}.layers.0.self_attn.q_norm.weight", 0, (text, "head_dim"))
    for projection, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if rows := shapes.get(f"{qwen}.layers.0.self_attn.{projection}.weight", (0,))[0]:
            text[key] = rows // text["head_dim"]
    count(f"{qwen}.layers", found["backbone_cfg"], "select_layer")
    text["num_hidden_layers"] = max(text["num_hidden_layers"], found["backbone_cfg"]["select_layer"])
    read("backbone.eagle_linear.weight", 0, (found["backbone_cfg"], "project_to_dim"), (dit, "cross_attention_dim"),
         (head, "backbone_embedding_dim"))  # fmt: skip

    count("action_head.model.transformer_blocks", dit, "num_layers")
    count("action_head.vl_self_attention.transformer_blocks", vl, "num_layers")
    read("action_head.future_tokens.weight", 0, (head, "num_target_vision_tokens"))
    read("action_head.future_tokens.weight", 1, (head, "input_embedding_dim"))
    read("action_head.position_embedding.weight", 0, (head, "max_seq_len"))
    read("action_head.state_encoder.layer1.W", 0, (head, "max_num_embodiments"))
    read("action_head.state_encoder.layer1.W", 1, (head, "max_state_dim"))
    read("action_head.state_encoder.layer1.W", 2, (head, "hidden_size"), (dit, "output_dim"))
    read("action_head.action_encoder.W1.W", 1, (head, "action_dim"), (head, "max_action_dim"))
    merged = {key: _over(found[key], stated.get(key)) for key in ("action_head_cfg", "backbone_cfg", "eagle_config")}
    # Heads do not show in shapes. Where the file does not name their number, they have the published width.
    sections, named = merged["action_head_cfg"], stated.get("action_head_cfg") or {}
    for key, width in (
        ("diffusion_model_cfg", "input_embedding_dim"),
        ("vl_self_attention_cfg", "backbone_embedding_dim"),
    ):
        if "num_attention_heads" not in (named.get(key) or {}):
            sections[key]["num_attention_heads"] = max(sections[width] // sections[key]["attention_head_dim"], 1)
    return merged


def _over(base: dict[str, Any], given: dict[str, Any] | None) -> dict[str, Any]:
    """``base`` with the values of ``given``, section by section."""
    merged = copy.deepcopy(base)
    for key, value in (given or {}).items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _over(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged
