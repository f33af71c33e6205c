"""Read prepared corpora on disk: their index and shards; verify their integrity.

A corpus folder holds, for each split,

| file | content |
|---|---|
| ``train-00000.bin``, ... | one unbroken stream of token ids (uint16 or uint32), cut anywhere |
| ``train.ends`` | document ends in the stream: int64, rising, each the position after an end-of-text |
| ``train.spans`` | instead of shards, for token files of other programs: int64 [n, 3], file, begin, count |
| ``index.json`` | of both splits: sizes, checksums, what the corpus was made from |

``plait.train.data.prepare.prepare`` writes it and ``plait.train.data.sequences.Batches`` reads it.

At every start, corpora of up to ``EVERY_START`` bytes are read completely, and their checksums
compared: one to two seconds, longer on a slow disk. A larger corpus is read once, when first
opened. ``verified.json`` beside the index then stores size, modification time and inode of each
intact file, and only a file that differs in these is read again. To find silent corruption of a
large corpus by a disk, delete ``verified.json``.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import numpy as np
from annotated_types import Ge, Lt

from plait.core.base.codec.data import decode
from plait.core.base.codec.json_text import read_json, read_table
from plait.core.base.errors import DataError, JobError
from plait.core.base.files import replacing
from plait.core.base.numbers import shown

SplitName = Literal["train", "eval"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
INDEX_FILE, VERIFIED_FILE = "index.json", "verified.json"
EVERY_START = 1 << 30
FORMAT, VERSION = "plait corpus", 2
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
LARGEST_INDEX = 64 << 20  # bytes; a shard takes 120, so an index has room for half a million
MOST_SPANS_CHECKED = 1 << 20
READ = 4 << 20  # bytes that are read and checksummed at once
END = np.dtype("<i8")
"""Dtype of a document's end."""
Size = Annotated[int, Ge(0), Lt(1 << 62)]
Checksum = Annotated[int, Ge(0), Lt(1 << 32)]
_SHARD_NAME = re.compile(rf"({'|'.join(SPLITS)})-\d{{5,}}\.bin")


class DamagedCorpus(DataError):
    """A corpus whose files do not match its index. ``what``: the damage; the message adds the
    remedy."""

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
    """A token file of another program, read in place. dtype: NumPy's name of it. offset: of the
    first token, in bytes."""

    path: str
    dtype: str
    offset: Size
    tokens: Size
    bytes: Size
    mtime_ns: int

    def mapped(self) -> np.ndarray:
        """Return the tokens as a read-only memory map [tokens]. Raises DataError for a file that
        has changed."""
        try:
            status = os.stat(self.path)
            if (status.st_size, status.st_mtime_ns) != (self.bytes, self.mtime_ns):
                raise DataError(f"{self.path}: has changed since the corpus was prepared; prepare it again")
            if not self.tokens:
                return np.empty(0, self.dtype)
            return np.memmap(self.path, self.dtype, "r", self.offset, (self.tokens,))
        except OSError as error:
            raise DataError(f"{self.path}: cannot be mapped: {error.strerror or error}; restore it") from None


@dataclass(frozen=True, kw_only=True)
class Split:
    """The shards of one split, in order. digest: a hash of the token stream, however it is cut into
    shards. documents: the number of documents that end in the split. ends_crc32: checksum of the
    file of document ends. spans: of token files, instead of shards."""

    tokens: Size
    documents: Size
    ends_crc32: Checksum
    digest: str
    shards: tuple[TokenShard, ...] = ()
    spans: Size = 0
    spans_crc32: Checksum = 0


