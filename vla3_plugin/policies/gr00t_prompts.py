"""Eagle's prompts: a chat template with one placeholder a camera, to token ids of one fixed length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vla3_plugin.policies.prompts import FILE, PromptTokenizer, load_tokenizer, word_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IMAGE = "<IMG_CONTEXT>"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<img>", IMAGE, "</img>")
# The chat template of the published model, written out: system turn, user turn with images first, generation prompt.
PROMPT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{images}{task}<|im_end|>\n<|im_start|>assistant\n"
)
# What a word-level tokenizer reads: the same without the words that say nothing to a network trained from nothing.
WORD_PROMPT = "<|im_start|>user\n{images}{task}<|im_end|>\n"
_MERGES = ("vocab.json", "merges.txt")


class EaglePrompts(PromptTokenizer):
    """The prompt's tokens with one ``<IMG_CONTEXT>`` a camera, right-padded with 0 to ``max_tokens``.

    The policy gives each image its tokens when it encodes: what is sent and stored stays short.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str, max_tokens: int, cameras: int, listed: bool, formal: bool):
        # not the parent's: Eagle's prompts begin with a turn, not with <bos>
        self.tokenizer, self.prompt, self.max_tokens = tokenizer, prompt, max_tokens
        missing = [token for token in SPECIAL if tokenizer.token_to_id(token) is None]
        if missing:
            raise ValueError(f"the tokenizer has no {', '.join(missing)} token: it was not made for Eagle 2.5 (GR00T)")
        self.images = "".join(f"<image {k}><img>{IMAGE}</img>" for k in range(1, cameras + 1))
        self.image_token: int = tokenizer.token_to_id(IMAGE)
        self.listed, self.formal = listed, formal
        self._cache = {}

    def text(self, instruction: str, state: str | None = None) -> str:
        """The whole prompt as text, without a state. The published pipelines put a list's repr in for the task."""
        task = re.sub(r"[^\w\s]", "", instruction.lower()) if self.formal else instruction
        task = str([task]) if self.listed else task
        for token in SPECIAL:
            if token in task:
                raise ValueError(f"instruction {instruction!r} contains {token}, which is part of the prompt's format")
        return self.prompt.replace("{images}", self.images).replace("{task}", task)

    def _encode(self, instruction: str, state: str | None) -> tuple[Tensor, Tensor]:
        ids = self.tokenizer.encode(self.text(instruction), add_special_tokens=False).ids
        padding = self.max_tokens - len(ids)
        if padding < 0:
            raise ValueError(
                f"instruction {instruction!r} makes a prompt of {len(ids)} tokens (an image counts as one), the policy "
                f"was made for {self.max_tokens}: raise processing.max_tokens"
            )
        return torch.tensor(ids + [0] * padding), torch.tensor([1] * len(ids) + [0] * padding)


def eagle_tokenizer(directory: Path) -> Tokenizer:
    """Eagle's tokenizer from ``tokenizer.json``, or from Qwen's ``vocab.json`` and ``merges.txt``, as it was published.

    Raises:
        FileNotFoundError: the directory has neither.
    """
    if (directory / FILE).is_file() or not all((directory / name).is_file() for name in _MERGES):
        tokenizer = load_tokenizer(directory)
        tokenizer.no_padding()
        return tokenizer
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer.from_pretrained(directory, trust_remote_code=False).backend_tokenizer


def eagle_word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """One token a word for the nano presets, Eagle's special tokens among them. Digits and brackets sort before words,
    so that ``<IMG_CONTEXT>`` is 14 whatever the words are."""
    tokenizer = word_tokenizer([*words, "user", "<image", *(f"{k}>" for k in range(1, 9)), *SPECIAL])
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer
