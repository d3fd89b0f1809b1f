"""Repair one of the pitfalls that every engineer has met once: a mutable default, rows that are one row, and so on."""

from __future__ import annotations

from typing import Any

from palaestra.envs.suites.code.authoring import Bug, Cases, Family, FunctionDraft, fixed

KIND = "repair"


def tag_batches(batches: list[list[str]]) -> list[dict[str, int]]:
    def count(tags: list[str], counts: dict[str, int] | None = None) -> dict[str, int]:
        counts = {} if counts is None else counts
        for tag in tags:
            counts[tag] = counts.get(tag, 0) + 1
        return dict(counts)

    return [count(tags) for tags in batches]


def grid_with_marks(height: int, width: int, marks: list[tuple[int, int]]) -> list[list[int]]:
    grid = [[0] * width for _ in range(height)]
    for row, column in marks:
        grid[row][column] += 1
    return grid


def price_steps(base: int, factors: list[int]) -> list[int]:
    steps = []
    for factor in factors:

        def step(value: int, factor: int = factor) -> int:
            return value * factor

        steps.append(step)
    return [step(base) for step in steps]


def without_prefix(names: list[str], prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in names]


def is_leap(year: int) -> bool:
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def newest(versions: list[str]) -> str:
    return max(versions, key=lambda version: [int(part) for part in version.split(".")])


def total_by_region(sales: dict[str, dict[str, int]]) -> dict[str, int]:
    totals = {}
    for region, shops in sales.items():
        total = 0
        for amount in shops.values():
            total += amount
        totals[region] = total
    return totals


def drop_expired(stock: dict[str, int], today: int) -> dict[str, int]:
    for name in list(stock):
        if stock[name] < today:
            del stock[name]
    return stock


