"""Writing a corpus: the token stream of each split in shards, where documents end, and how far it has come.

What was written is kept when a preparation is killed. ``Draft.keep`` says now and then, after an fsync, how
many tokens and documents of each split there are; a preparation that goes on cuts files back to that and
reads them once, since checksums and the stream's digest are of all their bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from plait.core.base.codec.data import decode
from plait.core.base.codec.json_text import read_json
from plait.core.base.errors import JobError
from plait.core.base.files import replacing
from plait.train.data.corpus import (
    DTYPES,
    END,
    INDEX_FILE,
    LARGEST_INDEX,
    READ,
    SPLITS,
    Size,
    Split,
    SplitName,
    TokenShard,
    ends_name,
    shard_name,
)

PROGRESS_FILE = "progress.json"
KEEP_EVERY = 5.0
"""Seconds of work that a kill may cost."""


class SplitWriter:
    """The token stream of one split, in shards of ``shard_tokens``, the last one shorter."""

    def __init__(self, folder: Path, name: SplitName, dtype: np.dtype, shard_tokens: int) -> None:
        self.folder, self.name, self.dtype, self.shard_tokens = folder, name, dtype, shard_tokens
        self.tokens = self.documents = 0
        self._shards: list[TokenShard] = []
        self._digest = hashlib.sha256(str(dtype.itemsize).encode())
        self._file: FileIO | None = None
        self._ends: FileIO | None = None
        self._filled = self._crc = self._ends_crc = 0

    def add(self, ids: np.ndarray, ends: Sequence[int] = ()) -> None:
        """Append ``ids`` [tokens] to the stream. ends: where in them documents end, each behind its last."""
        if ends:
            places = (np.asarray(ends, END) + self.tokens).tobytes()
            if self._ends is None:
                self._ends = FileIO(self.folder / ends_name(self.name), "ab")
            _write(self._ends, places)
            self._ends_crc, self.documents = zlib.crc32(places, self._ends_crc), self.documents + len(ends)
        ids = ids.astype(self.dtype)
        while len(ids):
            if self._file is None:
                # Unbuffered: a write to a full disk fails here, and not later in close().
                self._file = FileIO(self.folder / shard_name(self.name, len(self._shards)), "ab")
            piece, ids = np.split(ids, [self.shard_tokens - self._filled])
            data = piece.tobytes()
            _write(self._file, data)
            self._count(data)
            if self._filled == self.shard_tokens:
                self._end_shard()

    def sync(self) -> None:
        """Have the disk keep what was written."""
        for file in (self._file, self._ends):
            if file:
                os.fsync(file.fileno())

    def resume(self, tokens: int, documents: int) -> None:
        """Go on behind the first ``tokens`` and ``documents`` of what an earlier preparation wrote. Raises
        OSError where that is not there."""
        for number in range(-(-tokens // self.shard_tokens)):
            path = self.folder / shard_name(self.name, number)
            size = min(tokens - self.tokens, self.shard_tokens) * self.dtype.itemsize
            _cut_back(path, size)
            self._file = FileIO(path, "ab")
            with open(path, "rb") as written:
                while data := written.read(READ):
                    self._count(data)
            if self._filled == self.shard_tokens:
                self._end_shard()
        if documents:
            path = self.folder / ends_name(self.name)
            _cut_back(path, documents * END.itemsize)
            self._ends_crc, self.documents = zlib.crc32(path.read_bytes()), documents

    def finish(self) -> Split:
        """End the last shard and describe the split."""
        self.sync()
        if self._file:
            self._end_shard()
        self.close()
        return Split(
            tokens=self.tokens,
            documents=self.documents,
            ends_crc32=self._ends_crc,
            digest=self._digest.hexdigest()[:32],
            shards=tuple(self._shards),
        )

    def close(self) -> None:
        """Let go of files that were not ended; harmless after ``finish``."""
        for file in (self._file, self._ends):
            if file:
                file.close()
        self._file = self._ends = None

    def _count(self, data: bytes) -> None:
        count = len(data) // self.dtype.itemsize
        self._digest.update(data)
        self._crc = zlib.crc32(data, self._crc)
        self._filled, self.tokens = self._filled + count, self.tokens + count

    def _end_shard(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
        file = Path(os.fsdecode(self._file.name)).name
        self._shards.append(
            TokenShard(file=file, tokens=self._filled, bytes=self._filled * self.dtype.itemsize, crc32=self._crc)
        )
        self._file.close()
        self._file = None
        self._filled = self._crc = 0


@dataclass(frozen=True, kw_only=True)
class Kept:
    """How far a preparation has come. groups: of texts that are in the files. last: the split of a text that
    has not ended yet."""

    groups: Size = 0
    last: SplitName | None = None
    tokens: dict[SplitName, Size]
    documents: dict[SplitName, Size]


class Draft:
    """A corpus that is being written in ``folder``: the writers of both splits. kept: where an earlier
    preparation was ended, if it goes on from there."""

    def __init__(self, folder: Path, dtype: str, shard_tokens: int) -> None:
        self.folder, self.dtype, self.shard_tokens = folder, dtype, shard_tokens
        self.writers = self._writers()
        self.kept: Kept | None = None
        self._kept_at = time.monotonic()

    def _writers(self) -> dict[SplitName, SplitWriter]:
        return {name: SplitWriter(self.folder, name, DTYPES[self.dtype], self.shard_tokens) for name in SPLITS}

    @property
    def tokens(self) -> int:
        """Of both splits."""
        return sum(writer.tokens for writer in self.writers.values())

    @property
    def is_kept(self) -> bool:
        """Whether a later preparation can go on from here."""
        return (self.folder / PROGRESS_FILE).exists()

    def begin(self) -> None:
        """Go on where an earlier preparation was ended; anew where nothing of one is there, or nothing that
        holds."""
        try:
            kept = decode(Kept, read_json(self.folder / PROGRESS_FILE, LARGEST_INDEX))
            for name, writer in self.writers.items():
                writer.resume(kept.tokens[name], kept.documents[name])
            self.kept = kept
        except (OSError, ValueError, JobError, KeyError):
            self.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            self.writers = self._writers()

    def keep(self, *, groups: int, last: SplitName | None) -> None:
        """Keep what was written, if some seconds have passed since the last time."""
        if time.monotonic() - self._kept_at < KEEP_EVERY:
            return
        for writer in self.writers.values():
            writer.sync()
        values: dict[str, Any] = {"groups": groups, "last": last}
        for what in ("tokens", "documents"):
            values[what] = {name: getattr(writer, what) for name, writer in self.writers.items()}
        with replacing(self.folder / PROGRESS_FILE) as path:
            path.write_text(json.dumps(values))
        self._kept_at = time.monotonic()

    def end(self, index: str) -> None:
        """Write the index beside what was finished."""
        with open(self.folder / INDEX_FILE, "wb") as file:
            file.write(index.encode())
            file.flush()
            os.fsync(file.fileno())
        (self.folder / PROGRESS_FILE).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of all files."""
        for writer in self.writers.values():
            writer.close()


def _write(file: FileIO, content: bytes) -> None:
    data = memoryview(content)
    while data:
        data = data[file.write(data) :]


def _cut_back(path: Path, size: int) -> None:
    """Cut what was written after the last time that it was kept."""
    if path.stat().st_size < size:
        raise OSError(f"{path} is shorter than it was")
    os.truncate(path, size)
