"""Two scripted agents for the repair lines, as pure functions: one that does it right, one that shows how not quite.

``good_program`` is what a good engineer would do next, from the visible text alone. ``demonstrated_program`` is the
imperfect demonstrator whose traces warm a model up: it guesses, ignores messages, repeats itself and slips, so that
there is much left for reinforcement to improve, at temperature 1 and greedily.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from palaestra.envs.errors import UsageError
from palaestra.envs.suites.code.repair_lines import (
    GUARDED,
    KEYWORDS,
    OPERATIONS,
    ORDERED,
    RepairLine,
)
from palaestra.envs.suites.code.repair_lines_names import names, neighbours


@dataclass(frozen=True, slots=True)
class Habits:
    """How often the demonstrator does what; every field is a probability."""

    first: float = 0.5
    """The first try is the sensible one, otherwise a plausible guess."""
    fix: float = 0.35
    """After a message: do what it says."""
    same: float = 0.45
    """After a message: submit the same expression again. What is left over is a new guess."""
    slip: float = 0.15
    """Any submission: a forgotten colon, or the wrong function name."""

    def __post_init__(self) -> None:
        values = (self.first, self.fix, self.same, self.slip)
        if any(not 0.0 <= value <= 1.0 for value in values) or self.fix + self.same > 1.0:
            raise UsageError(f"habits are probabilities and fix + same is at most 1, got {self}")


_PROMPT = re.compile(r"def (?P<function>\w+)(?P<signature>\([a-z,]+\)) # (?P<doc>.+)")
_SUGGESTION = re.compile(r"Did you mean: '(\w+)'")
_MISSING = re.compile(r"missing \d+ required keyword-only argument: '(\w+)'")


def good_program(prompt: str, last_program: str | None, observation: str | None) -> str:
    """The next program of an agent that reads.

    ``prompt`` is the task's instruction; ``last_program`` and ``observation`` are None on the first turn. The message
    may be all of the feedback or its last line.
    """
    match = _PROMPT.fullmatch(prompt.strip())
    if match is None:
        raise UsageError(f"not the prompt of a repair line: {prompt[:80]!r}")
    header = f"def {match['function']}{match['signature']}:return "
    last = None if last_program is None else expression_of(last_program)
    if last is not None and (observation is None or last_program != header + last):
        return header + last  # The last try was not well formed: its message says nothing about the expression.
    return header + _good_expression(match["doc"], match["signature"], last, observation or "")


def _good_expression(doc: str, signature: str, last: str | None, message: str) -> str:
    if doc in OPERATIONS:
        return OPERATIONS[doc][0]
    if doc in ORDERED:
        symbol = ORDERED[doc][0]
        return f"b{symbol}a" if last == f"a{symbol}b" else f"a{symbol}b"
    if doc in GUARDED:
        plain = f"a{GUARDED[doc][0]}b"
        return plain if last is None else f"{plain} if b else 0"
    if doc == "join":
        if "concatenate" in message:
            return "a+str(b)"
        return "str(a)+b" if "unsupported operand" in message else last or "a+b"
    return _good_call(doc, signature, last, message)


def _good_call(doc: str, signature: str, last: str | None, message: str) -> str:
    """The call of a helper whose stale name the doc gives, with or without the module before it."""
    if last is None or "(" not in last:
        return f"{doc}(a)"
    callee, _, arguments = last.partition("(")
    module, dot, _ = doc.rpartition(".")
    if suggestion := _SUGGESTION.search(message):
        return f"{module}{dot}{suggestion[1]}({arguments}"
    if (missing := _MISSING.search(message)) and "n" in signature:
        return f"{callee}(a,{missing[1]}=n)"
    if "unexpected keyword" in message:
        return f"{callee}(a)"
    return last


def demonstrated_program(
    line: RepairLine,
    last_program: str | None,
    observation: str | None,
    rng: random.Random,
    habits: Habits = Habits(),
) -> str:
    """The next program of the imperfect demonstrator; ``last_program`` and ``observation`` are None on turn one."""
    if last_program is None:
        sensible = rng.random() < habits.first
        program = good_program(line.prompt, None, None) if sensible else line.program(_guess(line, rng))
    else:
        draw = rng.random()
        if draw < habits.fix:
            program = good_program(line.prompt, last_program, observation)
        elif draw < habits.fix + habits.same:
            program = line.program(expression_of(last_program))
        else:
            program = line.program(_guess(line, rng))
    if rng.random() < habits.slip:
        if rng.random() < 0.5:
            return program.replace(":", "", 1)
        return program.replace(line.function, rng.choice(names(line.split)), 1)
    return program


def expression_of(program: str) -> str:
    """The expression that a one-line program returns, also where its head is malformed."""
    return program.rpartition("return ")[2].strip()


def _guess(line: RepairLine, rng: random.Random) -> str:
    """A plausible expression that need not help."""
    if line.kind == "op":
        return rng.choice([expression for expression, _ in OPERATIONS.values()])
    if line.kind in ("order", "guard"):
        guarded = [f"a{symbol}b if b else 0" for symbol, _ in GUARDED.values()]
        return rng.choice(["a-b", "b-a", "a//b", "b//a", "a%b", "a**b", "b**a", "0", *guarded])
    if line.kind == "conv":
        return rng.choice(["a+b", "str(a)+b", "a+str(b)", "a+a", "str(a)+str(b)"])
    pool = names(line.split)
    name = rng.choice([line.stale, rng.choice(pool), rng.choice(sorted(neighbours(line.split)[line.stale]))])
    keyword = rng.choice(["", "", f",{rng.choice(KEYWORDS)}=n"]) if line.keyword else ""
    return f"{line.module}{name}(a{keyword})"