@dataclass(frozen=True, kw_only=True)
class Index:
    """The content of ``index.json``. tokenizer, source: fingerprints of what the corpus was made
    from."""

    dtype: Literal["uint16", "uint32"]
    vocab: Size
    end_of_text: Size
    tokenizer: str
    source: str
    splits: dict[SplitName, Split]
    in_place: tuple[TokenFile, ...] = ()
    tokenizer_file: str = ""
    """Path of the tokenizer's file; empty for bytes."""

    @property
    def shards(self) -> tuple[TokenShard, ...]:
        """Shards (files of token ids) of all splits."""
        return tuple(shard for split in self.splits.values() for shard in split.shards)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all data files."""
        spans = map(spans_name, self.splits) if self.in_place else ()
        return (*(shard.file for shard in self.shards), *map(ends_name, self.splits), *spans)

    def to_json(self) -> str:
        """Return the text of ``index.json``."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def read(path: Path) -> Index:
        """Parse and check ``index.json``. Raises DamagedCorpus for an invalid index, DataError for
        one that is missing or of another version."""
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
    """A prepared corpus, memory-mapped; create it with ``Corpus.open`` or
    ``plait.train.data.prepare.prepare``."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        files = [file.mapped() for file in index.in_place]
        self._splits = {name: _Mapped.of(folder, name, index, files) for name in index.splits}

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Map the shards of ``folder`` after checking that each exists with the size in the index.

        Contents are not read (see ``verify``). Raises DataError naming the file, the problem and
        the remedy.
        """
        folder = Path(folder)
        index = Index.read(folder / INDEX_FILE)
        corpus = cls(folder, index)
        known = {shard.file for shard in index.shards}
        extra = sorted(path.name for path in folder.iterdir() if is_shard(path.name) and path.name not in known)
        if extra:
            raise DamagedCorpus(folder, f"{folder / extra[0]}: a shard that the index does not list")
        return corpus

    def num_tokens(self, split: SplitName) -> int:
        """Return the number of tokens in one split."""
        return self.index.splits[split].tokens

    def read(self, split: SplitName, start: int, count: int) -> np.ndarray:
        """Return tokens ``start .. start + count`` of the split's stream, across shards: int64
        [count], a copy."""
        assert 0 <= start <= start + count <= self.num_tokens(split), f"{start}+{count} outside {split}"
        result, mapped = np.empty(count, np.int64), self._splits[split]
        number, done = int(np.searchsorted(mapped.lasts, start, side="right")), 0
        while done < count:
            piece = mapped.piece(number, start + done)[: count - done]
            result[done : done + len(piece)] = piece
            done, number = done + len(piece), number + 1
        return result

    def ends(self, split: SplitName, start: int, count: int) -> np.ndarray:
        """Return the document ends in ``read(split, start, count)``: int64 [n], rising, each in
        1..count, the position after a document's last token (its end-of-text). A document that
        continues beyond has none."""
        ends = self._splits[split].ends
        first, last = np.searchsorted(ends, [start, start + count], side="right")
        return ends[first:last].astype(np.int64) - start

    def verify(self, files: Collection[str] | None = None) -> None:
        """Read files (those named; None: all) and compare their checksums. Raises DamagedCorpus for
        the first bad file."""
        for name, split in self.index.splits.items():
            mapped = self._splits[name]
            wanted = [(one.file, array, one.crc32) for one, array in zip(split.shards, mapped.arrays, strict=False)]
            wanted += [(ends_name(name), mapped.ends, split.ends_crc32)]
            wanted += [(spans_name(name), mapped.spans.reshape(-1), split.spans_crc32)] if self.index.in_place else []
            for file, array, expected in wanted:
                if files is None or file in files:
                    self._verify(file, array, expected, split.tokens)

    def _verify(self, file: str, array: np.ndarray, expected: int, tokens: int) -> None:
        crc, highest, last, rises = 0, 0, 0, True
        for begin in range(0, len(array), READ // array.itemsize):
            part = array[begin : begin + READ // array.itemsize]
            crc, highest = zlib.crc32(part.data, crc), max(highest, int(part.max()))
            rises = rises and part[0] > last and bool((np.diff(part) > 0).all()) if file.endswith(".ends") else True
            last = int(part[-1])
        problem = ""
        if not rises or (file.endswith(".ends") and highest > tokens):
            problem = "damaged (document ends out of order, or beyond its tokens)"
        elif crc != expected:
            problem = f"damaged (checksum {crc:08x}, expected {expected:08x})"
        elif is_shard(file) and highest >= self.index.vocab:
            problem = f"has token {highest} and the vocabulary ends at {self.index.vocab - 1}"
        if problem:
            raise DamagedCorpus(self.folder, f"{self.folder / file}: {problem}")

    def verify_changed(self) -> None:
        """Verify the files that need it at a start. Raises DamagedCorpus for the first bad file."""
        if not self.is_large:
            self.verify()
            return
        try:
            known: dict[str, object] = read_table(self.folder / VERIFIED_FILE, LARGEST_INDEX)
        except (OSError, ValueError):  # missing or damaged: verify everything
            known = {}
        stamps = self._stamps()
        if changed := {name for name, stamp in stamps.items() if known.get(name) != stamp}:
            self.verify(changed)
            self.remember(stamps)

    @property
    def is_large(self) -> bool:
        """True if a start does not read the whole corpus."""
        return sum(shard.bytes for shard in self.index.shards) > EVERY_START

    def remember(self, stamps: dict[str, list[int]] | None = None) -> None:
        """Record every file as intact in its present state. Write errors are ignored: they only
        make the next start slower."""
        with suppress(OSError), replacing(self.folder / VERIFIED_FILE) as path:
            path.write_text(json.dumps(stamps or self._stamps(), indent=1) + "\n")

    def _stamps(self) -> dict[str, list[int]]:
        """Return size, modification time in ns and inode of each existing file."""
        found = {file: (self.folder / file).stat() for file in self.index.files if (self.folder / file).exists()}
        return {file: [status.st_size, status.st_mtime_ns, status.st_ino] for file, status in found.items()}


@dataclass(frozen=True)
class _Mapped:
    """A split in memory maps. Piece k is ``count`` tokens from ``begin`` of an array: a shard, or a
    span of a token file. lasts: tokens of the stream up to the end of each piece. spans: int64
    [pieces, 3], array, begin, count."""

    arrays: list[np.ndarray]
    spans: np.ndarray
    lasts: np.ndarray
    ends: np.ndarray

    @staticmethod
    def of(folder: Path, name: SplitName, index: Index, files: list[np.ndarray]) -> _Mapped:
        """Map a split of an index. files: token files that are read in place. Raises
        DamagedCorpus."""
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
        """Return the rest of a piece, from the token at position ``start`` of the stream on."""
        file, begin, count = self.spans[number].tolist()
        passed = start - (int(self.lasts[number]) - count)
        return self.arrays[file][begin + passed : begin + count]


def is_shard(name: str) -> bool:
    """Return True for the name of a shard."""
    return _SHARD_NAME.fullmatch(name) is not None


def shard_name(split: str, number: int) -> str:
    """Return the file name of a split's shard."""
    return f"{split}-{number:05d}.bin"


def ends_name(split: str) -> str:
    """Return the name of the file with a split's document ends."""
    return f"{split}.ends"


def spans_name(split: str) -> str:
    """Return the name of the file with a split's spans of token files."""
    return f"{split}.spans"


def _remedy(folder: Path) -> str:
    return f"delete the folder {folder} and prepare the corpus again"


def _index(path: Path, raw: Any) -> Index:
    """Return an ``Index`` from parsed JSON. Raises ValueError or JobError for an invalid index,
    DataError for another version."""
    values = cast("dict[str, Any]", raw if isinstance(raw, dict) else {})
    if (found := values.pop("format", None)) != FORMAT:
        raise ValueError(f"format is {shown(found)}, not {FORMAT!r}")
    if (found := values.pop("version", None)) != VERSION:
        known = f"this Plait reads version {VERSION}"
        raise DataError(f"{path}: version {shown(found)}, and {known}; {_remedy(path.parent)}")
    index = decode(Index, values, ignore_unknown=True)
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
    """Raise ValueError for a shard with another name than ``file`` or a wrong size: only such names
    are ever opened."""
    if shard.file != file:
        raise ValueError(f"shard {shown(shard.file)} stands where {file!r} belongs")
    tokens, size = shard.tokens, shard.bytes
    if tokens < 1 or size != tokens * DTYPES[dtype].itemsize:
        raise ValueError(f"shard {file!r} is described wrongly: {tokens} tokens of {dtype} in {size} bytes")


def _map_rows(folder: Path, file: str, rows: int, columns: int) -> np.ndarray:
    """Return a table of int64 as a read-only memory map [rows, columns]."""
    if not rows:
        return np.empty((0, columns), END)
    return _map(folder, file, rows * columns * END.itemsize, END).reshape(rows, columns)


def _map(folder: Path, file: str, size: int, dtype: np.dtype) -> np.ndarray:
    """Return a file of numbers as a read-only memory map, after checking its size."""
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
