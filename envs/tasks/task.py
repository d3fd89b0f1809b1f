"""A task: what the agent is asked, what it finds in its cell, and how the outcome is judged.

Python values in a task (arguments, expected results) are written as Python literals in strings, so that tuples,
sets, ints and floats keep their types in JSON: ``{"args": "(3, 'x')", "expected": "{1, 2}"}``.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from palaestra.envs.sandboxes.egress.allow_list import parse_target
from palaestra.envs.sandboxes.images.names import full_image_name

MAX_STEP_S = 86_400
"""The longest deadline of one execution: a day. Far longer ones are more than timers of the system can hold."""
MAX_ID_CHARS = 200


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Limits(_Frozen):
    """What one episode of the task may use. None means: what the environment says."""

    step_s: float = Field(default=10.0, gt=0, le=MAX_STEP_S, allow_inf_nan=False)
    """Deadline of one execution, whatever it runs."""
    memory_mib: int = Field(default=512, ge=64)
    pids: int = Field(default=64, ge=1)
    turns: int | None = Field(default=None, ge=1)
    egress: tuple[str, ...] = ()
    """``"host:port"`` of what its cells may reach outside, those that grade it included; empty: nothing."""

    @field_validator("egress")
    @classmethod
    def _are_targets(cls, egress: tuple[str, ...]) -> tuple[str, ...]:
        for target in egress:
            parse_target(target)
        return egress


class FunctionCase(_Frozen):
    """One call: ``entry_point(*args, **kwargs) == expected``, types included (``True`` is not ``1``)."""

    args: str
    """Python literal of a tuple."""
    expected: str
    """Python literal. It never enters a sandbox."""
    kwargs: str = "{}"

    @classmethod
    def of(cls, *args: Any, expected: Any, **kwargs: Any) -> FunctionCase:
        """Build a case from values: ``FunctionCase.of(3, 4, expected=7)``."""
        return cls(args=repr(args), expected=repr(expected), kwargs=repr(kwargs))

    @field_validator("args", "expected", "kwargs")
    @classmethod
    def _is_literal(cls, text: str) -> str:
        try:
            ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError(f"not a Python literal: {text[:80]!r} ({error})") from None
        return text

    @model_validator(mode="after")
    def _shapes(self) -> FunctionCase:
        if not isinstance(ast.literal_eval(self.args), tuple):
            raise ValueError(f"args must be a tuple, got {self.args[:80]!r}; a single argument is written '(3,)'")
        if not isinstance(ast.literal_eval(self.kwargs), dict):
            raise ValueError(f"kwargs must be a dict, got {self.kwargs[:80]!r}")
        return self


class StdioCase(_Frozen):
    """One run of the program: what it reads and what it must print."""

    stdin: str
    stdout: str
    """Expected text; trailing white space of each line and trailing empty lines don't count."""


class FunctionGrader(_Frozen):
    """Call a function of the solution on each case and compare on the host."""

    kind: Literal["function"] = "function"
    entry_point: str
    visible: tuple[FunctionCase, ...] = ()
    """Run after every turn; failures are shown to the agent."""
    hidden: tuple[FunctionCase, ...] = Field(min_length=1)
    rel_tol: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Relative tolerance for floats; 0 is exact equality."""


class StdioGrader(_Frozen):
    """Run the solution as a program on each case's stdin and compare its stdout on the host."""

    kind: Literal["stdio"] = "stdio"
    visible: tuple[StdioCase, ...] = ()
    hidden: tuple[StdioCase, ...] = Field(min_length=1)


class ScriptGrader(_Frozen):
    """Run a check program in a fresh cell, apart from the process that runs the agent's code.

    ``check`` defines ``check(candidate)`` and asserts; ``candidate`` and every other function of the solution that it
    names are proxies: the calls cross a pipe to a process of their own, so that the solution's code shares neither
    memory nor descriptors with the assertions.
    """

    kind: Literal["script"] = "script"
    entry_point: str
    check: str
    visible: tuple[FunctionCase, ...] = ()


GraderSpec = Annotated[FunctionGrader | StdioGrader | ScriptGrader, Field(discriminator="kind")]


class Task(_Frozen):
    """One task. ``files`` and ``reference`` map paths relative to ``/workspace`` to text."""

    id: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    family: Literal["code"] = "code"
    kind: str = Field(min_length=1, max_length=60)
    """What sort of task it is (``repair``, ``parse``, ...): for filtering, weighting and reports."""
    instruction: str = Field(min_length=1)
    files: Mapping[str, str] = Field(default_factory=dict)
    """What the agent finds in its cell; for repair tasks the broken solution is here."""
    solution_path: str = "solution.py"
    """The file that is graded."""
    prelude: str = ""
    """Source put before a solution that was submitted as a whole program (action_format="program")."""
    grader: GraderSpec
    reference: Mapping[str, str] = Field(min_length=1)
    """Files that solve it."""
    limits: Limits = Limits()
    image: str | None = None
    """The container image that its cells run in, whole (``docker.io/library/python:3.12-slim``): it needs Podman. None:
    this machine's own Python, on any backend."""
    tags: tuple[str, ...] = ()
    source: str = "palaestra"
    licence: str = "Apache-2.0"
    schema_version: Literal[1] = 1

    @field_validator("image")
    @classmethod
    def _is_whole_image_name(cls, image: str | None) -> str | None:
        if image is not None:
            full_image_name(image)
        return image

    @model_validator(mode="after")
    def _paths(self) -> Task:
        for path in (*self.files, *self.reference, self.solution_path):
            parts = path.split("/")
            if "\0" in path or any(part in ("", ".", "..") for part in parts):
                raise ValueError(f"path {path!r} must be relative to /workspace, without '..', '.' or empty parts")
        if self.solution_path not in self.reference:
            raise ValueError(f"reference has no {self.solution_path!r}, the file that is graded")
        return self
