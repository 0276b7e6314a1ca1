"""OpenVLA's network and image preparation: published names and shapes at full size, pixels, attention, precision."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import PIL
import pytest
import torch
from PIL import Image

from vla3_plugin.policies.checkpoints import CheckpointError
from vla3_plugin.policies.openvla_images import centre_crop, pillow_13_rows_first, resize_bicubic
from vla3_plugin.policies.presets import PRESETS
from vla3_plugin.policies.prismatic import (
    OutputHead,
    Prismatic,
    PrismaticSizes,
    attention_backend,
    is_unused,
    last_real,
    published_sizes,
)
from vla3_plugin.policies.prompts import word_tokenizer
from vla3_plugin.policies.registry import policy_summary

GOLDEN = Path(__file__).parents[1] / "golden" / "openvla"
RNG = np.random.default_rng(5)


def published_shapes(name: str) -> dict[str, tuple[int, ...]]:
    keys = json.loads((GOLDEN.parent / name / "full_size_keys.json").read_text())["keys"]
    return {key: tuple(shape) for key, (_, shape) in keys.items()}


def nano(**text) -> Prismatic:
    sizes = PrismaticSizes(**PRESETS["openvla-nano"].model)
    sizes.text.update(text)
    torch.manual_seed(0)
    network = Prismatic(sizes, "sdpa")
    network.draw()
    return network.eval()


# checkpoints of full size


@pytest.mark.parametrize("preset", ["openvla", "openvla-oft"])
def test_full_size_presets_have_the_published_tensors_without_the_unread_ones(preset: str) -> None:
    published = published_shapes(preset.replace("-", "_"))
    sizes = PrismaticSizes(**PRESETS[preset].model)
    with torch.device("meta"):
        ours = {name: tuple(t.shape) for name, t in Prismatic(sizes, "sdpa").state_dict().items()}
    unread = {name for name in published if is_unused(name, sizes)}
    assert ours == {name: shape for name, shape in published.items() if name not in unread}
    assert {name.split(".")[2] for name in unread} == {"blocks", "norm", "attn_pool"}
    parts = {".".join(name.split(".")[:4]) for name in unread if ".blocks." in name}
    assert parts == {"vision_backbone.featurizer.blocks.23", "vision_backbone.fused_featurizer.blocks.26"}


def test_sizes_are_those_of_the_published_configuration() -> None:
    """The hub's config.json says little about the language model; shapes say the rest."""
    config = {"model_type": "openvla", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    sizes, preset = published_sizes(config, published_shapes("openvla")), PrismaticSizes(**PRESETS["openvla"].model)
    assert (sizes.dino, sizes.siglip, sizes.vocab_padding) == (preset.dino, preset.siglip, preset.vocab_padding)
    assert sizes.text == {key: preset.text[key] for key in sizes.text}
    with torch.device("meta"):  # what neither says is Llama's default, which is Llama-2 7B's
        ours, theirs = (Prismatic(s, "sdpa").config.to_dict() for s in (preset, sizes))
    assert ours == theirs
    assert (sizes.first_token, sizes.end_token) == (31744, 32000)


def sharded(directory: Path, shapes: dict[str, tuple[int, ...]], shards: int = 3) -> None:
    """Files of bfloat16 tensors whose bytes are holes: a checkpoint of 15 GB that takes no room."""
    names, weight_map = sorted(shapes), {}
    for shard in range(shards):
        header, offset = {}, 0
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        for name in names[shard::shards]:
            end = offset + 2 * int(np.prod(shapes[name]))
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [offset, end]}
            offset, weight_map[name] = end, file
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as handle:
            handle.write(struct.pack("<Q", len(text)) + text)
            handle.truncate(8 + len(text) + offset)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def hub_directory(directory: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    sharded(directory, shapes)
    stats = {"q01": [-1.0] * 7, "q99": [1.0] * 7, "mask": [True] * 6 + [False]}
    config = {
        "model_type": "openvla",
        "image_sizes": [224, 224],
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "text_config": {"model_type": "llama", "pad_token_id": 32000, "vocab_size": 32064},
        "norm_stats": {"libero_spatial": {"action": stats}, "bridge_orig": {"action": stats}},
    }
    (directory / "config.json").write_text(json.dumps(config))
    word_tokenizer(["a"]).save(str(directory / "tokenizer.json"))
    return directory


def test_a_sharded_checkpoint_of_full_size_is_read_on_the_meta_device(tmp_path: Path) -> None:
    directory = hub_directory(tmp_path, published_shapes("openvla"))
    summary = policy_summary(directory, unnorm_key="libero_spatial")
    assert summary["family"] == "openvla" and summary["cameras"] == "agentview"
    assert summary["parameters"] > 7.4e9
    summary = policy_summary(directory, unnorm_key="libero_spatial", family="openvla_oft")
    assert summary["family"] == "openvla_oft" and summary["horizon"] == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("projector.fc2.bias"), "1 missing: network.projector.fc2.bias"),
        (lambda s: s.update({"extra.weight": (3,)}), "1 unexpected: extra.weight"),
        (lambda s: s.update({"projector.fc3.bias": (7,)}), r"1 of another shape: projector.fc3.bias \[7\]"),
        (lambda s: s.pop("vision_backbone.fused_featurizer.pos_embed"), "no OpenVLA network"),
        (lambda s: s.pop("language_model.model.embed_tokens.weight"), "no language_model.model of Llama's form"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, change, words: str) -> None:
    shapes = published_shapes("openvla")
    change(shapes)
    with pytest.raises(CheckpointError, match=words):
        policy_summary(hub_directory(tmp_path, shapes), unnorm_key="libero_spatial")


def test_unread_tensors_may_be_missing(tmp_path: Path) -> None:
    shapes = {name: s for name, s in published_shapes("openvla").items() if "attn_pool" not in name}
    assert policy_summary(hub_directory(tmp_path, shapes), unnorm_key="libero_spatial")["family"] == "openvla"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"vision_backbone_id": "siglip-vit-so400m"}, "vision_backbone_id is 'siglip-vit-so400m'"),
        ({"n_action_bins": 128}, "n_action_bins is 128"),
        ({"text_config": {"model_type": "phi"}}, "text_config.model_type is 'phi'"),
        ({"image_sizes": [384, 384]}, r"image_sizes is \[384, 384\], the position embeddings are for 224"),
    ],
)
def test_other_architectures_are_refused(config: dict, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        published_sizes(config, published_shapes("openvla"))


# pixels


@pytest.mark.parametrize(
    ("size", "target"),
    [  # the last three in the order of Pillow's version
        ((48, 40), (28, 28)), ((256, 256), (224, 224)), ((40, 64), (64, 64)), ((31, 17), (64, 32)),
        ((64, 64), (64, 64)), ((50, 37), (42, 42)), ((47, 42), (42, 42)), ((52, 46), (42, 42)),
    ],
)  # fmt: skip
def test_the_resize_is_pillows_bit_by_bit(size: tuple[int, int], target: tuple[int, int]) -> None:
    images = RNG.integers(0, 256, (2, *size, 3), dtype=np.uint8)
    images[1] = np.where(images[1] > 127, 255, 0)  # overshoots of the cubic are clipped
    rows_first = int(PIL.__version__.split(".")[0]) >= 13 and pillow_13_rows_first(size, target)
    ours = resize_bicubic(torch.from_numpy(images), target, rows_first).numpy()
    for image, got in zip(images, ours, strict=True):
        expected = Image.fromarray(image).resize(target[::-1], Image.Resampling.BICUBIC)
        assert np.array_equal(got, np.asarray(expected))


def test_the_centre_crop_keeps_the_middle_and_stretches_it() -> None:
    ramp = torch.arange(101, dtype=torch.uint8)[:, None, None].expand(101, 101, 3)
    cropped = centre_crop(ramp[None], 0.8)[0, :, 50, 0].float()
    expected = torch.linspace(10, 90, 101)
    assert (cropped - expected).abs().max() <= 1.0
    assert torch.equal(centre_crop(ramp[None], 1.0)[0], ramp)


# the network


def test_patches_of_every_camera_stand_behind_the_first_token_in_order() -> None:
    network = nano()
    images = torch.randn(2, 2, 6, 64, 64)
    ids, mask = torch.tensor([[2, 9, 8], [2, 7, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    with torch.no_grad():
        embeds, shown, later = network.embed(images, ids, mask, torch.tensor([[5], [6]]))
        words = network.language_model.model.embed_tokens(ids)
        for camera in range(2):
            alone = network.projector(network.vision_backbone(images[:, camera]))
            torch.testing.assert_close(embeds[:, 1 + 16 * camera : 17 + 16 * camera], alone)
    assert torch.equal(embeds[:, 0], words[:, 0]) and torch.equal(embeds[:, 33:], words[:, 1:])
    assert shown.tolist() == [[1] * 35, [1] * 34 + [0]]
    assert later.shape == (2, 1, 128)


def test_each_tower_looks_at_its_own_three_channels() -> None:
    vision = nano().vision_backbone
    images = torch.randn(1, 6, 64, 64)
    changed = images.clone()
    changed[:, 3:] += 1.0
    with torch.no_grad():
        before, after = vision(images), vision(changed)
    assert torch.equal(before[..., :128], after[..., :128])
    assert not torch.allclose(before[..., 128:], after[..., 128:])


@pytest.mark.parametrize("causal", [True, False])
def test_who_sees_whom(causal: bool) -> None:
    """A later token is seen only without causality; a masked one never, and it takes no position."""
    network = nano()
    embeds, mask = torch.randn(1, 6, 128), torch.ones(1, 6, dtype=torch.long)

    def run(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return network.run(x, m, causal=causal)

    changed = embeds.clone()
    changed[:, 5] += 1.0
    before, after = run(embeds, mask), run(changed, mask)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6) == causal
    masked = mask.clone()
    masked[:, 2] = 0
    kept = [0, 1, 3, 4, 5]
    torch.testing.assert_close(run(embeds, masked)[:, kept], run(embeds[:, kept], mask[:, kept]), atol=2e-6, rtol=1e-5)


def test_logits_of_half_precision_weights_are_multiplied_in_float32() -> None:
    head = OutputHead(64, 20, bias=False).to(torch.bfloat16)
    hidden = torch.randn(3, 64).to(torch.bfloat16)
    logits = head(hidden, slice(5, 15))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ head.weight[5:15].float().T)
    assert head.double()(hidden.double()).dtype == torch.float64


def test_the_last_real_token_is_found_for_any_padding() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 1], [1, 1, 1, 1]])
    assert last_real(mask).tolist() == [2, 3, 3]


def test_attention_backends() -> None:
    assert attention_backend("auto", causal=False) == "sdpa"
    assert attention_backend("eager", causal=True) == "eager"
    if not torch.cuda.is_available():
        assert attention_backend("auto", causal=True) == "sdpa"
    with pytest.raises(ValueError, match="attention_backend is 'flash'"):
        attention_backend("flash", causal=True)
    with pytest.raises(ValueError, match="silently run causally"):
        attention_backend("flash_attention_2", causal=False)


def test_sizes_that_contradict_are_refused() -> None:
    model = PRESETS["openvla-nano"].model
    with pytest.raises(ValueError, match="share one patch grid"):
        PrismaticSizes(**{**model, "dino": {**model["dino"], "patch": 8}})
    with pytest.raises(ValueError, match="text.vocab_size is 200"):
        PrismaticSizes(**{**model, "text": {**model["text"], "vocab_size": 200}})