def deep_merge(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in override.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = deep_merge(merged[key], value)
        else:
            merged[key] = value
    return merged


FAMILIES: tuple[Family, ...] = (
    fixed(
        KIND,
        "mutable-default",
        FunctionDraft(
            tag_batches,
            "Count the tags of each batch by itself: a list with one dict (tag to count) for each batch.",
            Cases(
                [([["x"]],), ([],)],
                [([[]],), ([[], ["a"]],), ([["a"], []],), ([["p", "q", "p"]],), ([["a"], ["a"], ["a"]],)],
            ),
            bug=Bug(
                "counts: dict[str, int] | None = None) -> dict[str, int]:\n        counts = {} if counts is None else "
                "counts\n",
                "counts: dict[str, int] = {}) -> dict[str, int]:\n",
                (([["a", "b", "a"], ["a"]],), ([["x"], ["y"], ["x", "z"]],)),
            ),
        ),
    ),
    fixed(
        KIND,
        "aliased-rows",
        FunctionDraft(
            grid_with_marks,
            "A grid of counters, `height` rows of `width` columns: how often each (row, column) occurs in `marks`.",
            Cases(
                [(1, 2, [(0, 1), (0, 1)]), (2, 2, [])],
                [(0, 0, []), (1, 1, [(0, 0)]), (3, 1, [(2, 0)]), (2, 2, [(0, 0), (1, 1)]), (2, 3, [(1, 2)] * 4)],
            ),
            bug=Bug(
                "[[0] * width for _ in range(height)]", "[[0] * width] * height", ((2, 2, [(0, 1)]), (3, 2, [(1, 0)]))
            ),
        ),
    ),
    fixed(
        KIND,
        "late-binding",
        FunctionDraft(
            price_steps,
            "Multiply `base` by each of the factors: one result a factor, in order.",
            Cases([(5, [2]), (3, [])], [(0, [1, 2]), (7, [4, 4]), (-2, [1, 0, -1]), (1, [9, 8, 7]), (10, [0, 1])]),
            bug=Bug("value: int, factor: int = factor", "value: int", ((10, [1, 2, 3]), (4, [5, 6]))),
        ),
    ),
    fixed(
        KIND,
        "strip-is-no-prefix",
        FunctionDraft(
            without_prefix,
            "Remove the prefix from each name that begins with it, once; leave the other names as they are.",
            Cases(
                [(["x-a", "b"], "x-"), ([], "p")],
                [(["a"], ""), (["aaa"], "a"), (["pre"], "pre"), (["PREx", "xpre"], "pre"), (["v1", "v2"], "v")],
            ),
            bug=Bug("removeprefix", "lstrip", ((["app_apple", "app_map"], "app_"), (["test_set", "test_x"], "test_"))),
        ),
    ),
    fixed(
        KIND,
        "leap-year",
        FunctionDraft(
            is_leap,
            "Is a year a leap year of the Gregorian calendar: divisible by 4, but of the full centuries only those "
            "divisible by 400?",
            Cases([(2024,), (2023,)], [(1,), (4,), (100,), (400,), (2100,), (2400,), (1996,), (1800,)]),
            bug=Bug(" and (year % 100 != 0 or year % 400 == 0)", " and year % 100 != 0", ((2000,), (1600,))),
        ),
    ),
    fixed(
        KIND,
        "versions-as-text",
        FunctionDraft(
            newest,
            "The newest of some versions, at least one, each consisting of whole numbers separated by dots. Numbers "
            "are compared from left to right; a version that continues another one is newer.",
            Cases(
                [(["1.2", "1.3"],), (["2.0"],)],
                [
                    (["1.2", "1.2.0"],),
                    (["0.9.9", "0.10"],),
                    (["3.1", "2.99"],),
                    (["1.0.0", "1.0"],),
                    (["9", "10", "8"],),
                ],
            ),
            bug=Bug(
                ', key=lambda version: [int(part) for part in version.split(".")]',
                "",
                ((["1.9.0", "1.10.0"],), (["10.0", "9.1"],)),
            ),
        ),
    ),
    fixed(
        KIND,
        "stale-accumulator",
        FunctionDraft(
            total_by_region,
            "The total sales of each region: a dict from region to the sum over its shops, 0 for one without shops.",
            Cases(
                [({"n": {"a": 1, "b": 2}},), ({},)],
                [
                    ({"x": {}},),
                    ({"x": {}, "y": {"s": 3}},),
                    ({"x": {"s": 3}, "y": {}},),
                    ({"q": {"a": -1, "b": 1}},),
                    ({"a": {"1": 1}, "b": {"1": 2}, "c": {"1": 3}},),
                ],
            ),
            bug=Bug(
                "    totals = {}\n    for region, shops in sales.items():\n        total = 0\n",
                "    totals = {}\n    total = 0\n    for region, shops in sales.items():\n",
                (({"n": {"a": 1}, "s": {"b": 2}},), ({"e": {"x": 5, "y": 1}, "w": {"x": 5}},)),
            ),
        ),
    ),
    fixed(
        KIND,
        "deleting-while-iterating",
        FunctionDraft(
            drop_expired,
            "`stock` maps goods to the day on which they expire. Remove what expired before `today` and return the "
            "dict.",
            Cases(
                [({"milk": 9}, 3), ({}, 1)],
                [
                    ({"a": 1}, 1),
                    ({"a": 1, "b": 2, "c": 3}, 3),
                    ({"a": 0, "b": 0}, 5),
                    ({"x": -1, "y": 7}, 0),
                    ({"p": 4, "q": 4, "r": 5}, 4),
                ],
            ),
            bug=Bug(
                "for name in list(stock):", "for name in stock:", (({"a": 1, "b": 9}, 5), ({"a": 9, "b": 1, "c": 9}, 5))
            ),
        ),
    ),
    fixed(
        KIND,
        "shallow-merge",
        FunctionDraft(
            deep_merge,
            "Merge two nested configurations into a new dict. Where both have a dict under a key, these are merged in "
            "the same way; elsewhere the value of `override` counts. Neither argument is changed.",
            Cases(
                [({"a": 1}, {"b": 2}), ({"a": 1}, {"a": 2})],
                [
                    ({}, {}),
                    ({"a": {"x": 1}}, {"a": 5}),
                    ({"a": 5}, {"a": {"x": 1}}),
                    ({"a": {"x": 1}}, {"a": {}}),
                    ({"a": [1]}, {"a": [2]}),
                    ({"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"c": 3}}}),
                    ({"k": None}, {"k": {"z": None}}),
                ],
            ),
            bug=Bug(
                "merged[key] = deep_merge(merged[key], value)",
                "merged[key] = value",
                (({"a": {"x": 1, "y": 2}}, {"a": {"x": 3}}), ({"p": {"q": {"r": 1}}}, {"p": {"q": {"s": 2}}})),
            ),
        ),
    ),
)
