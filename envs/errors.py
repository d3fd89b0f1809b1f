"""The whole failure model on one page.

A failure is data. It is typed, counted, and attributed to whoever caused it:

=====================  =============================================  ==========  ==============  ===========
cause                  what happened                                  retried?    reward          trained on?
=====================  =============================================  ==========  ==============  ===========
``agent``              deadline, memory, pids, disk or output limit   no          as it stands    yes
                       in its own cell; a cell it broke while the
                       host is healthy; an unparseable action
``infrastructure``     container, service, host or engine died;       yes, within NaN / None      no (masked)
                       the grader itself is at fault                  a budget
``tampered``           a canary passed, an expected test is missing   no          range minimum   yes
=====================  =============================================  ==========  ==============  ===========

What the agent did to its own cell is an observation and never an exception; it appears in ``ExecResult``. Only
the second row raises, as a subclass of :class:`InfrastructureError`. Errors of the caller (a wrong option, a
malformed task file) are :class:`UsageError`: they end the program, not an episode.
"""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Who is answerable for a failure; decides retry, reward and training (see the table above)."""

    AGENT = "agent"
    INFRASTRUCTURE = "infrastructure"
    TAMPERED = "tampered"


class PalaestraError(Exception):
    """Base of every error that Palaestra raises on purpose; its text says what was seen and what to do next."""


class UsageError(PalaestraError, ValueError):
    """The caller asked for something that cannot be: an unknown option, a malformed file, a value out of range."""


class TaskFormatError(UsageError):
    """A task file is malformed; the message names the file, the line (or task id) and the field."""

    def __init__(self, problem: str, *, file: str, line: int | None = None, field: str | None = None) -> None:
        where = file if line is None else f"{file}:{line}"
        super().__init__(f"{where}: {problem}" if field is None else f"{where}: field {field!r}: {problem}")
        self.file, self.line, self.field = file, line, field


class InfrastructureError(PalaestraError):
    """Something that is not the agent's doing failed; the attempt is retried or masked out, never scored 0."""


class SandboxUnavailable(InfrastructureError):
    """No confined backend works on this machine (or the one asked for doesn't); the message carries the cure."""


class ImageUnavailable(SandboxUnavailable):
    """The container image that was asked for is not here and cannot be had; the message carries the cure."""


class SandboxBusy(SandboxUnavailable):
    """A backend that works otherwise refused or did not answer this time; another attempt may succeed."""


class SandboxDied(InfrastructureError):
    """The host of a cell, or its supervisor, ended or broke the protocol while a request was outstanding."""


class CellFull(PalaestraError):
    """A file does not fit in its cell, or the agent made its path unusable. The agent's doing: an observation."""


class GraderFault(InfrastructureError):
    """The grader could not reach a verdict for a reason that a no-op submission reproduces."""


class EngineError(InfrastructureError):
    """The inference engine failed or refused a request that was well formed."""
