"""The options of an environment, checked once, with errors that name the nearest right one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from palaestra.envs.errors import UsageError
from palaestra.envs.grading.outcome import Interpreter
from palaestra.envs.tasks.task import MAX_STEP_S

Feedback = Literal["terminal", "last_line"]
ActionFormat = Literal["blocks", "program"]

_CHOICES = {
    "feedback": get_args(Feedback),
    "action_format": get_args(ActionFormat),
    "interpreter": get_args(Interpreter),
}


@dataclass(frozen=True, slots=True)
class EnvOptions:
    """How an environment talks and counts. A value that cannot be is a ``UsageError``."""

    max_turns: int = 5
    """Actions an episode may take; a task's own ``limits.turns`` goes first."""
    feedback: Feedback = "terminal"
    """``"terminal"`` shows what a person would want to see, ``"last_line"`` one line of CPython's own message."""
    action_format: ActionFormat = "blocks"
    """``"blocks"``: Markdown with fenced blocks; ``"program"``: the whole action is one program."""
    turn_penalty: float = 0.0
    """The reward is multiplied by ``1 - turn_penalty * (turns - 1)``, and is never below 0."""
    interpreter: Interpreter = "new"
    """``"fork"`` is faster and shares the cell's pre-imported interpreter."""
    step_s: float | None = None
    """Deadline of one execution in seconds, at most a day; None: what the task says."""
    max_observation_chars: int = 16_000
    """A longer observation loses its middle."""
    max_action_chars: int = 200_000
    """A longer action is not executed; the observation says so."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UsageError(
                    f"{name}={value!r} is not one of {', '.join(map(repr, choices))}{_nearest(value, choices)}"
                )
        for name, least in (("max_turns", 1), ("max_observation_chars", 100), ("max_action_chars", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name} must be an int of at least {least}, got {value!r}")
        if not 0.0 <= self.turn_penalty <= 1.0:
            raise UsageError(f"turn_penalty must be in [0, 1], got {self.turn_penalty!r}")
        if self.step_s is not None and not 0.0 < self.step_s <= MAX_STEP_S:
            raise UsageError(f"step_s must be more than 0 seconds and at most {MAX_STEP_S}, got {self.step_s!r}")

    @classmethod
    def of(cls, given: Mapping[str, Any], *, also: tuple[str, ...] = ()) -> EnvOptions:
        """From keyword arguments; for an unknown one a ``UsageError`` names the nearest, out of ``also`` too."""
        known = tuple(field.name for field in fields(cls))
        for name in given:
            if name not in known:
                choices = (*known, *also)
                raise UsageError(
                    f"unknown option {name!r}{_nearest(name, choices)}; the options are {', '.join(sorted(choices))}"
                )
        return cls(**given)


def _nearest(value: Any, choices: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(str(value), choices, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
