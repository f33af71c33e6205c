"""Prepared corpora on disk: their index, their shards, and whether these are intact.

A corpus folder holds ``index.json`` and, for each split, shards ``train-00000.bin``: one unbroken
little-endian stream of token ids (uint16 or uint32) cut into files at any place. It is written by
``plait.train.data.prepare.prepare`` and read by ``plait.train.data.batches.Batches``.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from plait.core.base.codec.json_text import read_json
from plait.core.base.errors import DataError

SplitName = Literal["train", "eval"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
INDEX_FILE = "index.json"
FORMAT, VERSION = "plait corpus", 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
LARGEST_INDEX = 64 << 20  # bytes; a shard takes 120, so that this is half a million of them
READ = 4 << 20  # bytes of which a checksum is made at once
_SHARD_NAME = re.compile(rf"({'|'.join(SPLITS)})-\d{{5,}}\.bin")


class DamagedCorpus(DataError):
    """A corpus whose files are not what its index says. ``what`` is wrong, without the remedy."""

    def __init__(self, folder: Path, what: str) -> None:
        super().__init__(f"{what}; {_remedy(folder)}")
        self.what = what


@dataclass(frozen=True, kw_only=True)
class TokenShard:
    """One file of token ids; ``crc32`` is of its bytes."""

    file: str
    tokens: int
    bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class Split:
    """The shards of one split, in order; ``digest`` is a hash of the token stream, however it is cut into
    shards."""

    documents: int
    digest: str
    shards: tuple[TokenShard, ...]

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)


@dataclass(frozen=True, kw_only=True)
class Index:
    """The content of ``index.json``: ``tokenizer`` and ``source`` are fingerprints of what the corpus was
    made from."""

    dtype: str
    vocab: int
    end_of_text: int
    tokenizer: str
    source: str
    splits: dict[str, Split]

    @property
    def shards(self) -> tuple[TokenShard, ...]:
        """Of all splits."""
        return tuple(shard for split in self.splits.values() for shard in split.shards)

    def to_json(self) -> str:
        """The text of ``index.json``."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def read(path: Path) -> Index:
        """Parse and check ``index.json``. Raises DamagedCorpus for one that is none, DataError for one that
        is not there or of another version."""
        try:
            return _index(path, read_json(path, LARGEST_INDEX))
        except FileNotFoundError as error:
            raise DataError(
                f"{path}: no such file, so {path.parent} is not a prepared corpus; prepare it first"
            ) from error
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error
        except ValueError as error:
            raise DamagedCorpus(path.parent, f"{path}: not a usable corpus index ({error})") from None


