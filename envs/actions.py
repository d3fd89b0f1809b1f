"""Model text to actions.

In the ``blocks`` format an action is a message in Markdown. What counts in it is, in order:

* a fenced block whose info string has ``path=...`` writes that file: ```` ```python path=solution.py ````;
* a fenced block in ``python`` without a path runs as a program;
* a fenced block in ``bash`` or ``sh`` runs as a shell command, in the shell session of the episode;
* ``<submit/>`` on a line of its own hands the solution in.

Everything else (prose, blocks in other languages without a path) is the model talking to itself. A message without
any action, an unclosed fence or an unusable path is a ``ParseError``: an observation, not a crash, and nothing of the
message is executed.

In the ``program`` format the whole text is one program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from palaestra.envs.spaces import is_encodable

MAX_ACTIONS = 32
"""In one message."""


@dataclass(frozen=True, slots=True)
class WriteFile:
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class RunPython:
    code: str


@dataclass(frozen=True, slots=True)
class RunShell:
    command: str


@dataclass(frozen=True, slots=True)
class Submit:
    pass


Action = WriteFile | RunPython | RunShell | Submit

BLOCKS_HELP = """\
Answer with fenced blocks; they are carried out in order:
- ```python path=solution.py writes the block to that file (any path, any language);
- ```python without a path runs the block as a program;
- ```bash runs the block as a shell command; the next one goes on in the same folder, with the same variables.
When you are done, write <submit/> on a line of its own."""

PROGRAM_HELP = "Answer with one Python program and nothing else: the whole answer is run as it stands."


class ParseError(Exception):
    """The text is not an action; the message says what was seen and what was expected."""


_OPENING = re.compile(r"^ {0,3}(?P<fence>`{3,})(?P<info>[^`]*)$")
_PATH = re.compile(r"(?:^|\s)path=(?P<quote>[\"']?)(?P<path>[^\"'\s]+)(?P=quote)(?=\s|$)")
_PYTHON, _SHELL = {"python", "python3", "py"}, {"bash", "sh", "shell"}


def parse_blocks(text: str) -> tuple[Action, ...]:
    """The actions of a message in the ``blocks`` format, at least one, ``Submit`` only as the last.

    Raises ``ParseError``.
    """
    check_text(text)
    actions: list[Action] = []
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        line = lines[at].rstrip("\r")
        at += 1
        if line.strip() == "<submit/>":
            actions.append(Submit())
            break
        opening = _OPENING.match(line)
        if opening is None:
            continue
        start = at
        while at < len(lines) and not _closes(lines[at], opening["fence"]):
            at += 1
        if at == len(lines):
            raise ParseError(f"The block opened on line {start} is never closed, so nothing was run.\n{BLOCKS_HELP}")
        action = _block(opening["info"].strip(), "".join(f"{body}\n" for body in lines[start:at]))
        if action is not None:
            actions.append(action)
        at += 1
    if not actions:
        raise ParseError(f"No action was found in the answer.\n{BLOCKS_HELP}")
    if len(actions) > MAX_ACTIONS:
        raise ParseError(f"The answer holds {len(actions)} actions; at most {MAX_ACTIONS} are carried out at a time.")
    return tuple(actions)


def render_blocks(files: Mapping[str, str], *, submit: bool = True) -> str:
    """The message that writes these files, and hands them in: the inverse of ``parse_blocks``."""
    parts = []
    for path, text in files.items():
        longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
        fence = "`" * max(3, longest + 1)
        parts.append(f"{fence}python path={path}\n{text}{'' if text.endswith(chr(10)) else chr(10)}{fence}")
    return "\n".join([*parts, "<submit/>"] if submit else parts)


def check_text(text: str) -> None:
    """Raise ``ParseError`` for text that no file or command line can hold."""
    if not isinstance(text, str):
        raise TypeError(f"an action is a str, got {type(text).__name__}")
    if not text.isascii() and not is_encodable(text):
        raise ParseError("The answer holds half of a surrogate pair, which is not text.")


def _closes(line: str, fence: str) -> bool:
    stripped = line.strip()
    return len(stripped) >= len(fence) and not stripped.strip("`")


def _block(info: str, body: str) -> Action | None:
    path = _PATH.search(info)
    if path is not None:
        return WriteFile(_checked_path(path["path"]), body)
    if re.search(r"(?:^|\s)path=", info):
        raise ParseError(f"The info string {info[:100]!r} has no usable path; write path=solution.py, without spaces.")
    language = info.split(maxsplit=1)[0].lower() if info else ""
    if language not in _PYTHON | _SHELL:
        return None
    if "\0" in body:
        raise ParseError("A block to run holds a NUL character, which no program text can.")
    return RunPython(body) if language in _PYTHON else RunShell(body)


def _checked_path(path: str) -> str:
    path = path.removeprefix("/workspace/").removeprefix("./")
    parts = path.split("/")
    if path.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise ParseError(f"The path {path[:100]!r} is not one inside /workspace; write it relative to /workspace.")
    if len(path) > 255:
        raise ParseError(f"The path {path[:50]!r}... is longer than 255 characters.")
    return path
