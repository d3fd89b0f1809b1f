"""How the built-in tasks are written: a draft says what is asked, and a real function of ours both computes the
expected values and is the reference.

A family is one recipe. A fixed one is one task; a generator makes a different task from every seed: other rules, names,
data or bugs. A generator's rules are the keyword-only parameters of its solving function::

    def parse_duration(text: str, *, units: dict[str, int]) -> int: ...

On the host the function is called with the rules; in the task's reference they become constants above it (``UNITS``).
So one function, linted and type-checked, is oracle and reference at once, and no source is ever executed here.
"""

from __future__ import annotations

import copy
import random
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from palaestra.envs.suites.code.sources import Uses, baked, signature_text, with_constants
from palaestra.envs.tasks.task import FunctionCase, FunctionGrader, ScriptGrader, StdioCase, StdioGrader, Task
from palaestra.envs.tasks.task_set import TaskEntry

T = TypeVar("T")
Args = tuple[Any, ...]
"""The positional arguments of one call."""
SOLUTION = "solution.py"


@dataclass(frozen=True, slots=True)
class Cases(Generic[T]):
    """The inputs of the cases; what is expected is computed by the solving function."""

    visible: Sequence[T]
    hidden: Sequence[T]


class Draft(Protocol):
    """What a family makes from a seed: everything about a task but its id and kind."""

    def task(self, task_id: str, kind: str) -> Task: ...


@dataclass(frozen=True, slots=True)
class Bug:
    """What is wrong in the file that a repair task starts with: ``old``, which occurs once in the solving function."""

    old: str
    new: str
    exposed_by: tuple[Args, Args]
    """Two calls that go wrong with the bug: the first becomes a visible case, the second a hidden one."""


@dataclass(frozen=True, slots=True)
class FunctionDraft:
    """Write (or, with a bug, repair) one function; judged by calls."""

    solve: Callable[..., Any]
    describe: str
    cases: Cases[Args]
    name: str = ""
    """The function's name in ``solution.py``; empty means that of ``solve``."""
    rules: Mapping[str, Any] = field(default_factory=dict)
    uses: Uses = ()
    bug: Bug | None = None
    rel_tol: float = 0.0
    """Relative tolerance for floats; 0 is exact equality."""

    def task(self, task_id: str, kind: str) -> Task:
        name = self.name or self.solve.__name__
        reference = baked(self.solve, name=name, rules=self.rules, uses=self.uses)
        visible, hidden = list(self.cases.visible), list(self.cases.hidden)
        if self.bug:
            shows, hides = self.bug.exposed_by
            visible = [shows, *(args for args in visible if args not in (shows, hides))]
            hidden = [hides, *(args for args in hidden if args not in (shows, hides))]
        shown = tuple(self._case(args) for args in visible)
        what = f"a function `{name}{signature_text(self.solve)}`"
        ask = f"`{SOLUTION}` holds {what} that is wrong: repair it." if self.bug else f"Write {what} in `{SOLUTION}`."
        examples = "\n".join(f"    {name}({_arguments_text(case)}) == {case.expected}" for case in shown[:2])
        return Task(
            id=task_id,
            kind=kind,
            instruction=f"{ask}\n\n{_tidy(self.describe)}\n\nFor example:\n\n{examples}",
            files={SOLUTION: broken(reference, self.bug, self.rules)} if self.bug else {},
            grader=FunctionGrader(
                entry_point=name,
                visible=shown,
                hidden=tuple(self._case(args) for args in hidden),
                rel_tol=self.rel_tol,
            ),
            reference={SOLUTION: reference},
        )

    def _case(self, args: Args) -> FunctionCase:
        """The solving function gets a copy: a solution may change its arguments."""
        return FunctionCase.of(*args, expected=self.solve(*copy.deepcopy(args), **self.rules))


@dataclass(frozen=True, slots=True)
class ProgramDraft:
    """Write a program that reads standard input and prints; ``solve`` maps the one text to the other."""

    solve: Callable[..., str]
    describe: str
    cases: Cases[str]
    rules: Mapping[str, Any] = field(default_factory=dict)
    uses: Uses = ()

    def task(self, task_id: str, kind: str) -> Task:
        source = baked(self.solve, name="solve", rules=self.rules, uses=self.uses)
        main = '\n\nimport sys\n\nif __name__ == "__main__":\n    sys.stdout.write(solve(sys.stdin.read()))\n'
        shown = tuple(self._case(text) for text in self.cases.visible)
        example = textwrap.indent(f"{shown[0].stdin.rstrip()}\n\nit prints\n\n{shown[0].stdout.rstrip()}", "    ")
        example = example.replace("    it prints", "it prints")
        return Task(
            id=task_id,
            kind=kind,
            instruction=f"Write a program in `{SOLUTION}` that reads standard input and prints to standard output.\n\n"
            f"{_tidy(self.describe)}\n\nFor example, for the input\n\n{example}",
            grader=StdioGrader(visible=shown, hidden=tuple(self._case(text) for text in self.cases.hidden)),
            reference={SOLUTION: source + main},
        )

    def _case(self, text: str) -> StdioCase:
        return StdioCase(stdin=text, stdout=self.solve(text, **self.rules))


