"""Named policy sizes. ``pi0`` is the published architecture, ``pi0-nano`` the same classes at about 2 M parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Every word of LIBERO's 130 instructions, then those of ManiSkill's table-top tasks and a few for tasks to come.
NANO_WORDS = """
alphabet and at back basket bbq between black book both bottle bottom bowl box butter cabinet caddy center cheese
chocolate close compartment cookie cream drawer dressing from front frying in inside it juice ketchup left microwave
middle milk moka mug next of off on open orange pan pick place plate pot pots pudding push put rack ramekin red right
salad sauce shelf soup stack stove table the them to tomato top tray turn under up white wine wooden yellow
a above across against align along another apple arm away ball banana behind below beside blue board brown button by
can carrot circle clockwise cloth color cube cup cyan down drop edge end eggplant far faucet finger for forward get
goal grasp gray green grip gripper handle hold hole insert into its keep knob lamp large leg lever lid lift line
location lower magenta marker move near object onto out over pad pan peg pink plug poke position pour press pull
purple raise reach region release right-hand roll rotate round side slide small socket sphere spoon square stand
straight sweep switch t target tee that then tip toggle tool toward towards tower two upright valve with
""".split()


@dataclass(frozen=True)
class Preset:
    """``model``: keyword arguments of transformers' config class; ``policy``: settings that differ from the defaults.

    ``words`` non-empty: the preset brings a word-level tokenizer of its own; empty: one must come with the checkpoint.
    ``sincos_positions``: fresh image position embeddings start as 2-D sines and cosines and not as small noise.
    ``needs_processing``: false for a family that takes observations as they are, without an environment's record.
    """

    family: str
    summary: str
    model: dict[str, Any]
    policy: dict[str, Any] = field(default_factory=dict)
    image_size: tuple[int, int] = (224, 224)
    max_tokens: int = 48
    words: tuple[str, ...] = ()
    sincos_positions: bool = False
    needs_processing: bool = True


def _pi0_model(
    *, width: int, mlp: int, expert: int, expert_mlp: int, depth: int, heads: int, head_dim: int, vocabulary: int,
    vision: dict[str, Any], initializer_range: float = 0.02, **sizes: Any,
) -> dict[str, Any]:  # fmt: skip
    gemma = dict(
        initializer_range=initializer_range,
        model_type="gemma",
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=head_dim,
        vocab_size=vocabulary,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    return dict(
        vlm_config=dict(
            model_type="paligemma",
            initializer_range=initializer_range,
            text_config=dict(gemma, hidden_size=width, intermediate_size=mlp),
            vision_config=dict(model_type="siglip_vision_model", vision_use_head=False, **vision),
            projection_dim=width,
            image_token_id=vocabulary,
        ),
        dit_config=dict(gemma, hidden_size=expert, intermediate_size=expert_mlp),
        initializer_range=initializer_range,
        **sizes,
    )


PRESETS: dict[str, Preset] = {
    "pi0": Preset(
        family="pi0",
        summary="the published sizes: PaliGemma 3B and a 300M action expert, 3.5 B parameters, 224 px",
        model=_pi0_model(
            width=2048, mlp=16384, expert=1024, expert_mlp=4096, depth=18, heads=8, head_dim=256, vocabulary=257152,
            vision=dict(
                hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16,
                patch_size=14, image_size=224,
            ),
            chunk_size=50,
        ),
        policy=dict(executed=5),
    ),
    "pi0-nano": Preset(
        family="pi0",
        summary="the same classes at 2 M parameters, 64 px: a policy that samples and trains on one CPU core",
        model=_pi0_model(
            width=128, mlp=384, expert=128, expert_mlp=384, depth=4, heads=4, head_dim=32, vocabulary=256,
            vision=dict(
                hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                patch_size=16, image_size=64,
            ),
            initializer_range=0.06,  # about 1/sqrt(width): 0.02 suits widths of thousands
            chunk_size=8, max_action_dim=7, num_inference_steps=4,
        ),
        sincos_positions=True,
        policy=dict(executed=8, value_hidden=128),
        image_size=(64, 64),
        max_tokens=24,
        words=tuple(NANO_WORDS),
    ),
    "latency": Preset(
        family="latency",
        summary="takes a set time to sample and to train, and no processor: for measuring schedules",
        model={},
        needs_processing=False,
    ),
}  # fmt: skip
