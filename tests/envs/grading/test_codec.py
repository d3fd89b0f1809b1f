"""What crosses the border of a cell arrives with exactly the value and type it had, or not at all."""

from __future__ import annotations

import ast
import itertools
import json
import math
from collections import OrderedDict, namedtuple
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.envs.grading import drivers
from palaestra.envs.grading.codec import MAX_DEPTH, MalformedValue, UnsupportedValue, ValueTooLarge, decode, encode
from palaestra.envs.grading.compare import equal

texts = st.text(st.characters())  # lone surrogates included
hashables: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary() | st.complex_numbers(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4),
    max_leaves=8,
)
values: st.SearchStrategy[Any] = st.recursive(
    hashables,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.sets(hashables, max_size=4)
        | st.dictionaries(hashables, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(values)
def test_a_value_comes_back_with_its_types(value: Any) -> None:
    assert equal(decode(encode(value)), value)


@given(values)
def test_the_text_is_one_line_of_ascii(value: Any) -> None:
    text = encode(value)

    assert text.isascii()
    assert "\n" not in text
    json.loads(text)


@pytest.mark.parametrize("value", [0.1, -0.0, math.inf, -math.inf, 5e-324, 1.7976931348623157e308])
def test_floats_are_exact_signs_included(value: float) -> None:
    assert decode(encode(value)).hex() == value.hex()


def test_integers_of_any_size_are_exact() -> None:
    for value in (2**1024 - 1, 2**1024, -(2**1024), 10**5000):
        assert decode(encode(value)) == value


class Colour(IntEnum):
    RED = 1


class Liar(int):
    @property
    def __class__(self) -> type:  # type: ignore[override]
        return int


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED,
        Liar(3),
        namedtuple("Point", "x")(1),
        OrderedDict(a=1),
        object(),
        len,
        bytearray(b"x"),
        iter(()),
        range(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_subclass_or_another_type_is_not_a_value(value: Any) -> None:
    with pytest.raises(UnsupportedValue, match="unsupported type"):
        encode([value])


def test_nesting_and_size_are_bounded() -> None:
    deep: Any = []
    for _ in range(MAX_DEPTH + 2):
        deep = [deep]
    looped: list[Any] = []
    looped.append(looped)

    for value in (deep, looped, list(range(1_000_000))):
        with pytest.raises(ValueTooLarge, match=r"more than|deeper"):
            encode(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1.5",
        "NaN",
        "{}",
        "[]",
        "[1]",
        '["f", 1]',
        '["f", "x"]',
        '["b", "0"]',
        '["d", 1]',
        '["s", ["l"]]',
        '["q", 1]',
        '["u", "ff"]',
        '["t", 1',
        "[" * 100_000,
        '["l",' * 100 + "1" + "]" * 100,
        "9" * 5000,
        "\x00",
    ],
)
def test_what_encode_did_not_write_is_refused(text: str) -> None:
    with pytest.raises(MalformedValue):
        decode(text)


@pytest.mark.parametrize("tag", ["s", "z", "d"])
def test_members_made_to_collide_are_refused_before_they_cost_anything(tag: str) -> None:
    colliding = ",".join(str(number * (2**61 - 1)) for number in range(1, 40_001))

    with pytest.raises(MalformedValue, match="collide"):
        decode(f'["{tag}",{colliding}]')


@pytest.mark.parametrize("tag", ["s", "z", "d"])
def test_members_half_of_which_collide_are_refused_too(tag: str) -> None:
    colliding = [str(number * (2**61 - 1)) for number in range(1, 10_001)]
    spread = [str(number) for number in range(1, 10_001)]
    members = ",".join(colliding + spread)

    with pytest.raises(MalformedValue, match="collide"):
        decode(f'["{tag}",{members}]')


def test_the_collisions_of_honest_values_are_taken() -> None:
    """CPython's -1 and -2 have the same hash, and so have all tuples that differ only in them."""
    honest = set(itertools.product((-1, -2), repeat=6))
    assert len(set(map(hash, honest))) == 1

    assert decode(encode(honest)) == honest


@given(st.text() | st.binary())
def test_no_text_makes_decode_do_anything_but_answer_or_refuse(text: str | bytes) -> None:
    try:
        decode(text)
    except MalformedValue:
        pass


@pytest.mark.parametrize(
    "modules", [("encode", "function_cases"), ("stdio_program",), ("encode", "decode", "script_check")], ids=str
)
def test_a_driver_is_one_program_for_the_oldest_python_a_cell_may_have(modules: tuple[str, ...]) -> None:
    source = drivers.source(*modules)

    ast.parse(source, feature_version=(3, 8))
    assert "palaestra.envs" not in source


def test_joining_modules_that_define_the_same_name_is_refused() -> None:
    with pytest.raises(ValueError, match="define a name twice"):
        drivers.source("function_cases", "script_check")
