"""Encode text as token ids and decode it: the built-in byte tokenizer, and Hugging Face
``tokenizer.json`` files.

The byte tokenizer needs no file and no training: a byte is its own id and 256 means end of text. So
the vocabulary is 257, and no text, whatever its encoding, can contain the separator.
(``Strategy.padded_vocab`` pads the embedding for tensor parallelism; a tokenizer never rounds its
vocabulary up.)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from plait.core.base.codec.json_text import parse_table
from plait.core.base.errors import DataError
from plait.core.base.files import contents_within, kind_of, reason_of
from plait.core.base.numbers import shown
from plait.train.data.chat_template import settings_in, spelled
from plait.train.data.kinds import utf8

STDERR = 2
# tokenizer.json does not declare which special token ends a text: files beside it do, or one of the usual
# names.
BESIDE = ("tokenizer_config.json", "special_tokens_map.json")
END_OF_TEXT_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>", "[SEP]")


class Tokenizer(Protocol):
    """The interface of tokenizers; ``ByteTokenizer`` and ``FileTokenizer`` are the two basic
    implementations."""

    @property
    def vocab(self) -> int:
        """Size of the vocabulary: one more than the largest token id."""
        ...

    @property
    def end_of_text(self) -> int:
        """Token id that is written between documents."""
        ...

    @property
    def fingerprint(self) -> str:
        """A string that is equal only for tokenizers that give the same ids; stored in the index of
        a corpus."""
        ...

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return token ids, int64 [tokens], without any special token added."""
        ...

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return ``encode`` of each text; on all cores if the implementation can."""
        ...

    def encode_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ``encode`` of each text, and begin and end of each token in characters, int64
        [tokens, 2]."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ``ids``; end-of-text is removed, bytes that are not UTF-8 become
        U+FFFD."""
        ...


