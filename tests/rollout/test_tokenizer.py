from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.envs.errors import UsageError
from palaestra.rollout.chat import PLAIN_SPECIALS
from palaestra.rollout.tokenizer import Tokenizer, byte_tokenizer, train_word_tokenizer

PATTERN = r"def |[a-z]+(?=_)|_[a-z]+|[0-9]|<[a-z]+>| ?[A-Za-z]+|."
CORPUS = ["def read_row(a):return read_row(a) <eot>", "NameError: name 'read_row' 1+2 é"] * 4
TOKENIZERS = {
    "bytes": byte_tokenizer(PLAIN_SPECIALS),
    "words": train_word_tokenizer(CORPUS, pattern=PATTERN, vocab_size=384, special_tokens=PLAIN_SPECIALS),
}
UNICODE = st.text(st.characters(codec="utf-8"))
TRICKY = st.lists(st.sampled_from(["read", "_row", "<eot>", "<user>", "é", "def ", " ", "\n", "\0", "日", "Ġ"])).map(
    "".join
)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=UNICODE | TRICKY)
def test_decoding_what_was_encoded_gives_the_same_text(name: str, text: str) -> None:
    assert TOKENIZERS[name].decode(TOKENIZERS[name].encode(text)) == text


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=UNICODE | TRICKY)
def test_no_text_encodes_to_a_special_id(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert not set(tokenizer.encode(text)) & set(tokenizer.specials.values())


def test_a_word_is_the_same_ids_wherever_it_stands() -> None:
    words = TOKENIZERS["words"]
    read_row = words.encode("read_row")
    assert len(read_row) == 2
    assert words.encode("def read_row(")[1:3] == read_row
    assert words.encode("'read_row'")[1:3] == read_row


def test_a_rare_word_falls_to_bytes_and_the_bytes_are_their_own_ids() -> None:
    words = TOKENIZERS["words"]
    assert words.encode("zq") == list(b"zq")
    assert words.vocab_size < 384


def test_a_lone_surrogate_becomes_a_replacement_character() -> None:
    assert TOKENIZERS["bytes"].decode(TOKENIZERS["bytes"].encode("a\ud800b")) == "a\ufffdb"


def test_half_a_character_decodes_to_a_replacement_character() -> None:
    assert TOKENIZERS["bytes"].decode(TOKENIZERS["bytes"].encode("é")[:1]) == "\ufffd"


def test_special_tokens_show_in_decoded_text() -> None:
    tokenizer = TOKENIZERS["words"]
    assert tokenizer.decode([*tokenizer.encode("ok"), tokenizer.special("<eot>")]) == "ok<eot>"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_saved_tokenizer_loads_as_the_same_one(name: str, tmp_path: Path) -> None:
    TOKENIZERS[name].save(tmp_path / "model")
    loaded = Tokenizer.load(tmp_path / "model")
    text = "def read_row(<eot>)é"
    assert loaded.encode(text) == TOKENIZERS[name].encode(text)
    assert loaded.specials == TOKENIZERS[name].specials
    assert loaded.vocab_size == TOKENIZERS[name].vocab_size


def test_missing_and_malformed_files_say_which_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match=r"tokenizer\.json is no tokenizer file"):
        Tokenizer.load(tmp_path)


def test_ids_and_names_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(UsageError, match=r"token id 261 is outside the tokenizer's 0\.\.260"):
        TOKENIZERS["bytes"].decode([1, 261])
    with pytest.raises(UsageError, match="no special token '<system>'"):
        TOKENIZERS["bytes"].special("<system>")
    with pytest.raises(UsageError, match="no room"):
        train_word_tokenizer(CORPUS, pattern=PATTERN, vocab_size=260, special_tokens=PLAIN_SPECIALS)
    with pytest.raises(UsageError, match="differ"):
        byte_tokenizer(("<eot>", "<eot>"))
