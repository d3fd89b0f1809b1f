"""Questions with many right answers, judged by a program that checks what an answer must fulfil.

Each check gets its hidden inputs as rules and knows nothing of the solution; what the candidate returns is a plain
value. Asserting the type first keeps a wrong answer from passing as an error of the check.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from palaestra.envs.suites.code.authoring import CheckDraft, Family, fixed, generator

KIND = "check"


def any_order(needs: dict[str, list[str]]) -> list[str] | None:
    """Any topological order, or None."""
    order: list[str] = []
    waiting = dict(needs)
    while waiting:
        ready = [name for name, before in waiting.items() if all(other in order for other in before)]
        if not ready:
            return None
        order += ready
        waiting = {name: before for name, before in waiting.items() if name not in ready}
    return order


def check_any_order(candidate: Callable[..., Any], *, inputs: list[tuple[dict[str, list[str]], bool]]) -> None:
    for needs, solvable in inputs:
        order = candidate(needs)
        if not solvable:
            assert order is None
            continue
        assert type(order) is list
        assert sorted(order) == sorted(needs)
        for name, before in needs.items():
            for other in before:
                assert order.index(other) < order.index(name)


def _any_order(rng: random.Random) -> CheckDraft:
    things, verb = rng.choice([("steps", "done"), ("modules", "loaded"), ("courses", "passed")])
    names = [f"{prefix}{number}" for prefix in rng.sample("abcdemx", 4) for number in (1, 2)]

    def graph(size: int, cyclic: bool) -> dict[str, list[str]]:
        ranked = rng.sample(names, size)
        needs = {name: sorted(rng.sample(ranked[:i], rng.randint(0, min(3, i)))) for i, name in enumerate(ranked)}
        if cyclic:
            needs[ranked[0]] = [ranked[-1]]
            needs[ranked[-1]] = sorted({*needs[ranked[-1]], ranked[0]})
        return {name: needs[name] for name in rng.sample(ranked, size)}

    inputs = [({}, True), ({names[0]: [names[0]]}, False)]
    inputs += [(graph(rng.randint(3, 8), cyclic), not cyclic) for cyclic in [False] * 6 + [True] * 3]
    a, b, c = names[:3]
    return CheckDraft(
        any_order,
        f"""
        `needs` maps each of some {things} to the {things} that must be {verb} before it; all of them are keys. Return
        an order (a list of all keys) in which each comes after everything it needs, any such order. Return None when
        there is none.
        """,
        check_any_order,
        show=[({c: [b], a: [], b: [a]},), ({a: [b], b: [a]},)],
        name=rng.choice(["any_order", "find_order", "sequence_of"]),
        check_rules={"inputs": inputs},
    )


def pick_sum(numbers: list[int], target: int) -> list[int] | None:
    """Positions of numbers that add up to the target."""
    ways: dict[int, list[int]] = {0: []}
    for position, number in enumerate(numbers):
        for total, way in list(ways.items()):
            ways.setdefault(total + number, [*way, position])
    return ways.get(target)


def check_pick_sum(candidate: Callable[..., Any], *, inputs: list[tuple[list[int], int, bool]]) -> None:
    for numbers, target, possible in inputs:
        picked = candidate(list(numbers), target)
        if not possible:
            assert picked is None
            continue
        assert type(picked) is list
        assert all(type(position) is int and 0 <= position < len(numbers) for position in picked)
        assert len(set(picked)) == len(picked)
        assert sum(numbers[position] for position in picked) == target


def _pick_sum(rng: random.Random) -> CheckDraft:
    inputs: list[tuple[list[int], int, bool]] = [([], 0, True), ([], 1, False), ([5], 5, True), ([-3, 3], 0, True)]
    for _ in range(8):
        numbers = [rng.randint(-20, 60) for _ in range(rng.randint(4, 10))]
        target = sum(rng.sample(numbers, rng.randint(2, len(numbers))))
        if rng.random() < 0.35:
            numbers, target = [2 * number for number in numbers], 2 * target + 1  # An odd sum of even numbers.
        inputs.append((numbers, target, target % 2 == 0 or any(number % 2 for number in numbers)))
    small, large = rng.randint(2, 9), rng.randint(20, 40)
    return CheckDraft(
        pick_sum,
        """
        Return the positions (from 0, each at most once, in any order) of numbers that add up to the target; any such
        choice counts. The empty choice adds up to 0. Return None when there is none.
        """,
        check_pick_sum,
        show=[([large, small], small), ([small, small], 1)],
        name=rng.choice(["pick_sum", "subset_with_sum", "choose_invoices"]),
        check_rules={"inputs": inputs},
    )


def assign(conflicts: list[tuple[str, str]], slots: int) -> dict[str, int] | None:
    """A slot for each name such that conflicting names have different ones."""
    names = sorted({name for pair in conflicts for name in pair})
    chosen: dict[str, int] = {}

    def place(index: int) -> bool:
        if index == len(names):
            return True
        name = names[index]
        taken = {chosen.get(b if a == name else a) for a, b in conflicts if name in (a, b)}
        for slot in range(slots):
            if slot not in taken:
                chosen[name] = slot
                if place(index + 1):
                    return True
                del chosen[name]
        return False

    return chosen if place(0) else None


def check_assign(candidate: Callable[..., Any], *, inputs: list[tuple[list[tuple[str, str]], int, bool]]) -> None:
    for conflicts, slots, possible in inputs:
        chosen = candidate(list(conflicts), slots)
        if not possible:
            assert chosen is None
            continue
        assert type(chosen) is dict
        assert set(chosen) == {name for pair in conflicts for name in pair}
        assert all(type(slot) is int and 0 <= slot < slots for slot in chosen.values())
        assert all(chosen[a] != chosen[b] for a, b in conflicts)


def _assign(rng: random.Random) -> CheckDraft:
    things, places = rng.choice([("exams", "days"), ("guests", "tables"), ("jobs", "machines")])
    names = rng.sample(["ada", "bob", "cem", "dot", "eli", "fay", "gus"], 7)
    inputs: list[tuple[list[tuple[str, str]], int, bool]] = [([], 1, True)]
    for _ in range(9):
        slots, count = rng.randint(1, 3), rng.randint(3, 7)
        pairs = [(a, b) for i, a in enumerate(names[:count]) for b in names[:i] if rng.random() < 0.45]
        inputs.append((pairs, slots, assign(pairs, slots) is not None))
    ring = [(names[i], names[(i + 1) % 5]) for i in range(5)]
    inputs += [(ring, 2, False), (ring, 3, True)]
    return CheckDraft(
        assign,
        f"""
        `conflicts` are pairs of {things} that must not share one of the {places}. Return a dict that gives each name
        that occurs one of the {places} 0 .. slots-1 such that no pair has the same; any such dict counts. Return None
        when there is none.
        """,
        check_assign,
        show=[([(names[0], names[1])], 1), ([], 2)],
        name=rng.choice(["assign", "timetable", "seat"]),
        check_rules={"inputs": inputs},
    )


def pack(text: str, *, mark: str, stop: str) -> str:
    """Runs of five or more of a character become ``~<count>;<character>``; the mark is always written as a run."""
    packed, position = "", 0
    while position < len(text):
        end = position
        while end < len(text) and text[end] == text[position]:
            end += 1
        length = end - position
        packed += f"{mark}{length}{stop}{text[end - 1]}" if length > 4 or text[position] == mark else text[position:end]
        position = end
    return packed


def check_pack(candidate: Callable[..., Any], *, texts: list[str], mark: str, stop: str, enough: int) -> None:
    def unpack(packed: str) -> str:
        text, position = "", 0
        while position < len(packed):
            if packed[position] == mark:
                end = packed.index(stop, position)
                assert packed[position + 1 : end].isdigit()
                text += packed[end + 1] * int(packed[position + 1 : end])
                position = end + 2
            else:
                text += packed[position]
                position += 1
        return text

    for text in texts:
        packed = candidate(text)
        assert type(packed) is str
        assert len(packed) <= 4 * len(text)
        assert unpack(packed) == text
        if len(set(text)) == 1 and len(text) >= enough:
            assert len(packed) <= len(text) // 2


def _pack(rng: random.Random) -> CheckDraft:
    mark, stop, enough = rng.choice("~^#%$"), rng.choice(";.:/_"), rng.randint(12, 30)
    letter = rng.choice("abcdefgh")
    letters = letter + mark + stop + "0123456789"
    texts = ["", mark, stop, f"{mark}3{stop}{letter}", "12" * 3, letter * enough, mark * enough, "7" * (2 * enough)]
    texts += ["".join(rng.choice(letters) * rng.choice([1, 1, 2, 6, 11]) for _ in range(6)) for _ in range(7)]
    return CheckDraft(
        pack,
        f"""
        Shorten a text. In the packed text `{mark}count{stop}character` (count in digits) stands for so many of a
        character; every other character stands for itself, and `{mark}` itself can only be written in the long form.
        Any packed text that stands for the given one will do, as long as a text of {enough} or more equal characters is
        packed to at most half its length, and no text to more than four times its length.
        """,
        check_pack,
        show=[("",)],
        rules={"mark": mark, "stop": stop},
        check_rules={"texts": sorted(set(texts)), "mark": mark, "stop": stop, "enough": enough},
    )


def queens(size: int) -> list[int] | None:
    """For each row the column of its queen."""
    columns: list[int] = []

    def place() -> bool:
        row = len(columns)
        if row == size:
            return True
        for column in range(size):
            if all(column != c and abs(column - c) != row - r for r, c in enumerate(columns)):
                columns.append(column)
                if place():
                    return True
                columns.pop()
        return False

    return columns if place() else None


def check_queens(candidate: Callable[..., Any]) -> None:
    for size in (1, 2, 3, 4, 5, 6, 8, 9):
        columns = candidate(size)
        if size in (2, 3):
            assert columns is None
            continue
        assert type(columns) is list
        assert all(type(column) is int for column in columns)
        assert sorted(columns) == list(range(size))
        assert len({row + column for row, column in enumerate(columns)}) == size
        assert len({row - column for row, column in enumerate(columns)}) == size


FAMILIES: tuple[Family, ...] = (
    generator(KIND, "any-order", _any_order),
    generator(KIND, "pick-sum", _pick_sum),
    generator(KIND, "assign", _assign),
    generator(KIND, "pack", _pack),
    fixed(
        KIND,
        "queens",
        CheckDraft(
            queens,
            "Place `size` >= 1 queens on a board of size x size such that none attacks another: no two share a row, a "
            "column or a diagonal. Return for each row the column (from 0) of its queen, any such placement; None when "
            "there is none.",
            check_queens,
            show=[(1,), (2,)],
        ),
    ),
)