class ByteTokenizer:
    """A tokenizer with one token per byte, plus end-of-text.

    >>> ByteTokenizer().encode("hé").tolist()
    [104, 195, 169]
    >>> ByteTokenizer().decode([104, 195, 169, 256])
    'hé'
    """

    vocab = 257
    end_of_text = 256
    fingerprint = "bytes-1"

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return token ids, int64 [bytes]; a ``str`` is encoded with ``utf8``."""
        data = utf8(text) if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int64)

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for text in texts:
            sizes = [len(utf8(character)) for character in text]
            begins = np.repeat(np.arange(len(text), dtype=np.int64), sizes)
            found.append((self.encode(text), np.stack((begins, begins + 1), axis=1)))
        return found

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ``ids``. Raises ValueError for an id outside 0..256."""
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        if array.size and not 0 <= array.min() <= array.max() < self.vocab:
            raise ValueError(f"token ids must lie in 0..{self.vocab - 1}, got {array.min()}..{array.max()}")
        return array[array != self.end_of_text].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer from a Hugging Face ``tokenizer.json``.

    Truncation, padding and BPE dropout, which the file may request, are switched off, and no begin
    or end token is added: a corpus is an unbroken stream of text. A special token spelled out in
    the text (``<|endoftext|>`` between the stories of one file) does become that token. Raises
    DataError for a character without a token, if the vocabulary has no unknown token either.

    | file | content used |
    |---|---|
    | ``tokenizer.json`` | all, by the package ``tokenizers``, within limits (``check_limits``) |
    | ``tokenizer_config.json``, else ``special_tokens_map.json`` | ``eos_token``, which ends a text |
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        content, self._tokenizer = _read_tokenizer(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None) is not None:
            self._tokenizer.model.dropout = None
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(f"{path}: the tokenizer has no tokens; name a trained tokenizer.json")
        self.vocab = max(ids.values()) + 1  # not len(ids): ids may have gaps, and the embedding is indexed by id
        self.end_of_text = _end_of_text(path, ids)
        self._drops = _drops_unknown(self._tokenizer)
        self.fingerprint = f"file-1-{hashlib.sha256(content).hexdigest()[:32]}-{self.end_of_text}"

    def encode(self, text: bytes | str) -> np.ndarray:
        return self.encode_many([utf8(text) if isinstance(text, str) else text])[0]

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        strings = [text.decode("utf-8", errors="replace") for text in texts]
        encodings = self._encodings(strings, offsets=self._drops)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def encode_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (np.asarray(one.ids, dtype=np.int64), np.asarray(one.offsets, dtype=np.int64).reshape(-1, 2))
            for one in self._encodings(texts, offsets=True)
        ]

    def _encodings(self, texts: Sequence[str], *, offsets: bool) -> Sequence[Any]:
        """Return the library's encodings of texts. Raises DataError."""
        encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
        fix = "name a tokenizer that has an unknown token and a fast pattern"
        with _explained(f"{self.path}: cannot encode this text", fix):
            encodings = encode(texts, add_special_tokens=False)
        if self._drops:
            self._refuse_dropped(texts, encodings)
        return encodings

    def _refuse_dropped(self, texts: Sequence[str], encodings: Sequence[Any]) -> None:
        """Raise DataError for a character, other than white space, that no token covers."""
        for text, encoding in zip(texts, encodings, strict=True):
            covered = np.zeros(len(text) + 1, np.int64)
            for begin, end in encoding.offsets:
                covered[begin] += 1
                covered[end] -= 1
            for at in np.flatnonzero(np.cumsum(covered[:-1]) == 0):
                if not text[at].isspace():
                    raise DataError(
                        f"{self.path}: has no token for {text[at]!r} and no unknown token, so this text "
                        "would lose characters; name another tokenizer"
                    )

    @property
    def special(self) -> tuple[str, ...]:
        """The special tokens, as text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return tuple(token.content for token in added.values() if token.special)

    def token(self, number: int) -> str:
        """Return a token as the file spells it."""
        return self._tokenizer.id_to_token(number)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        return self._tokenizer.decode(array[array != self.end_of_text].tolist(), skip_special_tokens=False)


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """Return the tokenizer ``"bytes"``, or of a ``tokenizer.json``, given by its path or its
    folder.

    Raises DataError if there is no such file or it is not a tokenizer file.
    """
    if str(name_or_path) == "bytes":
        return ByteTokenizer()
    path = Path(name_or_path).expanduser()
    try:
        path = path / "tokenizer.json" if kind_of(path) == "folder" else path
        kind = kind_of(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; check its permissions") from None
    if kind != "file":
        problem = f"is a {kind}, no tokenizer file" if kind else "no such tokenizer file"
        raise DataError(
            f"{path}: {problem}; name 'bytes', or the path of a Hugging Face tokenizer.json "
            "(models are not downloaded: fetch the file first)"
        )
    return FileTokenizer(path)


def _read_tokenizer(path: Path) -> tuple[bytes, Any]:
    """Return the bytes of the file and the ``tokenizers.Tokenizer`` that they describe."""
    from tokenizers import Tokenizer as Library

    try:
        content = contents_within(path, LARGEST)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot read the tokenizer file: {reason_of(error)}; name a tokenizer.json") from None
    with _explained(f"{path}: not a Hugging Face tokenizer file", "name a tokenizer.json"), quiet():
        check_limits(parse_table(content, most=MOST_VALUES))
        return content, Library.from_buffer(content)


@contextmanager
def quiet() -> Generator[None]:
    """Discard what a Rust library prints to standard error about a failure; Plait reports it
    itself."""
    try:
        kept, null = os.dup(STDERR), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # standard error is closed
        yield
        return
    os.dup2(null, STDERR)
    os.close(null)
    try:
        yield
    finally:
        os.dup2(kept, STDERR)
        os.close(kept)


@contextmanager
def _explained(problem: str, fix: str) -> Generator[None]:
    """Turn every error of the package ``tokenizers`` into DataError: plain exceptions, and Rust
    panics, which derive from BaseException only."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001
        raise DataError(f"{problem} ({error}); {fix}") from None


def _drops_unknown(tokenizer: Any) -> bool:
    """Return True if characters without a token vanish silently: in a BPE model with no unknown
    token, no byte fallback and no byte-level steps."""
    model = tokenizer.model
    if type(model).__name__ != "BPE" or model.unk_token is not None or model.byte_fallback:
        return False
    parts = (part.__getstate__() for part in (tokenizer.pre_tokenizer, tokenizer.normalizer) if part is not None)
    return not any(b'"ByteLevel"' in state for state in parts)


