"""Repair lines: one-line functions whose right form can often only be learned from an error message.

The prompt is ``def <function><signature> # <doc>`` and the action is the whole one-line function. Every name is
``<verb>_<noun>``; the names of the two splits never overlap, and *all* names of a held-out task are held-out ones, so
that a model which solves held-out tasks has learned to read the message and not the names.

=====  ============================================  ===========================================================
kind   doc                                           what the first execution tells
=====  ============================================  ===========================================================
op     sum, product, minus, modulo, larger, smaller  nothing is hidden
order  difference, ratio, power                      which operand comes first: a visible test fails
guard  safe quotient, safe remainder                 ``ZeroDivisionError``: a divisor of 0 must give 0
conv   join                                          ``TypeError``: which of the two operands is the int
name   ``read_row``                                  ``NameError: ... Did you mean: 'read_tag'?``
attr   ``kit.read_row``                              ``AttributeError: ... Did you mean: 'read_tag'?``
arg    ``kit.read_row``, called with a and n         ``TypeError: ... keyword-only argument: 'limit'``
chain  as arg                                        first the renamed helper, then the missing argument
=====  ============================================  ===========================================================

A task is a pure function of its id, and a ``RepairLine`` is all that the generator knows of it. What CPython suggests
is decided by an edit distance; the real name is the only one in scope within that distance of the stale one, so the
suggestion is the same on every version.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from palaestra.envs.errors import UsageError
from palaestra.envs.suites.code.repair_lines_names import Split, names, neighbours
from palaestra.envs.tasks.task import FunctionCase, FunctionGrader, Limits, Task
from palaestra.envs.tasks.task_set import TaskEntry, TaskSet

Kind = Literal["op", "order", "guard", "conv", "name", "attr", "arg", "chain"]

STANDARD_KINDS: tuple[Kind, ...] = ("op", "order", "guard", "conv", "name", "attr")
LONG_KINDS: tuple[Kind, ...] = ("arg", "chain")
"""Harder ones: a missing keyword argument, and both faults after each other."""

# fmt: off
KEYWORDS = (
    "limit", "depth", "width", "mode", "size", "step", "rate", "base", "unit", "kind", "flag", "span", "port", "zone",
    "rank", "seed",
)
# fmt: on
OPERATIONS: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "sum": ("a+b", operator.add),
    "product": ("a*b", operator.mul),
    "minus": ("a-b", operator.sub),
    "modulo": ("a%b", operator.mod),
    "larger": ("max(a,b)", max),
    "smaller": ("min(a,b)", min),
}
ORDERED: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "difference": ("-", operator.sub),
    "ratio": ("//", operator.floordiv),
    "power": ("**", operator.pow),
}
GUARDED: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "safe quotient": ("//", operator.floordiv),
    "safe remainder": ("%", operator.mod),
}
TURNS = 3


@dataclass(frozen=True, slots=True)
class RepairLine:
    """All that the generator knows of one task; the task shows only ``prompt`` and the visible cases."""

    id: str
    split: Split
    kind: Kind
    function: str
    signature: str
    doc: str
    solution: str
    """The expression that solves it."""
    arguments: tuple[tuple[Any, ...], ...]
    expected: tuple[Any, ...]
    visible: int
    """How many of the cases, from the first on, are shown to the agent."""
    prelude: str = ""
    module: str = ""
    """``"kit."`` where the helpers live in a module."""
    stale: str = ""
    """The helper's old name, which the prompt gives; empty where there is no helper."""
    real: str = ""
    """Its present name."""
    keyword: str = ""
    """The keyword-only argument that the helper demands."""

    @property
    def prompt(self) -> str:
        return f"def {self.function}{self.signature} # {self.doc}"

    def program(self, expression: str) -> str:
        """The whole action for one expression."""
        return f"def {self.function}{self.signature}:return {expression}"

    def task(self) -> Task:
        """The task of this line. Its cases are built from our own values, so they skip the literal check."""
        cases = tuple(
            FunctionCase.model_construct(args=repr(args), expected=repr(expected), kwargs="{}")
            for args, expected in zip(self.arguments, self.expected, strict=True)
        )
        grader = FunctionGrader(entry_point=self.function, visible=cases[: self.visible], hidden=cases[self.visible :])
        return Task(
            id=self.id,
            kind=self.kind,
            instruction=self.prompt,
            prelude=self.prelude,
            grader=grader,
            reference={"solution.py": self.prelude + self.program(self.solution) + "\n"},
            limits=Limits(step_s=5.0, turns=TURNS),
            tags=("repair_lines", self.split),
        )


