"""How instructions and observations become tokens. Text is rendered once and appended; history is never re-rendered.

::

    <user>instruction<assistant> action<eot> <tool>observation<assistant> action<eot> ...
                                 ^^^^^^^^^^^                              ^^^^^^^^^^^ sampled, with its end
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from palaestra.envs.errors import UsageError
from palaestra.rollout.tokenizer import Tokenizer

PLAIN_SPECIALS = ("<pad>", "<user>", "<assistant>", "<tool>", "<eot>")
"""What ``ChatFormat.plain`` expects of its tokenizer."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Fixed token sequences around what the environment says, and the id that ends an action.

    The sequences are tuples of ids, so that a format with line breaks around its markers (ChatML) fits as well.
    """

    tokenizer: Tokenizer
    before_instruction: tuple[int, ...]
    before_observation: tuple[int, ...]
    before_action: tuple[int, ...]
    end_id: int
    """Ends an action; it is sampled, never appended."""
    max_prompt_tokens: int
    """Longest opening, markers included; a longer one is an error."""
    max_observation_tokens: int
    """Longest observation, markers not included; a longer one is cut."""
    keep: Literal["head", "tail"] = "tail"
    """Which end of a cut observation stays: the tail holds the error of a traceback."""

    @classmethod
    def plain(
        cls,
        tokenizer: Tokenizer,
        *,
        max_prompt_tokens: int,
        max_observation_tokens: int,
        keep: Literal["head", "tail"] = "tail",
    ) -> ChatFormat:
        """One special token a marker: ``<user>``, ``<tool>``, ``<assistant>``, and ``<eot>`` as the end."""
        return cls(
            tokenizer=tokenizer,
            before_instruction=(tokenizer.special("<user>"),),
            before_observation=(tokenizer.special("<tool>"),),
            before_action=(tokenizer.special("<assistant>"),),
            end_id=tokenizer.special("<eot>"),
            max_prompt_tokens=max_prompt_tokens,
            max_observation_tokens=max_observation_tokens,
            keep=keep,
        )

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """What ends a generation."""
        return (self.end_id,)

    def opening(self, instruction: str) -> list[int]:
        """The prompt of the first action; longer than ``max_prompt_tokens`` is a ``UsageError``."""
        ids = [*self.before_instruction, *self.tokenizer.encode(instruction), *self.before_action]
        if len(ids) > self.max_prompt_tokens:
            raise UsageError(
                f"the instruction takes {len(ids)} tokens and max_prompt_tokens is {self.max_prompt_tokens}; raise it, "
                f"or leave this task out: {instruction[:80]!r}"
            )
        return ids

    def observation(self, text: str) -> list[int]:
        """What is appended between two actions. Only the observation is cut, at the end that ``keep`` gives up."""
        ids = self.tokenizer.encode(text)
        surplus = max(0, len(ids) - self.max_observation_tokens)
        kept = ids[surplus:] if self.keep == "tail" else ids[: len(ids) - surplus]
        return [*self.before_observation, *kept, *self.before_action]

    def action_text(self, ids: Sequence[int]) -> str:
        """The text of a sampled action, without the stop id."""
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] == self.end_id else ids)

    def action_ids(self, text: str) -> list[int]:
        """The ids of an action that somebody else wrote, its end included: a target of supervised training."""
        return [*self.tokenizer.encode(text), self.end_id]
