"""UnicodeText takes any text there is."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from hypothesis import given
from hypothesis import strategies as st

from palaestra.envs.spaces import UnicodeText


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=50))
def test_any_text_within_the_bound_is_a_member(text: str) -> None:
    assert text in UnicodeText(50)


@pytest.mark.parametrize("text", ["", "\n", " ", "naïve", "日本語", "🙂" * 10, "\0", "e\u0301"])
def test_empty_white_and_foreign_texts_are_members(text: str) -> None:
    assert text in UnicodeText(10)


@pytest.mark.parametrize("other", ["x" * 11, "\ud800", "ok \udfff", b"bytes", 1, None, ["x"], np.array("x")])
def test_long_broken_and_other_things_are_not(other: object) -> None:
    assert other not in UnicodeText(10)


def test_samples_are_members_and_depend_on_the_seed_alone() -> None:
    space, twin, other = UnicodeText(80, seed=3), UnicodeText(80, seed=3), UnicodeText(80, seed=4)
    samples = [space.sample() for _ in range(50)]

    assert all(sample in space for sample in samples)
    assert samples == [twin.sample() for _ in range(50)]
    assert samples != [other.sample() for _ in range(50)]
    assert UnicodeText(0).sample() == ""
    assert any(not sample.isascii() for sample in samples)


def test_arguments_that_mean_nothing_here_are_refused() -> None:
    with pytest.raises(ValueError, match="mask"):
        UnicodeText(5).sample(mask=np.ones(1))
    with pytest.raises(ValueError, match="max_chars"):
        UnicodeText(-1)


def test_spaces_are_equal_by_their_bound_and_can_be_pickled() -> None:
    assert UnicodeText(5) == UnicodeText(5, seed=1)
    assert UnicodeText(5) != UnicodeText(6)
    assert pickle.loads(pickle.dumps(UnicodeText(5))) == UnicodeText(5)
    assert repr(UnicodeText(5)) == "UnicodeText(5)"


def test_a_batch_is_a_tuple_of_texts() -> None:
    space = UnicodeText(9)
    batched = batch_space(space, 3)
    texts = concatenate(space, ("a", "", "ü"), create_empty_array(space, 3))

    assert texts == ("a", "", "ü")
    assert texts in batched
    assert batched.sample() in batched
    assert list(iterate(batched, texts)) == ["a", "", "ü"]
