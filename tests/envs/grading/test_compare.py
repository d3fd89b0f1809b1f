"""Equal means the same value and the same types, all the way down."""

from __future__ import annotations

import math
from typing import Any

import pytest

from palaestra.envs.grading.compare import equal, show


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (1, True),
        (True, 1),
        (1, 1.0),
        (1.0, 1),
        ([1], (1,)),
        ({1}, frozenset({1})),
        ("a", b"a"),
        (None, False),
        ([1, [True]], [1, [1]]),
        ({1: "a"}, {True: "a"}),
        ({"a": 1}, {"a": True}),
        ({1}, {True}),
        ([1, 2], [1]),
        (math.nan, 0.0),
    ],
)
def test_different_types_or_values_differ(got: Any, expected: Any) -> None:
    assert not equal(got, expected)


@pytest.mark.parametrize(
    "value",
    [None, True, 10**40, 1.5, math.nan, math.inf, "é", b"\0", [1, (2, {3})], {"a": [math.nan]}, {frozenset({1})}, {}],
)
def test_the_same_is_equal(value: Any) -> None:
    assert equal(value, value)


def test_order_counts_in_lists_and_not_in_dicts_and_sets() -> None:
    assert not equal([1, 2], [2, 1])
    assert equal({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert equal({1, 2}, {2, 1})


def test_a_tolerance_is_for_floats_and_only_where_a_float_is_expected() -> None:
    assert equal(1.0 + 1e-9, 1.0, rel_tol=1e-6)
    assert equal([{"x": 3}], [{"x": 3.0}], rel_tol=1e-6)
    assert equal(math.inf, math.inf, rel_tol=1e-6)
    assert not equal(1.1, 1.0, rel_tol=1e-6)
    assert not equal(True, 1.0, rel_tol=1e-6)
    assert not equal(3.0, 3, rel_tol=1e-6)
    assert not equal(10**400, 1.0, rel_tol=1e-6)
    assert not equal("1.0", 1.0, rel_tol=1e-6)
    assert not equal({"x": 1.0}, {"y": 1.0}, rel_tol=1e-6)


def test_values_are_shown_in_a_fixed_order_and_within_bounds() -> None:
    assert show({"b", "a", "c"}) == "{'a', 'b', 'c'}"
    assert show(((1,), frozenset({2}), {"k": [set()]})) == "((1,), frozenset({2}), {'k': [set()]})"
    assert show(10**5000).startswith("<int of")
    assert len(show("x" * 10_000)) < 1100
