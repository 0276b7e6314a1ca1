"""Numbers of GR00T N1.5 that need no network: sizes in the layout of its public ``config.json``, embodiments."""

from __future__ import annotations

from typing import Any

# The numbers of the published tags; ``new_embodiment`` is where fine-tunes on other robots go.
EMBODIMENTS = {
    "so100": 2, "unitree_g1": 3, "oxe_droid": 17, "gr1": 24, "agibot_genie1": 26, "new_embodiment": 31,
}  # fmt: skip


def model_sizes(
    *,
    vision: dict[str, Any],
    text: dict[str, Any],
    layers: int,
    image_token: int,
    vl: tuple[int, int, int],
    dit: tuple[int, int, int],
    hidden: int,
    horizon: int = 16,
    max_state_dim: int = 64,
    max_action_dim: int = 32,
    embodiments: int = 32,
    future_tokens: int = 32,
    max_positions: int = 1024,
    steps: int = 4,
    dropout: float = 0.2,
    initializer_range: float = 0.02,
) -> dict[str, Any]:
    """Keyword arguments of ``GR00TConfig``. ``vl`` and ``dit``: (blocks, heads, width of a head)."""
    vl_blocks, vl_heads, vl_width = vl
    blocks, heads, head_width = dit
    return dict(
        backbone_cfg=dict(select_layer=layers, project_to_dim=None),
        action_head_cfg=dict(
            action_dim=max_action_dim,
            action_horizon=horizon,
            add_pos_embed=True,
            backbone_embedding_dim=text["hidden_size"],
            diffusion_model_cfg=dict(
                num_layers=blocks, num_attention_heads=heads, attention_head_dim=head_width, output_dim=hidden,
                cross_attention_dim=text["hidden_size"], interleave_self_attention=True, norm_type="ada_norm",
                positional_embeddings=None, dropout=dropout, final_dropout=True,
            ),
            vl_self_attention_cfg=dict(
                num_layers=vl_blocks, num_attention_heads=vl_heads, attention_head_dim=vl_width,
                positional_embeddings=None, dropout=dropout, final_dropout=True,
            ),
            hidden_size=hidden, input_embedding_dim=heads * head_width, max_action_dim=max_action_dim,
            max_state_dim=max_state_dim, max_seq_len=max_positions, max_num_embodiments=embodiments,
            noise_beta_alpha=1.5, noise_beta_beta=1.0, noise_s=0.999, num_inference_timesteps=steps,
            num_target_vision_tokens=future_tokens, num_timestep_buckets=1000, use_vlln=True,
        ),
        eagle_config=dict(
            vision_config=dict(model_type="siglip_vision_model", initializer_range=initializer_range, **vision),
            text_config=dict(model_type="qwen3", initializer_range=initializer_range, **text),
            image_token_index=image_token, use_pixel_shuffle=False, mlp_connector_layers=1, select_layer=-1,
        ),
        initializer_range=initializer_range,
    )  # fmt: skip


PUBLISHED = model_sizes(
    vision=dict(
        hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, image_size=224,
        patch_size=14, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6, num_channels=3,
    ),
    text=dict(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151680, rope_parameters=dict(rope_theta=1e6, rope_type="default"), rms_norm_eps=1e-6,
        max_position_embeddings=40960,
    ),
    layers=12,
    image_token=151669,
    vl=(4, 32, 64),
    dit=(16, 32, 48),
    hidden=1024,
)  # fmt: skip
