"""A run's folder never overwrites another one and never holds half a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palaestra.envs.errors import UsageError
from palaestra.recipes.run_folder import CurvePoint, RunFolder


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(UsageError, match="not empty"):
        RunFolder(tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file/run"):
        RunFolder(tmp_path / "file" / "run")


def test_fresh_counts_up_beside_earlier_runs(tmp_path: Path) -> None:
    names = [RunFolder.fresh(tmp_path, "run").path.name for _ in range(3)]
    assert names == ["run", "run-2", "run-3"]


def test_json_is_written_whole_and_lines_are_appended(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_json("summary.json", {"a": 1})
    with pytest.raises(TypeError):
        folder.write_json("summary.json", {"a": object()})
    assert json.loads((folder.path / "summary.json").read_text()) == {"a": 1}
    for step in range(3):
        folder.append("metrics.jsonl", {"step": step})
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


def test_the_curve_is_a_png_and_leaves_no_partial_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    path = folder.plot_curve([CurvePoint(0, 0.3, 0.4), CurvePoint(10, 0.8, 0.9)], [0.2, 0.5], title="t")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in folder.path.iterdir()] == ["curve.png"]
