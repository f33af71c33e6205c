"""Prepared corpora on disk: their index, their shards, and whether these are intact.

A corpus folder holds ``index.json`` and, for each split, shards ``train-00000.bin``: one unbroken
little-endian stream of token ids (uint16 or uint32) cut into files at any place. It is written by
``plait.train.data.prepare.prepare`` and read by ``plait.train.data.stream.Batches``.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import numpy as np
from annotated_types import Ge, Lt

from plait.core.base.codec.data import decode
from plait.core.base.codec.json_text import read_json
from plait.core.base.errors import DataError, JobError
from plait.core.base.numbers import shown

SplitName = Literal["train", "eval"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
INDEX_FILE = "index.json"
FORMAT, VERSION = "plait corpus", 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
LARGEST_INDEX = 64 << 20  # bytes; a shard takes 120, so that this is half a million of them
READ = 4 << 20  # bytes of which a checksum is made at once
Size = Annotated[int, Ge(0), Lt(1 << 62)]
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
    tokens: Size
    bytes: Size
    crc32: Annotated[int, Ge(0), Lt(1 << 32)]


@dataclass(frozen=True, kw_only=True)
class Split:
    """The shards of one split, in order; ``digest`` is a hash of the token stream, however it is cut into
    shards."""

    documents: Size
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

    dtype: Literal["uint16", "uint32"]
    vocab: Size
    end_of_text: Size
    tokenizer: str
    source: str
    splits: dict[SplitName, Split]

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
        except (ValueError, JobError) as error:
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
    """An ``Index`` from parsed JSON. Raises ValueError or JobError where it is none, DataError for another
    version."""
    values = cast("dict[str, Any]", raw if isinstance(raw, dict) else {})
    if (found := values.pop("format", None)) != FORMAT:
        raise ValueError(f"format is {shown(found)}, not {FORMAT!r}")
    if (found := values.pop("version", None)) != VERSION:
        known = f"this Plait reads version {VERSION}"
        raise DataError(f"{path}: version {shown(found)}, and {known}; {_remedy(path.parent)}")
    index = decode(Index, values, others=True)
    if index.vocab > 2 ** (8 * DTYPES[index.dtype].itemsize) or index.end_of_text >= index.vocab:
        raise ValueError(f"vocab is {index.vocab} of {index.dtype}, and end_of_text {index.end_of_text}")
    if set(index.splits) != set(SPLITS):
        raise ValueError(f"splits are {', '.join(map(shown, index.splits))}, not {', '.join(SPLITS)}")
    for name, split in index.splits.items():
        for number, shard in enumerate(split.shards):
            _check_shard(shard, shard_name(name, number), index.dtype)
    return index


def _check_shard(shard: TokenShard, file: str, dtype: str) -> None:
    """Raise ValueError for a shard of another name: whatever else an index names is not opened."""
    if shard.file != file:
        raise ValueError(f"shard {shown(shard.file)} stands where {file!r} belongs")
    tokens, size = shard.tokens, shard.bytes
    if tokens < 1 or size != tokens * DTYPES[dtype].itemsize:
        raise ValueError(f"shard {file!r} is described wrongly: {tokens} tokens of {dtype} in {size} bytes")


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
