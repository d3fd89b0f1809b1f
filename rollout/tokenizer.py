"""Text to token ids and back, over the ``tokenizers`` library, saved as ``tokenizer.json`` in a Hugging Face folder.

Guarantees
----------
* ``decode(encode(text)) == text`` for any Unicode text (lone surrogates, which no UTF-8 can carry, become U+FFFD).
* Special ids never come out of ``encode``, whatever the text spells: only the chat format writes them.

Two small tokenizers are made here; any byte-level ``tokenizer.json`` (Qwen, Llama 3) can be loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from palaestra.envs.errors import UsageError

_FILE = "tokenizer.json"
_MINIMUM_COUNT = 3
"""A pre-token seen less often than this gets no id of its own: it would hardly be trained."""


class Tokenizer:
    """A byte-level tokenizer with named special tokens.

    >>> tokenizer = byte_tokenizer(("<pad>", "<eot>"))
    >>> tokenizer.encode("é<eot>")
    [195, 169, 60, 101, 111, 116, 62]
    >>> tokenizer.decode([195, 169, tokenizer.special("<eot>")])
    'é<eot>'
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.encode_special_tokens = True  # text that spells a special token is ordinary text
        self._backend = backend
        self._vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._specials = MappingProxyType({token.content: i for i, token in sorted(added.items()) if token.special})

    @property
    def vocab_size(self) -> int:
        """Ids are 0..vocab_size-1; a model may have more, which it must never sample (``suppressed_ids``)."""
        return self._vocab_size

    @property
    def specials(self) -> Mapping[str, int]:
        """Name to id of every special token."""
        return self._specials

    def special(self, name: str) -> int:
        """The id of a special token; an unknown name is a ``UsageError``."""
        try:
            return self._specials[name]
        except KeyError:
            raise UsageError(f"the tokenizer has no special token {name!r}; it has {list(self._specials)}") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, without any special id."""
        whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        ids: list[int] = self._backend.encode(whole, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids. Specials appear by name; bytes that are no UTF-8 as U+FFFD.

        An id outside the vocabulary is a ``UsageError``.
        """
        if bad := [i for i in ids if not 0 <= i < self._vocab_size]:
            raise UsageError(
                f"token id {bad[0]} is outside the tokenizer's 0..{self.vocab_size - 1}; "
                "a model with more ids than that must suppress them (DecoderConfig.suppressed_ids)"
            )
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def as_json(self) -> str:
        """What ``tokenizer.json`` holds."""
        text: str = self._backend.to_str()
        return text

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` into the folder, which is made when missing."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(path / _FILE))

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` from the folder; a missing or malformed file is a ``UsageError``."""
        path = Path(folder) / _FILE
        if not path.is_file():
            raise UsageError(f"{path} does not exist; a model folder holds the tokenizer that it was trained with")
        try:
            text = path.read_text(encoding="utf-8")
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:
            raise UsageError(f"{path} is no tokenizer file: {error}") from error
        return cls(backend)


def byte_tokenizer(special_tokens: Sequence[str]) -> Tokenizer:
    """256 byte ids (id = byte) and the specials behind them: the smallest tokenizer for any text."""
    return _byte_level(words=(), pattern=None, special_tokens=special_tokens)


def train_word_tokenizer(
    corpus: Iterable[str], *, pattern: str, vocab_size: int, special_tokens: Sequence[str]
) -> Tokenizer:
    """Whole pre-tokens as single ids, everything else as bytes; there are no merges, so a boundary never moves.

    ``pattern`` is a regular expression (Oniguruma) whose matches are the pre-tokens. The vocabulary is the 256 bytes,
    the most frequent pre-tokens of the corpus that occur at least three times, and the specials behind them; it may
    turn out smaller than ``vocab_size``.
    """
    room = vocab_size - 256 - len(special_tokens)
    if room < 0:
        raise UsageError(f"vocab_size {vocab_size} has no room for 256 bytes and {len(special_tokens)} specials")
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    counts = Counter(piece for text in corpus for piece, _ in split.pre_tokenize_str(text))
    frequent = sorted((-count, word) for word, count in counts.items() if count >= _MINIMUM_COUNT)
    words = [word for _, word in frequent if len(word.encode()) > 1][:room]
    return _byte_level(words, pattern, special_tokens)


def _byte_level(words: Sequence[str], pattern: str | None, special_tokens: Sequence[str]) -> Tokenizer:
    if len(set(special_tokens)) != len(special_tokens):
        raise UsageError(f"special tokens must differ from one another; got {list(special_tokens)}")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = (to_bytes.pre_tokenize_str(word)[0][0] for word in words)
    # A word spelled like a special would share its id, and text could then produce it.
    symbols = _byte_symbols() + [symbol for symbol in spelled if symbol not in special_tokens]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    if pattern is None:
        backend.pre_tokenizer = to_bytes
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special_tokens])
    return Tokenizer(backend)


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte 0..255 in byte-level vocabularies (Radford et al., 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]