@dataclass(frozen=True, slots=True)
class CheckDraft:
    """Write a function with more than one right answer, judged by a check function of ours that asserts.

    ``check`` is called as ``check(candidate)``; its rules, the hidden inputs among them, are keyword-only parameters
    as those of ``solve``. ``show`` are calls whose answer is unique: they are the visible cases.
    """

    solve: Callable[..., Any]
    describe: str
    check: Callable[..., None]
    show: Sequence[Args]
    name: str = ""
    rules: Mapping[str, Any] = field(default_factory=dict)
    check_rules: Mapping[str, Any] = field(default_factory=dict)
    uses: Uses = ()

    def task(self, task_id: str, kind: str) -> Task:
        name = self.name or self.solve.__name__
        shown = tuple(
            FunctionCase.of(*args, expected=self.solve(*copy.deepcopy(args), **self.rules)) for args in self.show
        )
        examples = "\n".join(f"    {name}({_arguments_text(case)}) == {case.expected}" for case in shown)
        return Task(
            id=task_id,
            kind=kind,
            instruction=f"Write a function `{name}{signature_text(self.solve)}` in `{SOLUTION}`.\n\n"
            f"{_tidy(self.describe)}\n\nFor example:\n\n{examples}",
            grader=ScriptGrader(
                entry_point=name,
                check=baked(self.check, name="check", rules=self.check_rules, signature="(candidate)"),
                visible=shown,
            ),
            reference={SOLUTION: baked(self.solve, name=name, rules=self.rules, uses=self.uses)},
        )


@dataclass(frozen=True, slots=True)
class Family:
    """One recipe: ``make`` drafts a task, from a random stream that belongs to that task alone."""

    kind: str
    name: str
    make: Callable[[random.Random], Draft]
    is_generator: bool

    def entries(self, seeds: int) -> Iterator[TaskEntry]:
        """Its tasks, not made yet: ``kind/name``, or ``kind/name-000`` and so on for a generator."""
        ids = [f"{self.kind}/{self.name}"]
        if self.is_generator:
            ids = [f"{ids[0]}-{seed:03d}" for seed in range(seeds)]
        for task_id in ids:
            yield TaskEntry(task_id, self.kind, partial(self._task, task_id))

    def _task(self, task_id: str) -> Task:
        # Seeding by text is the same for every process and version of Python; hash() would not be.
        task = self.make(random.Random(task_id)).task(task_id, self.kind)
        return task.model_copy(update={"tags": ("builtin", "generated" if self.is_generator else "fixed")})


def fixed(kind: str, name: str, draft: Draft) -> Family:
    """One task that is written down as it is."""
    return Family(kind, name, lambda _rng: draft, is_generator=False)


def generator(kind: str, name: str, make: Callable[[random.Random], Draft]) -> Family:
    """A different task from every seed."""
    return Family(kind, name, make, is_generator=True)


def draw_calls(
    rng: random.Random,
    draw: Callable[[random.Random], Args],
    *,
    edges: Sequence[Args] = (),
    visible: int = 3,
    hidden: int = 9,
) -> Cases[Args]:
    """Distinct inputs for ``visible`` and ``hidden`` cases; the hand-picked ``edges`` are the first hidden ones."""
    seen, drawn = {repr(args) for args in edges}, list[Args]()
    wanted = visible + hidden - len(edges)
    for _ in range(100 * wanted):
        args = draw(rng)
        if repr(args) not in seen:
            seen.add(repr(args))
            drawn.append(args)
        if len(drawn) == wanted:
            return Cases(drawn[:visible], [*edges, *drawn[visible:]])
    raise ValueError(f"the inputs vary too little: {len(drawn)} of {wanted} distinct ones after {100 * wanted} draws")


def draw_texts(
    rng: random.Random,
    draw: Callable[[random.Random], str],
    *,
    edges: Sequence[str] = (),
    visible: int = 2,
    hidden: int = 7,
) -> Cases[str]:
    """As ``draw_calls``, for programs: each input is one text."""
    inputs = draw_calls(
        rng, lambda stream: (draw(stream),), edges=[(text,) for text in edges], visible=visible, hidden=hidden
    )
    return Cases([args[0] for args in inputs.visible], [args[0] for args in inputs.hidden])


def broken(reference: str, bug: Bug, rules: Mapping[str, Any]) -> str:
    """The reference with the bug put in."""
    old, new = with_constants(bug.old, rules), with_constants(bug.new, rules)
    if reference.count(old) != 1:
        raise ValueError(f"the bug's text {old!r} must occur once in the reference, not {reference.count(old)} times")
    return reference.replace(old, new)


def _arguments_text(case: FunctionCase) -> str:
    return case.args.removeprefix("(").removesuffix(")").removesuffix(",")


def _tidy(text: str) -> str:
    """Each paragraph on one line, as prose in Markdown; lists stay as they are."""
    paragraphs = textwrap.dedent(text).strip().split("\n\n")
    return "\n\n".join(part if part.startswith("- ") else part.replace("\n", " ") for part in paragraphs)