class Corpus:
    """A prepared corpus, memory-mapped; make one with ``Corpus.open`` or
    ``plait.train.data.prepare.prepare``."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self._maps = {
            name: [_map_shard(folder, shard, index) for shard in split.shards] for name, split in index.splits.items()
        }
        self._ends = {
            name: np.cumsum([len(array) for array in arrays], dtype=np.int64) for name, arrays in self._maps.items()
        }

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Map the shards of ``folder`` after checking that each is there with the size the index gives.

        Contents are not read (see ``verify``). Raises ``DataError`` naming the file, what is wrong and what
        to do.
        """
        folder = Path(folder)
        index = Index.read(folder / INDEX_FILE)
        corpus = cls(folder, index)
        known = {shard.file for shard in index.shards}
        extra = sorted(path.name for path in folder.iterdir() if is_shard(path.name) and path.name not in known)
        if extra:
            raise DamagedCorpus(folder, f"{folder / extra[0]}: a shard of which the index says nothing")
        return corpus

    def num_tokens(self, split: SplitName) -> int:
        """Tokens of one split."""
        return self.index.splits[split].tokens

    def read(self, split: SplitName, start: int, count: int) -> np.ndarray:
        """Tokens ``start .. start + count`` of the split's stream, across shards: int64 [count], a copy."""
        assert 0 <= start <= start + count <= self.num_tokens(split), f"{start}+{count} outside {split}"
        result = np.empty(count, np.int64)
        ends, done = self._ends[split], 0
        number = int(np.searchsorted(ends, start, side="right"))
        while done < count:
            shard = self._maps[split][number]
            offset = start + done - (int(ends[number]) - len(shard))
            piece = shard[offset : offset + count - done]
            result[done : done + len(piece)] = piece
            done, number = done + len(piece), number + 1
        return result

    def verify(self, files: Collection[str] | None = None) -> None:
        """Read shards (those named; all) and compare their checksums; ``DamagedCorpus`` names the first bad
        one."""
        for name, split in self.index.splits.items():
            for shard, array in zip(split.shards, self._maps[name], strict=True):
                if files is None or shard.file in files:
                    self._verify(shard, array)

    def _verify(self, shard: TokenShard, array: np.ndarray) -> None:
        crc, highest, path = 0, 0, self.folder / shard.file
        for begin in range(0, len(array), READ // array.itemsize):
            part = array[begin : begin + READ // array.itemsize]
            crc, highest = zlib.crc32(part.data, crc), max(highest, int(part.max()))
        if crc != shard.crc32:
            raise DamagedCorpus(self.folder, f"{path}: damaged (checksum {crc:08x}, expected {shard.crc32:08x})")
        if highest >= self.index.vocab:
            what = f"{path}: has token {highest} and the vocabulary ends at {self.index.vocab - 1}"
            raise DamagedCorpus(self.folder, what)


def is_shard(name: str) -> bool:
    """Whether a file's name is one that shards have."""
    return _SHARD_NAME.fullmatch(name) is not None


def shard_name(split: str, number: int) -> str:
    """The file of a split's shard."""
    return f"{split}-{number:05d}.bin"


def _remedy(folder: Path) -> str:
    return f"delete the folder {folder} and prepare the corpus again"


def _index(path: Path, raw: Any) -> Index:
    """An ``Index`` from parsed JSON; ``ValueError`` when it is not one, ``DataError`` for another version."""
    values = _table(raw, "the file")
    if values.get("format") != FORMAT:
        raise ValueError(f"format is {_shown(values.get('format'))}, not {FORMAT!r}")
    if _natural(values, "version") != VERSION:
        found = _shown(values["version"])
        raise DataError(f"{path}: version {found}, and this Plait reads version {VERSION}; {_remedy(path.parent)}")
    dtype = _text(values, "dtype")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {_shown(dtype)} is not one of {', '.join(DTYPES)}")
    vocab = _natural(values, "vocab", below=2 ** (8 * DTYPES[dtype].itemsize) + 1)
    return Index(
        dtype=dtype,
        vocab=vocab,
        end_of_text=_natural(values, "end_of_text", below=vocab),
        tokenizer=_text(values, "tokenizer"),
        source=_text(values, "source"),
        splits={name: _split(name, _table(values.get("splits"), "splits"), dtype) for name in SPLITS},
    )


def _split(name: SplitName, splits: dict[str, Any], dtype: str) -> Split:
    values = _table(splits.get(name), f"splits.{name}")
    listed = values.get("shards")
    if not isinstance(listed, list):
        raise ValueError(f"splits.{name}.shards is {_shown(listed)}, not a list")
    shards = tuple(_shard(each, shard_name(name, number), dtype) for number, each in enumerate(listed))
    return Split(documents=_natural(values, "documents"), digest=_text(values, "digest"), shards=shards)


def _shard(raw: Any, file: str, dtype: str) -> TokenShard:
    """The shard that must have this name: whatever else an index names is not opened."""
    values = _table(raw, f"shard {file}")
    if values.get("file") != file:
        raise ValueError(f"shard {_shown(values.get('file'))} stands where {file!r} belongs")
    tokens, size = _natural(values, "tokens"), _natural(values, "bytes")
    if tokens < 1 or size != tokens * DTYPES[dtype].itemsize:
        raise ValueError(f"shard {file!r} is described wrongly: {tokens} tokens of {dtype} in {size} bytes")
    return TokenShard(file=file, tokens=tokens, bytes=size, crc32=_natural(values, "crc32", below=1 << 32))


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_shown(value)}, not a table")
    return value


def _text(values: dict[str, Any], key: str) -> str:
    if not isinstance(value := values.get(key), str):
        raise ValueError(f"{key} is {_shown(value)}, not a text" if key in values else f"has no key {key!r}")
    return value


def _natural(values: dict[str, Any], key: str, *, below: int = 1 << 62) -> int:
    """A whole number from 0 on."""
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        raise ValueError(
            f"{key} is {_shown(value)}, not a whole number below {below}" if key in values else f"has no key {key!r}"
        )
    return value


def _shown(value: Any) -> str:
    """A value for a message, however large it is."""
    text = repr(value)[:60] if not isinstance(value, (dict, list)) else f"a {type(value).__name__}"
    return text if len(text) < 60 else f"{text}..."


def _map_shard(folder: Path, shard: TokenShard, index: Index) -> np.ndarray:
    """The shard as a read-only memory map [tokens], after its size was checked."""
    path = folder / shard.file
    try:
        found = path.stat().st_size
        if found != shard.bytes:
            raise DamagedCorpus(folder, f"{path}: has {found} bytes and the index says {shard.bytes}")
        return np.memmap(path, dtype=DTYPES[index.dtype], mode="r")
    except FileNotFoundError:
        raise DamagedCorpus(folder, f"{path}: the shard is missing, expected {shard.bytes} bytes") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be mapped: {error.strerror}; check its permissions") from error
