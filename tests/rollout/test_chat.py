from __future__ import annotations

from dataclasses import replace

import pytest

from palaestra.envs.errors import UsageError
from palaestra.rollout.chat import ChatFormat


def test_an_opening_wraps_the_instruction_in_markers(chat: ChatFormat) -> None:
    assert chat.tokenizer.decode(chat.opening("do <eot> it")) == "<user>do <eot> it<assistant>"
    assert chat.end_id not in chat.opening("do <eot> it")


def test_an_opening_that_is_too_long_names_both_lengths(chat: ChatFormat) -> None:
    assert len(chat.opening("x" * 30)) == 32
    with pytest.raises(UsageError, match="takes 33 tokens and max_prompt_tokens is 32"):
        chat.opening("x" * 31)


@pytest.mark.parametrize(
    ("keep", "expected"), [("head", "<tool>0123456789<assistant>"), ("tail", "<tool>23456789ab<assistant>")]
)
def test_a_long_observation_is_cut_at_the_stated_end_and_keeps_its_markers(
    chat: ChatFormat, keep: str, expected: str
) -> None:
    assert chat.tokenizer.decode(replace(chat, keep=keep).observation("0123456789ab")) == expected  # type: ignore[arg-type]


def test_an_observation_that_fits_is_whole(chat: ChatFormat) -> None:
    assert chat.tokenizer.decode(chat.observation("0123456789")) == "<tool>0123456789<assistant>"
    assert chat.tokenizer.decode(chat.observation("")) == "<tool><assistant>"


def test_an_action_is_its_ids_without_the_stop_id_and_nothing_is_stripped(chat: ChatFormat) -> None:
    ids = chat.action_ids(" a\n")
    assert ids[-1] == chat.end_id
    assert chat.action_text(ids) == " a\n"
    assert chat.action_text(ids[:-1]) == " a\n"
    assert chat.action_text([chat.end_id, *ids]) == "<eot> a\n"
    assert chat.action_text([]) == ""


def test_markers_may_be_several_tokens(chat: ChatFormat) -> None:
    newline = tuple(chat.tokenizer.encode("\n"))
    multi = replace(chat, before_observation=(*newline, *chat.before_observation))
    assert chat.tokenizer.decode(multi.observation("x")) == "\n<tool>x<assistant>"
