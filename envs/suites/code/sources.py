"""Source text of real functions: how a function of ours becomes the file that a task calls its reference."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

Uses = tuple[ModuleType | Callable[..., Any], ...]
"""What a function needs beside itself: modules it imports, and helper functions."""


def baked(
    function: Callable[..., Any],
    *,
    name: str,
    rules: Mapping[str, Any] | None = None,
    uses: Uses = (),
    signature: str | None = None,
) -> str:
    """The source of a module with ``function`` in it under ``name``, its keyword-only rules turned into constants.

    A rule's name, and the function's own, are replaced wherever they stand as a word, in texts too: choose well.
    The helpers among ``uses`` know the same rules. ``signature`` replaces the function's own, for instance to leave out
    its annotations.
    """
    rules = rules or {}
    helpers = [used for used in uses if not isinstance(used, ModuleType)]
    definitions = [_definition(helper, helper.__name__, signature_text(helper), rules) for helper in helpers]
    definitions.append(_definition(function, name, signature or signature_text(function), rules))
    modules = [f"import {used.__name__}" for used in uses if isinstance(used, ModuleType)]
    constants = [f"{rule.upper()} = {value!r}" for rule, value in rules.items()]
    head = ["from __future__ import annotations", "\n".join(modules), "\n".join(constants)]
    return "\n\n".join(part for part in head if part) + "".join(f"\n\n\n{text}" for text in definitions) + "\n"


@cache
def signature_text(function: Callable[..., Any]) -> str:
    """``(text: str, width: int = 72) -> list[str]``: the parameters that are not rules."""
    signature = inspect.signature(function)
    parameters = [
        f"{parameter.name}: {parameter.annotation}"
        + ("" if parameter.default is parameter.empty else f" = {parameter.default!r}")
        for parameter in signature.parameters.values()
        if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    # Whoever copies the signature has not imported Any; object needs no import and says the same here.
    return re.sub(r"\bAny\b", "object", f"({', '.join(parameters)}) -> {signature.return_annotation}")


def _definition(function: Callable[..., Any], name: str, signature: str, rules: Mapping[str, Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    if unset := [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in rules]:
        raise ValueError(f"{function.__name__} has the rules {unset}, which the draft doesn't set")
    body = _rename(with_constants(_body(function), rules), function.__name__, name)
    return f"def {name}{signature}:\n{body.rstrip()}"


@cache
def _source(function: Callable[..., Any]) -> str:
    if not isinstance(function, FunctionType):
        raise TypeError(f"need a function written in Python, got {function!r}")
    return textwrap.dedent(inspect.getsource(function))


@cache
def _body(function: Callable[..., Any]) -> str:
    """The lines after the signature and the docstring."""
    source = _source(function)
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    first = definition.body[1 if ast.get_docstring(definition) is not None else 0]
    return "".join(source.splitlines(keepends=True)[first.lineno - 1 :])


def with_constants(source: str, rules: Mapping[str, Any]) -> str:
    """The text with the names of the rules turned into those of the constants."""
    for rule in rules:
        source = _rename(source, rule, rule.upper())
    return source


def _rename(source: str, old: str, new: str) -> str:
    """Replace a name, but neither an attribute (``.old``) nor a keyword of a call (``old=``)."""
    return re.sub(rf"(?<![.\w]){old}\b(?!=[^=])", new, source)
