"""The display tells the phase, the figures and the time left; without a terminal it prints plain lines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from palaestra.recipes.progress import RunProgress


def run_phases(console: Console) -> None:
    with RunProgress({"first": 1, "second": 3}, console=console) as progress:
        progress.phase("first", 2)
        progress.advance(2, loss=0.12345)
        progress.phase("second", 4)
        progress.advance(3)
        progress.log("a line that stays")
        progress.advance(1, note="done")


def test_plain_lines_hold_phase_count_and_figures() -> None:
    out = io.StringIO()
    run_phases(Console(file=out, width=200))
    text = out.getvalue()
    assert "first 2/2  loss=0.123" in text
    assert "second 4/4  note=done" in text  # what the first phase said is over
    assert "a line that stays" in text
    assert "\x1b" not in text


def test_a_terminal_gets_a_live_panel() -> None:
    out = io.StringIO()
    run_phases(Console(file=out, width=200, force_terminal=True))
    assert "elapsed / left" in out.getvalue()
    assert "a line that stays" in out.getvalue()


def test_no_time_left_once_every_phase_is_finished() -> None:
    out = io.StringIO()
    run_phases(Console(file=out, width=200))
    assert "0:00 left] second 4/4" in out.getvalue()


def test_a_phase_that_was_not_announced_is_refused() -> None:
    with (
        RunProgress({"first": 1}, console=Console(file=io.StringIO())) as progress,
        pytest.raises(ValueError, match="third"),
    ):
        progress.phase("third", 1)