def _end_of_text(path: Path, ids: dict[str, int]) -> int:
    """Return the id of the token that ends a text: declared in the files beside ``tokenizer.json``,
    or the only usual name in the vocabulary. Raises DataError."""
    for beside in map(path.with_name, BESIDE):
        if (name := _declared_end(beside)) is not None:
            if name not in ids:
                raise DataError(
                    f"{beside}: eos_token {shown(name)} is not in the vocabulary of {path.name}; correct it"
                )
            return ids[name]
    found = [name for name in END_OF_TEXT_NAMES if name in ids]
    if len(found) == 1:
        return ids[found[0]]
    several = f"has several tokens that may end a text ({', '.join(found)})"
    problem = several if found else f"has no end-of-text token (looked for {', '.join(END_OF_TEXT_NAMES)})"
    raise DataError(f'{path}: {problem}; write {{"eos_token": "..."}} into a tokenizer_config.json beside it')


def _declared_end(file: Path) -> str | None:
    """Return the ``eos_token`` of a file beside a tokenizer; None if there is no such file, or it
    names none."""
    name = spelled(settings_in(file).get("eos_token"))
    if name is not None and not isinstance(name, str):
        raise DataError(f"{file}: eos_token is {shown(name)}, no text; correct it")
    return name


# ---- limits ----


LARGEST = 128 << 20
"""Bytes of a tokenizer file, at most: one with a quarter of a million tokens has 35 MB."""
MOST_VALUES = 4_000_000
MOST_TOKENS = 1_000_000
MOST_STEPS = 1000
MOST_GROWTH = 16
LONGEST = 100
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")


def check_limits(content: dict[str, Any]) -> None:
    """Raise ValueError, in one sentence, for a ``tokenizer.json`` that exceeds a limit. A third
    party's file may be huge, or tiny and expand a text to gigabytes, and ``tokenizers`` builds
    whatever it describes.

    ===================================================  ======================================
    the file                                             ``LARGEST`` bytes, ``MOST_VALUES`` values
    vocabulary, merges, added tokens                     ``MOST_TOKENS`` of each
    steps of normalizers, pre-tokenizers,                ``MOST_STEPS`` together
    post-processors and decoders
    characters that a normalizer puts in place of one,   ``MOST_GROWTH``
    all steps multiplied
    text put before a text; prefixes and suffixes        ``LONGEST`` characters
    of tokens
    ===================================================  ======================================

    >>> check_limits({"normalizer": {"type": "Prepend", "prepend": "x" * 101}})
    Traceback (most recent call last):
    ValueError: its prepend has 101 characters; at most 100 are taken
    """
    found: Any = content.get("model")
    model = cast("dict[str, Any]", found) if isinstance(found, dict) else dict[str, Any]()
    for where, key in ((model, "vocab"), (model, "merges"), (content, "added_tokens")):
        listed = where.get(key)
        count = len(cast("list[Any]", listed)) if isinstance(listed, dict | list) else 0
        if count > MOST_TOKENS:
            raise ValueError(f"its {key} has {count} entries; at most {MOST_TOKENS} are read")
    steps = [step for key in _STEPS for step in _steps(content.get(key))]
    if len(steps) > MOST_STEPS:
        raise ValueError(f"it has {len(steps)} steps around its model; at most {MOST_STEPS} are taken")
    for where, key in (*((model, key) for key in _AFFIXES), *((step, "prepend") for step in steps)):
        if isinstance(text := where.get(key), str) and len(text) > LONGEST:
            raise ValueError(f"its {key} has {len(text)} characters; at most {LONGEST} are taken")
    growth = 1
    for step in _steps(content.get("normalizer")):
        if isinstance(text := step.get("content"), str):
            growth *= max(1, len(text))
            if growth > MOST_GROWTH:
                raise ValueError(f"its normalizer makes more than {MOST_GROWTH} characters of one")


def _steps(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every table (a step of a normalizer, pre-tokenizer, post-processor or decoder) in a
    part of the file, at any nesting."""
    if isinstance(value, dict):
        yield cast("dict[str, Any]", value)
    if isinstance(value, dict | list):
        for inner in cast("dict[str, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value):
            yield from _steps(inner)
