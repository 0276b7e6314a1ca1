"""GR00T N1.5's processing: normalisation, prompts, tokenizers, image resizing."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from vla3_plugin.policies.gr00t_processing import GR00TProcessing, MinMax, resize_bicubic
from vla3_plugin.policies.gr00t_prompts import eagle_tokenizer
from vla3_plugin.policies.processing import ProcessingError

GOLDEN = Path(__file__).parents[1] / "golden" / "gr00t_n1_5"
STATS = json.loads((GOLDEN / "config.json").read_text())["dataset_stats"]


def record(**changes) -> GR00TProcessing:
    state, action = (MinMax(stats=dict(STATS[name])) for name in ("observation.state", "action"))
    values = dict(
        cameras=["a", "b"], image_size=(28, 28), state_dim=8, action_dim=7, state=state, action=action, max_tokens=150
    )
    return GR00TProcessing(**{**values, **changes})


def test_constant_dimensions_become_zero_and_come_back_as_their_value():
    scale = MinMax(stats={"min": [-1.0, 0.5], "max": [3.0, 0.5]})
    assert scale.forward(torch.tensor([[3.0, 0.7]])).tolist() == [[1.0, 0.0]]
    assert scale.inverse(torch.tensor([[-1.0, 9.0]])).tolist() == [[-1.0, 0.5]]


def test_records_that_would_act_wrongly_are_refused(caplog):
    for changes, words in (
        (dict(action=MinMax(stats={"min": [0.0] * 7})), "action normalisation 'min_max' lacks max"),
        (dict(action_dim=6), "action.stats.min has 7 values, expected 6"),
        (dict(embodiment="gr2"), "embodiment is 'gr2', expected a number or one of so100"),
        (dict(prompt="{task}"), "expected it to contain {images}"),
        (dict(task_style="json"), "task_style is 'json', expected list or text"),
    ):
        with pytest.raises(ProcessingError, match=words.replace("{", "\\{")):
            record(**changes)
    with caplog.at_level(logging.WARNING):
        record(state=MinMax(stats={"min": [1.0] * 8, "max": [0.0] * 8}))
    assert "min is above max in dimensions" in caplog.text


def test_prompts_follow_the_published_template():
    ready = record().with_tokenizer(eagle_tokenizer(GOLDEN / "fake_tokenizer_eagle"))
    about = json.loads((GOLDEN / "eagle_pre.json").read_text())
    expected = about["text_after_expansion.0"].replace("<IMG_CONTEXT>" * 4, "<IMG_CONTEXT>")
    assert ready.prompts.text("Pick up the bowl, please!") == expected
    formal = record(formalize=True, task_style="text").with_tokenizer(ready.prompts.tokenizer)
    assert (
        formal.prompts.text("Pick up the bowl, please!")
        .split("</img>")[-1]
        .startswith("pick up the bowl please<|im_end|>")
    )
    with pytest.raises(ValueError, match="contains <\\|im_end\\|>, which is part of the prompt's format"):
        ready.prompts.encode("stop<|im_end|>")
    with pytest.raises(ValueError, match="makes a prompt of .* tokens .* made for 150: raise processing.max_tokens"):
        ready.prompts.encode("very " * 40)


def test_resizing_elsewhere_is_the_cpus_within_two_steps_of_256():
    """The CPU has a kernel of its own; the one for other devices is run here on the CPU's floats."""
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 40, 60), dtype=np.uint8))

    class Elsewhere(torch.Tensor):
        device = torch.device("meta")

    ours = resize_bicubic(x.as_subclass(Elsewhere), (24, 24)).as_subclass(torch.Tensor)
    assert (ours.int() - resize_bicubic(x, (24, 24)).int()).abs().max() <= 2


def test_qwens_vocabulary_and_merges_are_read(tmp_path):
    """Eagle's tokenizer was published as Qwen's two files, not as one."""
    symbols = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    special = ["<|im_start|>", "<|im_end|>", "<img>", "<IMG_CONTEXT>", "</img>"]
    (tmp_path / "vocab.json").write_text(json.dumps({s: i for i, s in enumerate([*symbols, "go"])}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\ng o\n")
    added = {token: 200 + i for i, token in enumerate(special)}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "Qwen2Tokenizer",
                "added_tokens_decoder": {
                    str(i): {"content": token, "special": True, "normalized": False} for token, i in added.items()
                },
            }
        )
    )
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    ready = record(task_style="text", prompt="{images}{task}").with_tokenizer(eagle_tokenizer(tmp_path))
    ids, mask = ready.prompts.encode("go")
    assert ids[: mask.sum()].tolist()[-1] == ready.prompts.tokenizer.token_to_id("go")
    assert (ids == ready.prompts.image_token).sum() == 2
