"""Instructions to token ids of one fixed length, with the ``tokenizers`` library alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vla3_plugin.policies.pi05_prompt import STATE_BINS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
BOS = "<bos>"


class PromptTokenizer:
    """``<bos>`` and the prompt's tokens, right-padded with 0 to ``max_tokens``. Each prompt is encoded once."""

    def __init__(self, tokenizer: Tokenizer, prompt: str, max_tokens: int) -> None:
        self.tokenizer, self.prompt, self.max_tokens = tokenizer, prompt, max_tokens
        self.bos = tokenizer.token_to_id(BOS)
        if self.bos is None:
            raise ValueError(f"the tokenizer has no {BOS} token: it was not made for pi0")
        self._cache: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def wants_state(self) -> bool:
        return "{state}" in self.prompt

    def text(self, instruction: str, state: str | None = None) -> str:
        """The prompt. One that holds the state is of pi0.5's kind, whose instructions are cleaned: no space around, no
        underscore and no line break inside (double spaces and case stay)."""
        if state is None:
            return self.prompt.replace("{task}", instruction.removesuffix("\n"))
        task = instruction.strip().replace("_", " ").replace("\n", " ")
        return self.prompt.replace("{state}", state).replace("{task}", task)

    def encode(self, instruction: str, state: str | None = None) -> tuple[Tensor, Tensor]:
        """Ids and mask, int64 [max_tokens] each. A prompt that does not fit is an error: half a task is another."""
        if state is not None:
            return self._encode(instruction, state)  # not kept: hardly any comes twice
        if instruction not in self._cache:
            self._cache[instruction] = self._encode(instruction, None)
        return self._cache[instruction]

    def _encode(self, instruction: str, state: str | None) -> tuple[Tensor, Tensor]:
        ids = [self.bos, *self.tokenizer.encode(self.text(instruction, state), add_special_tokens=False).ids]
        if len(ids) > self.max_tokens:
            holding = "" if state is None else f" with a state of {len(state.split())} numbers"
            raise ValueError(
                f"instruction {instruction!r}{holding} takes {len(ids)} tokens, the policy was made for "
                f"{self.max_tokens}"
            )
        padding = self.max_tokens - len(ids)
        return torch.tensor(ids + [0] * padding), torch.tensor([1] * len(ids) + [0] * padding)

    def __call__(self, instructions: Sequence[str], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``state``: normalised, [B, S], for a prompt that holds it."""
        words = [None] * len(instructions) if state is None else state_words(state)
        ids, masks = zip(*map(self.encode, instructions, words), strict=True)
        return torch.stack(ids), torch.stack(masks)

    def save(self, directory: Path) -> None:
        self.tokenizer.save(str(directory / FILE))


def state_words(state: Tensor) -> list[str]:
    """Normalised states [B, S] as pi0.5 reads them: the bin of each value, 256 over [-1, 1], separated by spaces.

    Neither padded nor clipped: what lies below -1 is bin -1, what lies at 1 or above is bin 255.
    """
    edges = np.linspace(-1.0, 1.0, STATE_BINS + 1)[:-1]
    bins = np.digitize(state.cpu().numpy(), edges) - 1
    return [" ".join(map(str, row)) for row in bins.tolist()]


def load_tokenizer(directory: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = directory / FILE
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: the policy cannot read instructions without its tokenizer")
    return Tokenizer.from_file(str(file))


def word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """One token a lower-case word; ids 0 to 4 are ``<pad> <eos> <bos> <unk>`` and the newline, as PaliGemma's are."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", BOS, "<unk>", "\n", *sorted(set(words))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(Regex(r"[ .,;:!?]+"), "removed")]
    )
    return tokenizer
