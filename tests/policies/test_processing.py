"""Between environment units and the policy's numbers: exact both ways, and loud when something is missing."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vla3_plugin.contract import EnvSpec, Observation
from vla3_plugin.policies.processing import GRIPPERS, NORMALISATIONS, Normalisation, Processing, ProcessingError
from vla3_plugin.policies.prompts import PromptTokenizer, word_tokenizer

RNG = np.random.default_rng(0)
STATES = RNG.normal(size=(200, 9)) * np.linspace(0.1, 3, 9)
ACTIONS = RNG.uniform(-1, 1, size=(200, 7))


def record(**settings) -> Processing:
    return Processing.from_demos(STATES, ACTIONS, cameras=["front", "hand"], image_size=(64, 64), **settings)


def observation(height: int = 64, width: int = 64) -> Observation:
    images = {name: RNG.integers(0, 256, (height, width, 3), dtype=np.uint8) for name in ("hand", "front", "extra")}
    return Observation(images, STATES[0].astype(np.float32), "pick up the red cube")


def spec(**changes) -> EnvSpec:
    return replace(
        EnvSpec(
            name="Toy-v1",
            cameras={"front": (64, 64), "hand": (64, 64)},
            state_names=[f"s{i}" for i in range(9)],
            action_names=[f"a{i}" for i in range(7)],
            action_low=[-1.0] * 7,
            action_high=[1.0] * 7,
            max_steps=50,
            control_hz=20.0,
            success="-",
        ),
        **changes,
    )


@pytest.mark.parametrize("kind", NORMALISATIONS)
@pytest.mark.parametrize("gripper", GRIPPERS)
def test_actions_come_back_in_environment_units(kind, gripper):
    processing = record(normalisation=kind, gripper=gripper)
    actions = torch.from_numpy(ACTIONS[:20].astype(np.float32))
    there = processing.model_actions(actions, 32)
    assert there.shape == (20, 32) and not there[:, 7:].any()
    torch.testing.assert_close(processing.env_actions(there), actions, atol=1e-5, rtol=1e-5)


@given(st.lists(st.floats(-50, 50), min_size=4, max_size=4), st.lists(st.floats(0.01, 20), min_size=4, max_size=4))
def test_mean_std_is_the_textbook_formula_with_the_published_epsilon(mean, std):
    x = torch.linspace(-3, 3, 8).reshape(2, 4)
    normalised = Normalisation("mean_std", {"mean": mean, "std": std}).forward(x)
    expected = (x.double() - torch.tensor(mean, dtype=torch.float64)) / (torch.tensor(std, dtype=torch.float64) + 1e-8)
    torch.testing.assert_close(normalised, expected.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["quantiles", "bounds"])
def test_quantiles_and_bounds_map_to_minus_one_and_one(kind):
    low, high = NORMALISATIONS[kind]
    norm = Normalisation(kind, {low: [0.0, -2.0], high: [1.0, 6.0]})
    torch.testing.assert_close(
        norm.forward(torch.tensor([[0.0, 6.0], [0.5, 2.0]])), torch.tensor([[-1.0, 1.0], [0.0, 0.0]])
    )


def test_a_dimension_that_never_moves_is_not_blown_up():
    states = STATES.copy()
    states[:, 2] = 0.3 + 1e-9 * RNG.normal(size=200)
    processing = Processing.from_demos(states, ACTIONS, cameras=["front"], image_size=(64, 64))
    moved = torch.from_numpy(states[:1].astype(np.float32))
    moved[0, 2] += 0.001
    assert processing.model_state(moved, 32)[0, 2].abs() < 1


@pytest.mark.parametrize(
    ("gripper", "policy_says", "env_gets"),
    [("none", 0.4, 0.4), ("flip", 0.4, -0.4), ("unit", 1.0, 1.0), ("unit", 0.0, -1.0), ("unit_flip", 1.0, -1.0)],
)
def test_gripper_conventions(gripper, policy_says, env_gets):
    processing = replace(record(normalisation="identity"), gripper=gripper)
    out = processing.env_actions(torch.full((1, 2, 7), policy_says))
    assert out[0, 0, -1].item() == pytest.approx(env_gets) and out[0, 0, 0].item() == pytest.approx(policy_says)


def test_a_binary_gripper_is_rounded_to_open_or_closed_only():
    processing = replace(record(normalisation="identity"), gripper_binary=True)
    out = processing.env_actions(torch.tensor([[0.2] * 6 + [0.2], [0.2] * 6 + [-0.01]]))
    assert out[:, -1].tolist() == [1.0, -1.0] and out[0, 0].item() == pytest.approx(0.2)


def test_images_keep_their_aspect_and_are_padded_in_the_middle():
    pixels = torch.full((1, 2, 32, 64, 3), 255, dtype=torch.uint8)
    images = record().model_images(pixels)
    assert images.shape == (1, 2, 3, 64, 64)
    assert (images[..., :16, :] == -1).all() and (images[..., 48:, :] == -1).all()
    torch.testing.assert_close(images[..., 16:48, :], torch.ones(1, 2, 3, 32, 64))


def test_images_of_the_models_size_are_only_rescaled():
    pixels = torch.arange(256, dtype=torch.uint8)[:192].reshape(1, 1, 8, 8, 3)
    processing = replace(record(), image_size=(8, 8))
    expected = pixels.float().permute(0, 1, 4, 2, 3) / 127.5 - 1
    torch.testing.assert_close(processing.model_images(pixels), expected)


def test_prepare_orders_cameras_and_keeps_raw_pixels_and_state():
    processing = record().with_tokenizer(word_tokenizer(["pick", "up", "the", "red", "cube"]))
    shown = observation()
    inputs = processing.prepare([shown, shown])
    assert inputs["pixels"].dtype == torch.uint8 and inputs["pixels"].shape == (2, 2, 64, 64, 3)
    assert np.array_equal(inputs["pixels"][0, 0], shown.images["front"])
    assert np.array_equal(inputs["pixels"][0, 1], shown.images["hand"])
    assert np.array_equal(inputs["state"][1], shown.state)
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (2, 48)


def test_the_record_survives_its_file_exactly(tmp_path):
    processing = record(
        normalisation="quantiles", gripper="unit", gripper_binary=True, state_names=[f"s{i}" for i in range(9)]
    )
    processing = processing.with_tokenizer(word_tokenizer(["pick", "up"]))
    processing.save(tmp_path)
    loaded = Processing.load(tmp_path)
    assert loaded == processing
    assert loaded.prompts is not None
    assert torch.equal(loaded.prompts.encode("pick it up")[0], processing.prompts.encode("pick it up")[0])


def _broken(tmp_path, change):
    record().save(tmp_path)
    file = tmp_path / "processing.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(ProcessingError) as error:
        Processing.load(tmp_path)
    return str(error.value)


def test_missing_statistics_say_what_would_go_wrong(tmp_path):
    message = _broken(tmp_path, lambda data: data["action"]["stats"].pop("std"))
    assert "action" in message and "std" in message and "normalised units" in message and "processing.json" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["state"]["stats"]["mean"].pop(), "state.stats.mean has 8 values, expected 9"),
        (lambda d: d["action"]["stats"]["std"].__setitem__(3, -1.0), "action.stats.std[3] is -1.0"),
        (lambda d: d["action"]["stats"]["mean"].__setitem__(0, float("nan")), "not finite"),
        (lambda d: d["action"].update(kind="zscore"), "'zscore', expected one of"),
        (lambda d: d["action"].update(kind="bounds", stats={"low": [0.0] * 7, "high": [0.0] * 7}), "not below"),
        (lambda d: d.update(gripper="backwards"), "'backwards', expected one of"),
        (lambda d: d.update(cameras=["front", "front"]), "none twice"),
        (lambda d: d.update(prompt="do it"), "{task}"),
        (lambda d: d.update(colour="blue"), "colour"),
        (lambda d: d.pop("action"), "action"),
    ],
)
def test_contradictions_are_refused_with_the_key(tmp_path, change, words):
    assert words in _broken(tmp_path, change)


def test_no_record_at_all_is_explained(tmp_path):
    with pytest.raises(ProcessingError, match="normalisation statistics"):
        Processing.load(tmp_path)


def test_check_env_accepts_its_environment_and_names_what_differs():
    processing = record(state_names=[f"s{i}" for i in range(9)])
    processing.check_env(spec())
    with pytest.raises(ProcessingError, match="missing \\['hand'\\]"):
        processing.check_env(spec(cameras={"front": (64, 64)}))
    with pytest.raises(ProcessingError, match="8"):
        processing.check_env(spec(action_names=[f"a{i}" for i in range(8)]))
    with pytest.raises(ProcessingError, match="state dimensions"):
        processing.check_env(spec(state_names=[f"q{i}" for i in range(9)]))
    with pytest.raises(ProcessingError, match="one resolution"):
        processing.check_env(spec(cameras={"front": (64, 64), "hand": (32, 32)}))


def test_prepare_names_the_missing_camera():
    processing = record().with_tokenizer(word_tokenizer(["pick"]))
    shown = observation()
    del shown.images["hand"]
    with pytest.raises(ProcessingError, match="missing \\['hand'\\]"):
        processing.prepare([shown])


def test_prompts_are_bos_words_newline_and_padding():
    tokenizer = word_tokenizer(["cube", "red", "the", "pick"])
    prompts = PromptTokenizer(tokenizer, "{task}\n", 8)
    ids, mask = prompts.encode("Pick the red, unheard-of cube.")
    words = [tokenizer.id_to_token(i) for i in ids.tolist()]
    assert words == ["<bos>", "pick", "the", "red", "<unk>", "cube", "\n", "<pad>"]
    assert mask.tolist() == [1] * 7 + [0]
    assert torch.equal(prompts.encode("Pick the red, unheard-of cube.\n")[0], ids)


def test_an_instruction_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="takes 7 tokens, the policy was made for 6"):
        PromptTokenizer(word_tokenizer(["a"]), "{task}\n", 6)(["a a a a a"])
