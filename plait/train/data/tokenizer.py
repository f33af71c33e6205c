"""Text to token ids and back: the built-in byte tokenizer, and Hugging Face ``tokenizer.json`` files.

The byte tokenizer needs no file and no training: a byte is its own id and 256 means end of text, so the
vocabulary is 257 and no text, whatever its encoding, can contain the separator. (The embedding is padded to
what tensor parallelism needs by ``Strategy.padded_vocab``; a tokenizer never rounds its vocabulary up.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from plait.core.errors import DataError
from plait.core.files import kind_of

# tokenizer.json does not say which special token ends a text; these are looked up, in this order, when the
# tokenizer_config.json beside it does not say so either.
END_OF_TEXT_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>", "[SEP]")


class Tokenizer(Protocol):
    """What the data path needs; ``ByteTokenizer`` and ``FileTokenizer`` are the two implementations."""

    @property
    def vocab(self) -> int:
        """One more than the largest token id."""
        ...

    @property
    def end_of_text(self) -> int:
        """The id written between documents."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal only for tokenizers that give the same ids; kept in the index of a corpus."""
        ...

    def encode(self, text: bytes | str) -> np.ndarray:
        """Token ids, int64 [tokens], without any special token added."""
        ...

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """``encode`` of each text; on all cores where the implementation can."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ``ids``; end-of-text becomes nothing, bytes that are not UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """One token per byte, plus end-of-text.

    >>> ByteTokenizer().encode("hé").tolist()
    [104, 195, 169]
    >>> ByteTokenizer().decode([104, 195, 169, 256])
    'hé'
    """

    vocab = 257
    end_of_text = 256
    fingerprint = "bytes-1"

    def encode(self, text: bytes | str) -> np.ndarray:
        """Token ids, int64 [bytes]; a ``str`` is taken as UTF-8 (a lone surrogate, which has none, becomes
        ``?``)."""
        data = text.encode("utf-8", errors="replace") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int64)

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ``ids``; ``ValueError`` for an id outside 0..256."""
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        if array.size and not 0 <= array.min() <= array.max() < self.vocab:
            raise ValueError(f"token ids must lie in 0..{self.vocab - 1}, got {array.min()}..{array.max()}")
        return array[array != self.end_of_text].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``.

    Truncation and padding that the file asks for are switched off, and no begin or end token is added: a
    corpus is an unbroken stream of text. A special token spelled out in the text (``<|endoftext|>`` between
    the stories of one file) does become that token.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        content, self._tokenizer = _read_tokenizer(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(f"{path}: the tokenizer has no tokens; name a trained tokenizer.json")
        self.vocab = max(ids.values()) + 1  # not len(ids): ids may have gaps, and the embedding is indexed by id
        self.end_of_text = _end_of_text(path, ids)
        self.fingerprint = f"file-1-{hashlib.sha256(content).hexdigest()[:32]}-{self.end_of_text}"

    def encode(self, text: bytes | str) -> np.ndarray:
        return self.encode_many([text.encode("utf-8", errors="replace") if isinstance(text, str) else text])[0]

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        strings = [text.decode("utf-8", errors="replace") for text in texts]
        encodings = self._tokenizer.encode_batch_fast(strings, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def token(self, number: int) -> str:
        """How the file spells a token."""
        return self._tokenizer.id_to_token(number)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        return self._tokenizer.decode(array[array != self.end_of_text].tolist(), skip_special_tokens=False)


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """``"bytes"``, or the path of a ``tokenizer.json`` or of a folder that holds one.

    Raises ``DataError`` when there is no such file or it is not a tokenizer file.
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
    """The bytes of the file and the ``tokenizers.Tokenizer`` they describe."""
    try:
        from tokenizers import Tokenizer as Library
    except ImportError as error:
        raise DataError(
            f"{path}: reading a tokenizer file needs the package 'tokenizers'; install it (pip install tokenizers)"
        ) from error
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot read the tokenizer file: {error.strerror}; check its permissions") from error
    try:
        return content, Library.from_buffer(content)
    except Exception as error:  # the library raises bare Exception for everything
        raise DataError(f"{path}: not a Hugging Face tokenizer file ({error}); name a tokenizer.json") from error


def _end_of_text(path: Path, ids: dict[str, int]) -> int:
    """The id of the token that ends a text, from ``tokenizer_config.json`` beside the file or by its usual
    names."""
    config = path.with_name("tokenizer_config.json")
    if config.is_file():
        try:
            declared = json.loads(config.read_bytes()).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{config}: cannot be read as JSON settings ({error}); repair or remove it") from error
        name = declared.get("content") if isinstance(declared, dict) else declared
        if isinstance(name, str):
            if name not in ids:
                raise DataError(f"{config}: eos_token {name!r} is not in the vocabulary of {path.name}; correct it")
            return ids[name]
    for name in END_OF_TEXT_NAMES:
        if name in ids:
            return ids[name]
    raise DataError(
        f"{path}: has no end-of-text token (looked for {', '.join(END_OF_TEXT_NAMES)}); "
        'write {"eos_token": "..."} into a tokenizer_config.json beside it'
    )