def repair_lines(split: Split, *, kinds: Sequence[Kind] = STANDARD_KINDS, seeds: Iterable[int] = range(64)) -> TaskSet:
    """One task for each seed (in 0..999999) and kind, made when asked for; ids ``repair_lines/train/name-000123``."""
    _check_split(split)
    if unknown := [kind for kind in kinds if kind not in get_args(Kind)]:
        raise UsageError(f"unknown kinds {unknown} of repair_lines; known are {list(get_args(Kind))}")
    ids = ((kind, f"repair_lines/{split}/{kind}-{_checked_seed(seed):06d}") for seed in seeds for kind in kinds)
    return TaskSet(
        (TaskEntry(task_id, kind, partial(_make_task, task_id)) for kind, task_id in ids),
        name=f"repair_lines/{split}",
    )


_ID = re.compile(r"repair_lines/(train|held_out)/([a-z]+)-(\d{6})")


def repair_line(task_id: str) -> RepairLine:
    """The line behind a task id; the same for the same id, always."""
    match = _ID.fullmatch(task_id)
    if match is None or match[2] not in _MAKERS:
        raise UsageError(f"{task_id!r} is no id of repair_lines; they look like 'repair_lines/train/name-000123'")
    split: Split = "train" if match[1] == "train" else "held_out"
    rng = random.Random(task_id)
    kind: Kind = match[2]  # type: ignore[assignment]
    function = rng.choice(names(split))
    return _MAKERS[kind](rng, id=task_id, split=split, kind=kind, function=function)


def _make_task(task_id: str) -> Task:
    return repair_line(task_id).task()


def _check_split(split: str) -> None:
    if split not in get_args(Split):
        raise UsageError(f"split must be one of {list(get_args(Split))}, got {split!r}")


def _checked_seed(seed: int) -> int:
    if not 0 <= seed < 1_000_000:
        raise UsageError(f"seeds of repair_lines lie in 0..999999, got {seed}")
    return seed


def _pairs(
    rng: random.Random, count: int, *, avoid: Iterable[tuple[int, int]] = (), equal: bool = True
) -> list[tuple[int, int]]:
    """``count`` distinct pairs of 2..9, none of them in ``avoid``; without ``equal`` the two differ."""
    seen, pairs = set(avoid), list[tuple[int, int]]()
    while len(pairs) < count:
        pair = rng.randint(2, 9), rng.randint(2, 9)
        if pair not in seen and (equal or pair[0] != pair[1]):
            seen.add(pair)
            pairs.append(pair)
    return pairs


def _op(rng: random.Random, **common: Any) -> RepairLine:
    doc = rng.choice(list(OPERATIONS))
    expression, apply = OPERATIONS[doc]
    shown = [(7, 3), (2, 5)]  # tell the six operations apart
    arguments = (*shown, *_pairs(rng, 3, avoid=shown))
    return _line(common, doc, expression, arguments, apply, visible=2)


def _order(rng: random.Random, **common: Any) -> RepairLine:
    doc = rng.choice(list(ORDERED))
    symbol, operation = ORDERED[doc]
    swapped = rng.random() < 0.5
    expression = f"b{symbol}a" if swapped else f"a{symbol}b"

    def apply(a: int, b: int) -> int:
        return operation(b, a) if swapped else operation(a, b)

    # (2, 3) tells both orders apart for all three operations; so do pairs of unequal numbers, but for 2**4 == 4**2.
    shown = [(2, 3)]
    arguments = (*shown, *_pairs(rng, 3, avoid=[*shown, (2, 4), (4, 2)], equal=False))
    return _line(common, doc, expression, arguments, apply, visible=1)


