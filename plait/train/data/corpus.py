"""Prepared corpora on disk: their index, their shards, and whether these are intact.

A corpus folder holds, for each split,

| file | what it is |
|---|---|
| ``train-00000.bin``, ... | one unbroken stream of token ids (uint16 or uint32), cut anywhere |
| ``train.ends`` | where documents end in it: int64, rising, each the place behind a document's end-of-text |
| ``train.spans`` | in place of shards, of token files of others: int64 [n, 3], file, begin, count |
| ``index.json`` | of both splits: sizes, checksums, what the corpus was made from |

It is written by ``plait.train.data.prepare.prepare`` and read by ``plait.train.data.stream.Batches``.
"""

from __future__ import annotations

import json
import os
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
FORMAT, VERSION = "plait corpus", 2
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
LARGEST_INDEX = 64 << 20  # bytes; a shard takes 120, so that this is half a million of them
MOST_SPANS_CHECKED = 1 << 20
READ = 4 << 20  # bytes of which a checksum is made at once
END = np.dtype("<i8")
"""Of a document's end."""
Size = Annotated[int, Ge(0), Lt(1 << 62)]
Checksum = Annotated[int, Ge(0), Lt(1 << 32)]
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
    crc32: Checksum


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A token file that another program wrote and that is read where it lies. dtype: NumPy's name of it.
    offset: of the first token, in bytes."""

    path: str
    dtype: str
    offset: Size
    tokens: Size
    bytes: Size
    mtime_ns: int

    def mapped(self) -> np.ndarray:
        """The tokens as a read-only memory map [tokens]. Raises DataError for a file that has changed."""
        try:
            status = os.stat(self.path)
            if (status.st_size, status.st_mtime_ns) != (self.bytes, self.mtime_ns):
                raise DataError(f"{self.path}: has changed since it was looked through; prepare the corpus again")
            if not self.tokens:
                return np.empty(0, self.dtype)
            return np.memmap(self.path, self.dtype, "r", self.offset, (self.tokens,))
        except OSError as error:
            raise DataError(f"{self.path}: cannot be mapped: {error.strerror or error}; restore it") from None


@dataclass(frozen=True, kw_only=True)
class Split:
    """The shards of one split, in order; ``digest`` is a hash of the token stream, however it is cut into
    shards. ``documents`` end in it, ``ends_crc32`` is of the bytes that say where. spans: of token files, in
    place of shards."""

    tokens: Size
    documents: Size
    ends_crc32: Checksum
    digest: str
    shards: tuple[TokenShard, ...] = ()
    spans: Size = 0
    spans_crc32: Checksum = 0


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
    in_place: tuple[TokenFile, ...] = ()
    tokenizer_file: str = ""
    """Where the tokenizer was; empty for bytes."""

    @property
    def shards(self) -> tuple[TokenShard, ...]:
        """Of all splits."""
        return tuple(shard for split in self.splits.values() for shard in split.shards)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all files that hold data."""
        spans = map(spans_name, self.splits) if self.in_place else ()
        return (*(shard.file for shard in self.shards), *map(ends_name, self.splits), *spans)

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
        files = [file.mapped() for file in index.in_place]
        self._splits = {name: _Mapped.of(folder, name, index, files) for name in index.splits}

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
        result, mapped = np.empty(count, np.int64), self._splits[split]
        number, done = int(np.searchsorted(mapped.lasts, start, side="right")), 0
        while done < count:
            piece = mapped.piece(number, start + done)[: count - done]
            result[done : done + len(piece)] = piece
            done, number = done + len(piece), number + 1
        return result

    def ends(self, split: SplitName, start: int, count: int) -> np.ndarray:
        """Where documents end in ``read(split, start, count)``: int64 [n], rising, each in 1..count, the
        place behind a document's last token (its end-of-text). A document that goes on behind has none."""
        ends = self._splits[split].ends
        first, last = np.searchsorted(ends, [start, start + count], side="right")
        return ends[first:last].astype(np.int64) - start

    def verify(self, files: Collection[str] | None = None) -> None:
        """Read files (those named; all) and compare their checksums; ``DamagedCorpus`` names the first bad
        one."""
        for name, split in self.index.splits.items():
            for shard, array in zip(split.shards, self._splits[name].arrays if split.shards else (), strict=True):
                if files is None or shard.file in files:
                    self._verify(shard, array)
            if files is None or ends_name(name) in files:
                self._verify_ends(name, split)
            if self.index.in_place and (files is None or spans_name(name) in files):
                self._verify_spans(name, split)

    def _verify_spans(self, name: SplitName, split: Split) -> None:
        path, spans = self.folder / spans_name(name), self._splits[name].spans
        crc = zlib.crc32(spans.data) if len(spans) else 0
        if crc != split.spans_crc32:
            raise DamagedCorpus(self.folder, f"{path}: damaged (checksum {crc:08x}, expected {split.spans_crc32:08x})")

    def _verify_ends(self, name: SplitName, split: Split) -> None:
        path, ends, crc, last = self.folder / ends_name(name), self._splits[name].ends, 0, 0
        for begin in range(0, len(ends), READ // END.itemsize):
            part = ends[begin : begin + READ // END.itemsize]
            crc = zlib.crc32(part.data, crc)
            if int(part[0]) <= last or (np.diff(part) <= 0).any() or int(part[-1]) > split.tokens:
                raise DamagedCorpus(self.folder, f"{path}: damaged (ends of documents that do not rise)")
            last = int(part[-1])
        if crc != split.ends_crc32:
            raise DamagedCorpus(self.folder, f"{path}: damaged (checksum {crc:08x}, expected {split.ends_crc32:08x})")

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


@dataclass(frozen=True)
class _Mapped:
    """A split in memory maps. Piece k is ``count`` tokens from ``begin`` of an array: a shard, or a span of a
    token file. lasts: tokens of the stream up to the end of each piece. spans: int64 [pieces, 3], array,
    begin, count."""

    arrays: list[np.ndarray]
    spans: np.ndarray
    lasts: np.ndarray
    ends: np.ndarray

    @staticmethod
    def of(folder: Path, name: SplitName, index: Index, files: list[np.ndarray]) -> _Mapped:
        """The split of an index. files: token files that are read in place. Raises DamagedCorpus."""
        split = index.splits[name]
        if index.in_place:
            arrays, spans = files, _map_rows(folder, spans_name(name), split.spans, 3)
            outside = [
                not (0 <= file < len(files) and begin >= 0 and 0 < count <= len(files[file]) - begin)
                for file, begin, count in spans[:MOST_SPANS_CHECKED].tolist()
            ]
            if any(outside) or int(spans[:, 2].sum()) != split.tokens:
                raise DamagedCorpus(folder, f"{folder / spans_name(name)}: damaged (spans outside of their files)")
        else:
            arrays = [_map(folder, shard.file, shard.bytes, DTYPES[index.dtype]) for shard in split.shards]
            spans = np.array([(at, 0, len(array)) for at, array in enumerate(arrays)], END).reshape(-1, 3)
        ends = _map_rows(folder, ends_name(name), split.documents, 1)[:, 0]
        return _Mapped(arrays, spans, np.cumsum(spans[:, 2], dtype=np.int64), ends)

    def piece(self, number: int, start: int) -> np.ndarray:
        """A piece from the token on that is number ``start`` of the stream."""
        file, begin, count = self.spans[number].tolist()
        passed = start - (int(self.lasts[number]) - count)
        return self.arrays[file][begin + passed : begin + count]


def is_shard(name: str) -> bool:
    """Whether a file's name is one that shards have."""
    return _SHARD_NAME.fullmatch(name) is not None


def shard_name(split: str, number: int) -> str:
    """The file of a split's shard."""
    return f"{split}-{number:05d}.bin"


def ends_name(split: str) -> str:
    """The file that says where a split's documents end."""
    return f"{split}.ends"


def spans_name(split: str) -> str:
    """The file that says which parts of token files a split is."""
    return f"{split}.spans"


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
        if not index.in_place and split.tokens != sum(shard.tokens for shard in split.shards):
            raise ValueError(f"the split {name} has {split.tokens} tokens and its shards have others")
        if index.in_place and split.shards:
            raise ValueError("it has shards and token files")
    return index


def _check_shard(shard: TokenShard, file: str, dtype: str) -> None:
    """Raise ValueError for a shard of another name: whatever else an index names is not opened."""
    if shard.file != file:
        raise ValueError(f"shard {shown(shard.file)} stands where {file!r} belongs")
    tokens, size = shard.tokens, shard.bytes
    if tokens < 1 or size != tokens * DTYPES[dtype].itemsize:
        raise ValueError(f"shard {file!r} is described wrongly: {tokens} tokens of {dtype} in {size} bytes")


def _map_rows(folder: Path, file: str, rows: int, columns: int) -> np.ndarray:
    """A table of int64 as a read-only memory map [rows, columns]."""
    if not rows:
        return np.empty((0, columns), END)
    return _map(folder, file, rows * columns * END.itemsize, END).reshape(rows, columns)


def _map(folder: Path, file: str, size: int, dtype: np.dtype) -> np.ndarray:
    """A file of numbers as a read-only memory map, after its size was checked."""
    path = folder / file
    try:
        found = path.stat().st_size
        if found != size:
            raise DamagedCorpus(folder, f"{path}: has {found} bytes and the index says {size}")
        return np.memmap(path, dtype=dtype, mode="r")
    except FileNotFoundError:
        raise DamagedCorpus(folder, f"{path}: the file is missing, expected {size} bytes") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be mapped: {error.strerror}; check its permissions") from error
