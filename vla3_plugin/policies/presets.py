"""Named policy sizes: ``<family>`` is the published architecture, ``<family>-nano`` the same classes at a few million
parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vla3_plugin.policies.gr00t_sizes import PUBLISHED as GR00T_PUBLISHED
from vla3_plugin.policies.gr00t_sizes import model_sizes as gr00t_sizes
from vla3_plugin.policies.openvla_prompts import TEMPLATE as OPENVLA_PROMPT
from vla3_plugin.policies.pi05_prompt import STATE_NUMBERS, STATE_PROMPT

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
    ``prompt``, ``normalisation``: what a record made from demonstrations for this preset says (``Processing``).
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
    prompt: str = "{task}\n"
    normalisation: str = "mean_std"
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


def _prismatic_model(**sizes: Any) -> dict[str, Any]:
    """Keyword arguments of ``prismatic.PrismaticSizes``; the published ones, where ``sizes`` says nothing."""
    published: dict[str, Any] = dict(
        dino=dict(width=1024, depth=23, heads=16, mlp=4096, patch=14, image=224, registers=4, layer_scale=True),
        siglip=dict(width=1152, depth=26, heads=16, mlp=4304, patch=14, image=224),
        text=dict(
            vocab_size=32064,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
            max_position_embeddings=2048,
            rms_norm_eps=1e-6,
        ),
        vocab_padding=64,
    )
    return {**published, **sizes}


_PRISMATIC_NANO = _prismatic_model(
    dino=dict(width=128, depth=2, heads=4, mlp=256, patch=16, image=64, registers=2, layer_scale=True),
    siglip=dict(width=128, depth=2, heads=4, mlp=256, patch=16, image=64),
    text=dict(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        initializer_range=0.06,
    ),
    vocab_padding=0,
)

_TOKENS: dict[str, Any] = dict(prompt=OPENVLA_PROMPT, normalisation="quantiles")
_TOKENS_NANO: dict[str, Any] = dict(
    _TOKENS,
    policy=dict(value_hidden=128),
    image_size=(64, 64),
    max_tokens=36,
    words=("what", "action", "should", "robot", "take", "out", *NANO_WORDS),
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
    "gr00t-n1.5": Preset(
        family="gr00t_n1_5",
        summary="the published sizes: Eagle 2.5 (12 layers of Qwen3 1.7B, SigLIP) and a 0.6 B DiT, 2.4 B parameters",
        model=GR00T_PUBLISHED,
        policy=dict(executed=8),
        max_tokens=96,
    ),
    "gr00t-n1.5-nano": Preset(
        family="gr00t_n1_5",
        summary="the same classes at 3 M parameters, 64 px: a policy that samples and trains on one CPU core",
        model=gr00t_sizes(
            vision=dict(
                hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, patch_size=16,
                image_size=64, hidden_act="gelu_pytorch_tanh",
            ),
            text=dict(
                hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=2, head_dim=32, vocab_size=256, max_position_embeddings=512,
                rope_parameters=dict(rope_theta=1e4, rope_type="default"),
            ),
            layers=3, image_token=14, vl=(1, 4, 32), dit=(4, 4, 32), hidden=128, horizon=8, max_action_dim=7,
            embodiments=1, future_tokens=4, max_positions=64, dropout=0.0, initializer_range=0.06,
        ),
        sincos_positions=True,
        policy=dict(executed=8, value_hidden=128),
        image_size=(64, 64),
        max_tokens=40,
        words=tuple(NANO_WORDS),
    ),
    "pi05": Preset(
        family="pi05",
        summary="the published sizes: PaliGemma 3B and a 300M action expert, 3.6 B parameters, 224 px",
        model=_pi0_model(
            width=2048, mlp=16384, expert=1024, expert_mlp=4096, depth=18, heads=8, head_dim=256, vocabulary=257152,
            vision=dict(
                hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16,
                patch_size=14, image_size=224,
            ),
            chunk_size=50,
        ),
        policy=dict(executed=5),
        max_tokens=200,
        prompt=STATE_PROMPT,
        normalisation="quantiles",
    ),
    "pi05-nano": Preset(
        family="pi05",
        summary="the same classes at 3 M parameters, 64 px: a policy that samples and trains on one CPU core",
        model=_pi0_model(
            width=128, mlp=384, expert=128, expert_mlp=384, depth=4, heads=4, head_dim=32, vocabulary=512,
            vision=dict(
                hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                patch_size=16, image_size=64,
            ),
            initializer_range=0.06,
            chunk_size=8, max_action_dim=7, num_inference_steps=4,
        ),
        sincos_positions=True,
        policy=dict(executed=8, value_hidden=128),
        image_size=(64, 64),
        max_tokens=64,
        words=("task", "state", "action", *NANO_WORDS, *STATE_NUMBERS),
        prompt=STATE_PROMPT,
        normalisation="quantiles",
    ),
    "openvla": Preset(
        family="openvla",
        summary="the published sizes: DINOv2-L, SigLIP-So400m and Llama-2 7B, one action token by token, 224 px",
        model=_prismatic_model(),
        max_tokens=64,
        **_TOKENS,
    ),
    "openvla-oft": Preset(
        family="openvla_oft",
        summary="the same network decoding chunks of 8 actions in parallel",
        model=_prismatic_model(),
        max_tokens=64,
        **_TOKENS,
    ),
    "openvla-nano": Preset(
        family="openvla",
        summary="the same classes at 2 M parameters, 64 px: a policy that samples and trains on one CPU core",
        model=_PRISMATIC_NANO,
        **_TOKENS_NANO,
    ),
    "openvla-oft-nano": Preset(
        family="openvla_oft",
        summary="the same network at 2 M parameters decoding chunks of 8 actions in parallel",
        model=_PRISMATIC_NANO,
        **_TOKENS_NANO,
    ),
    "latency": Preset(
        family="latency",
        summary="takes a set time to sample and to train, and no processor: for measuring schedules",
        model={},
        needs_processing=False,
    ),
}  # fmt: skip