def _guard(rng: random.Random, **common: Any) -> RepairLine:
    doc = rng.choice(list(GUARDED))
    symbol, operation = GUARDED[doc]

    def apply(a: int, b: int) -> int:
        return operation(a, b) if b else 0

    shown = [(7, 2), (5, 0)]
    arguments = (*shown, *_pairs(rng, 2, avoid=shown), (3, 0))
    return _line(common, doc, f"a{symbol}b if b else 0", arguments, apply, visible=2)


def _conv(rng: random.Random, **common: Any) -> RepairLine:
    int_first = rng.random() < 0.5
    texts = [(rng.choice("xy") * 2, number) for number in rng.sample(range(2, 10), 4)]
    arguments = tuple((number, text) if int_first else (text, number) for text, number in texts)

    def apply(a: object, b: object) -> str:
        return f"{a}{b}"

    return _line(common, "join", "str(a)+b" if int_first else "a+str(b)", arguments, apply, visible=1)


def _helper(rng: random.Random, *, in_module: bool, renamed: bool, needs_keyword: bool, **common: Any) -> RepairLine:
    """A line that calls a helper which has been renamed, or wants one more argument, or both."""
    pool, near = names(common["split"]), neighbours(common["split"])
    function = common["function"]
    # The function itself is in scope too: were it near the stale name, it could be the one that is suggested.
    staleable = [name for name in pool if name != function and function not in near[name] and near[name]]
    stale = rng.choice(staleable)
    real = rng.choice(sorted(near[stale])) if renamed else stale
    far = [
        name
        for name in pool
        if name not in (stale, real, function) and name not in near[stale] and name not in near[real]
    ]
    decoys = rng.sample(far, 2)
    factor, shift, keyword = rng.randint(2, 5), rng.randint(0, 9), rng.choice(KEYWORDS)
    parameters, added = (f"x,*,{keyword}", keyword) if needs_keyword else ("x", str(shift))
    helpers = "".join(
        f"def {name}({parameters}):return {factor + index}*x+{added}\n" for index, name in enumerate([real, *decoys])
    )
    module = "kit." if in_module else ""
    prelude = helpers
    if in_module:
        prelude = f"import types\nkit=types.ModuleType('kit')\nexec({helpers!r},kit.__dict__)\n"

    def apply(x: int, n: int = shift) -> int:
        return factor * x + n

    arguments: tuple[tuple[int, ...], ...] = tuple((x,) for x in rng.sample(range(2, 10), 4))
    if needs_keyword:
        arguments = tuple(_pairs(rng, 4))
    call = f"{module}{real}(a,{keyword}=n)" if needs_keyword else f"{module}{real}(a)"
    return _line(
        common,
        module + stale,
        call,
        arguments,
        apply,
        visible=1,
        signature="(a,n)" if needs_keyword else "(a)",
        prelude=prelude,
        module=module,
        stale=stale,
        real=real,
        keyword=keyword if needs_keyword else "",
    )


def _line(
    common: Mapping[str, Any],
    doc: str,
    solution: str,
    arguments: Sequence[tuple[Any, ...]],
    apply: Callable[..., Any],
    *,
    visible: int,
    signature: str = "(a,b)",
    **helper: Any,
) -> RepairLine:
    return RepairLine(
        **common,
        signature=signature,
        doc=doc,
        solution=solution,
        arguments=tuple(arguments),
        expected=tuple(apply(*args) for args in arguments),
        visible=visible,
        **helper,
    )


_MAKERS: Mapping[str, Callable[..., RepairLine]] = {
    "op": _op,
    "order": _order,
    "guard": _guard,
    "conv": _conv,
    "name": partial(_helper, in_module=False, renamed=True, needs_keyword=False),
    "attr": partial(_helper, in_module=True, renamed=True, needs_keyword=False),
    "arg": partial(_helper, in_module=True, renamed=False, needs_keyword=True),
    "chain": partial(_helper, in_module=True, renamed=True, needs_keyword=True),
}
