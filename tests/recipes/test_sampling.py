"""The sampler draws hard kinds more often, and the same draws for the same seed."""

from __future__ import annotations

from collections import Counter

import pytest

from palaestra.envs.errors import UsageError
from palaestra.envs.suites.code.repair_lines import repair_lines
from palaestra.recipes.sampling import KindSampler

TASKS = repair_lines("train", kinds=("op", "name"), seeds=range(20))


def kinds_drawn(sampler: KindSampler, count: int) -> Counter[str]:
    return Counter(TASKS.entry(sampler.draw()).kind for _ in range(count))


def test_without_hardness_kinds_are_drawn_equally_often_whatever_their_pass_rates() -> None:
    sampler = KindSampler(TASKS, seed=0)
    for _ in range(100):
        sampler.observe("op", 1.0)
    assert abs(kinds_drawn(sampler, 2000)["op"] - 1000) < 120


def test_a_solved_kind_is_drawn_less_often_by_the_stated_weight() -> None:
    sampler = KindSampler(TASKS, seed=0, hardness=0.5)
    for _ in range(200):
        sampler.observe("op", 1.0)
        sampler.observe("name", 0.0)
    assert abs(kinds_drawn(sampler, 3000)["op"] - 1000) < 130  # weights 0.5 : 1


def test_the_moving_pass_rate_keeps_nine_tenths_of_its_past() -> None:
    sampler = KindSampler(TASKS, seed=0, memory=0.9)
    sampler.observe("op", 1.0)
    assert sampler.pass_rates == pytest.approx({"op": 0.55, "name": 0.5})


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    first, again, other = (KindSampler(TASKS, seed=seed) for seed in (1, 1, 2))
    drawn = [first.draw() for _ in range(50)]
    assert drawn == [again.draw() for _ in range(50)]
    assert drawn != [other.draw() for _ in range(50)]


@pytest.mark.parametrize("options", [{"hardness": 1.0}, {"hardness": -0.1}, {"memory": 1.0}])
def test_weights_that_cannot_be_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        KindSampler(TASKS, seed=0, **options)
