"""Instructions to token ids of one fixed length, with the ``tokenizers`` library alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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

    def encode(self, instruction: str) -> tuple[Tensor, Tensor]:
        """Ids and mask, int64 [max_tokens] each. A prompt that does not fit is an error: half a task is another."""
        if instruction not in self._cache:
            ids = self.tokenizer.encode(
                self.prompt.replace("{task}", instruction.removesuffix("\n")), add_special_tokens=False
            ).ids
            ids = [self.bos, *ids]
            if len(ids) > self.max_tokens:
                raise ValueError(
                    f"instruction {instruction!r} takes {len(ids)} tokens, the policy was made for {self.max_tokens}"
                )
            padding = self.max_tokens - len(ids)
            self._cache[instruction] = (
                torch.tensor(ids + [0] * padding),
                torch.tensor([1] * len(ids) + [0] * padding),
            )
        return self._cache[instruction]

    def __call__(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        ids, masks = zip(*(self.encode(instruction) for instruction in instructions), strict=True)
        return torch.stack(ids), torch.stack(masks)

    def save(self, directory: Path) -> None:
        self.tokenizer.save(str(directory / FILE))


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
