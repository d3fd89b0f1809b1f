"""Episodes are shown as they went, and the pair that is shown is the one that tells most."""

from __future__ import annotations

import json

from palaestra.recipes.transcripts import as_record, as_text, telling_pair
from palaestra.rollout.episode import EpisodeResult, EpisodeSpec, TurnRecord
from palaestra.rollout.trajectory import Trajectory


def episode(name: str, passed: bool, *turns: TurnRecord) -> EpisodeResult:
    spec = EpisodeSpec(name, name, "k", 0)
    return EpisodeResult(spec, "graded", Trajectory(), float(passed), passed, f"do {name}", turns)


FAILED = TurnRecord("x", "NameError: x", "stop", 1)
PASSED = TurnRecord("y", "", "stop", 1)
CUT = TurnRecord("zzz", "", "length", 9, executed=False)


def test_text_shows_each_action_with_its_answer() -> None:
    text = as_text(episode("a", True, FAILED, PASSED))
    assert text.splitlines() == [
        "do a",
        "  turn 1  x",
        "          NameError: x",
        "  turn 2  y",
        "          passed",
        "  reward 1.0",
    ]


def test_an_action_that_was_cut_off_is_said_not_to_have_run() -> None:
    assert "(cut off: not executed)" in as_text(episode("a", False, CUT))


def test_a_record_is_json_and_holds_every_turn() -> None:
    record = json.loads(json.dumps(as_record(episode("a", True, FAILED, PASSED))))
    assert [turn["action"] for turn in record["turns"]] == ["x", "y"]
    assert record["passed"] is True


def test_a_task_that_now_takes_a_repair_is_preferred_then_one_that_was_learned_then_any() -> None:
    failed, at_once, repaired = (
        episode("f", False, FAILED),
        episode("o", True, PASSED),
        episode("r", True, FAILED, PASSED),
    )
    assert telling_pair([failed, failed], [at_once, repaired])[1] is repaired
    assert telling_pair([at_once, failed], [repaired, at_once])[1] is at_once
    assert telling_pair([at_once], [failed]) == (at_once, failed)
