"""The table and the figure of the README, from the folders of demo runs.

for seed in 0 1 2; do make demo SEED=$seed; done; make demo PROFILE=blind
python benchmarks/demo_curve.py runs/learn-to-repair-* --output docs/images/learn-to-repair.png
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


@dataclass(frozen=True, slots=True)
class Run:
    settings: dict[str, Any]
    summary: dict[str, Any]
    evaluations: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Run:
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        settings, summary = (json.loads((folder / name).read_text()) for name in ("settings.json", "summary.json"))
        return cls(settings, summary, [record for record in records if record["phase"] == "evaluation"])

    @property
    def name(self) -> str:
        return ("observations blanked, " if self.settings["blind"] else "") + f"seed {self.summary['seed']}"

    def curve(self, temperature: float) -> list[tuple[int, float]]:
        return [(e["update"], e["pass_rate"]) for e in self.evaluations if e["temperature"] == temperature]

    def row(self) -> str:
        greedy_before = self.curve(0.0)[0][1]
        s = self.summary
        cells = (s["pass_before"], s["pass_after"], greedy_before, s["greedy_after"], s["turn1_after"])
        return f"| {self.name} | " + " | ".join(f"{cell:.3f}" for cell in cells) + f" | {s['seconds']:.0f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    runs = sorted(map(Run.read, arguments.runs), key=lambda run: (run.settings["blind"], run.summary["seed"]))
    print("| run | one sample, before | after | greedy, before | after | passed on turn 1 | time |")
    print("|---|---|---|---|---|---|---|")
    figure, axes = pyplot.subplots(figsize=(7.2, 4.0), dpi=130)
    for index, run in enumerate(runs):
        print(run.row())
        colour = "0.45" if run.settings["blind"] else f"C{index}"
        for temperature, style in ((1.0, "o-"), (0.0, "s--")):
            points = run.curve(temperature)
            label = run.name if temperature == 1.0 else None
            axes.plot(*zip(*points, strict=True), style, color=colour, label=label, markersize=4)
    axes.set(xlabel="policy updates", ylabel="pass rate on held-out tasks", ylim=(0, 1.02))
    axes.set_title("Learning to repair code; solid: one sample at T = 1, dashed: greedy", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, bbox_inches="tight")


if __name__ == "__main__":
    main()
