"""What a run asserts of itself at its end, beyond having come there: a part that silently did nothing is found here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from palaestra.envs.errors import PalaestraError


def require_learning(weights_before: str, weights_after: str, rewards: Sequence[float]) -> None:
    """Raise ``PalaestraError`` unless the weights (their fingerprints) changed and the reward moved."""
    if weights_before == weights_after:
        raise PalaestraError("reinforcement changed no weight")
    if not rewards or not max(rewards) > min(rewards):
        raise PalaestraError(f"the reward never moved: {list(rewards)}")


def require_no_children() -> None:
    """Raise ``PalaestraError`` when a process that this one started still runs."""
    if left := child_processes():
        raise PalaestraError(f"{len(left)} processes are left after closing: {left}")


def child_processes() -> list[str]:
    """Command lines of this process's children, from /proc; the name in brackets of one that has none.

    A process has no command line while it changes from one program to the next, and once it has ended.
    """
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            text = status.read_text()
            if f"\nPPid:\t{os.getpid()}\n" in text:
                name = text.partition("\n")[0].removeprefix("Name:").strip()
                found.append((status.parent / "cmdline").read_text().replace("\0", " ").strip() or f"[{name}]")
    return found
