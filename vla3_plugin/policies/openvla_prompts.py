"""OpenVLA's prompt: the instruction in lower case inside a fixed sentence, ended by the token the weights expect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vla3_plugin.policies.prompts import FILE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEMPLATE = "In: What action should the robot take to {task}?\nOut:"
STARTS = ("<s>", "<bos>")  # Llama's, and that of our word-level tokenizers
BLANK = "▁"  # token 29871 of Llama's vocabulary; training saw one before the action


class OpenVLAPrompts:
    """The start token, the prompt's tokens and a final blank where the tokenizer has one; right-padded with 0."""

    wants_state = False  # see ``prompts.PromptTokenizer``, whose place this takes

    def __init__(self, tokenizer: Tokenizer, prompt: str, max_tokens: int) -> None:
        self.tokenizer, self.prompt, self.max_tokens = tokenizer, prompt, max_tokens
        known = [tokenizer.token_to_id(start) for start in STARTS]
        start = next((token for token in known if token is not None), None)
        if start is None:
            raise ValueError(f"the tokenizer has none of {', '.join(STARTS)}: it was not made for OpenVLA")
        self.start: int = start
        self.blank = tokenizer.token_to_id(BLANK)
        self._cache: dict[str, tuple[Tensor, Tensor]] = {}

    def encode(self, instruction: str) -> tuple[Tensor, Tensor]:
        """Ids and mask, int64 [max_tokens] each. A prompt that does not fit is an error: half a task is another."""
        if instruction not in self._cache:
            text = self.prompt.replace("{task}", instruction.lower())
            ids = [self.start, *self.tokenizer.encode(text, add_special_tokens=False).ids]
            if self.blank is not None and ids[-1] != self.blank:
                ids.append(self.blank)
            if len(ids) > self.max_tokens:
                raise ValueError(
                    f"instruction {instruction!r} takes {len(ids)} tokens, the policy was made for {self.max_tokens}: "
                    "raise max_tokens of its processing record"
                )
            padding = self.max_tokens - len(ids)
            self._cache[instruction] = (
                torch.tensor(ids + [0] * padding),
                torch.tensor([1] * len(ids) + [0] * padding),
            )
        return self._cache[instruction]

    def __call__(self, instructions: Sequence[str], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """int64 [B, max_tokens] each; ``state`` is not looked at."""
        ids, masks = zip(*(self.encode(instruction) for instruction in instructions), strict=True)
        return torch.stack(ids), torch.stack(masks)

    def save(self, directory: Path) -> None:
        self.tokenizer.save(str(directory / FILE))
