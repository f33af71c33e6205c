"""Write a corpus: the token stream of each split in shards, the document ends, and the progress.

The output of a killed preparation is kept. ``Draft.keep`` records from time to time, after an
fsync, how many tokens and documents of each split are on disk. A preparation that resumes truncates
files to that and reads them once, since checksums and the stream's digest cover all their bytes.

Texts are encoded ahead of the writer. ``tokenizers`` encodes a list of texts on all cores and
releases Python's lock meanwhile; so a thread that reads the next list while two others wait for
theirs keeps every core busy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from plait.core.base.codec.data import decode
from plait.core.base.codec.json_text import read_json
from plait.core.base.errors import JobError
from plait.core.base.files import replacing, write_synced
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
from plait.train.data.documents import Text
from plait.train.data.tokenizer import Tokenizer

PROGRESS_FILE = "progress.json"
KEEP_EVERY = 5.0
"""Seconds between two records of the progress: the work that a kill may cost."""


class SplitWriter:
    """A writer of one split's token stream, in shards of ``shard_tokens``, the last one shorter."""

    def __init__(self, folder: Path, name: SplitName, dtype: np.dtype, shard_tokens: int) -> None:
        self.folder, self.name, self.dtype, self.shard_tokens = folder, name, dtype, shard_tokens
        self.tokens = self.documents = 0
        self._shards: list[TokenShard] = []
        self._digest = hashlib.sha256(str(dtype.itemsize).encode())
        self._file: FileIO | None = None
        self._ends: FileIO | None = None
        self._filled = self._crc = self._ends_crc = 0

    def add(self, ids: np.ndarray, ends: Sequence[int] = ()) -> None:
        """Append ``ids`` [tokens] to the stream. ends: document ends in them, each the position
        after a document's last token."""
        if ends:
            encoded = (np.asarray(ends, END) + self.tokens).tobytes()
            if self._ends is None:
                self._ends = FileIO(self.folder / ends_name(self.name), "ab")
            _write(self._ends, encoded)
            self._ends_crc, self.documents = zlib.crc32(encoded, self._ends_crc), self.documents + len(ends)
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
        """Flush everything written to the disk."""
        for file in (self._file, self._ends):
            if file:
                os.fsync(file.fileno())

    def resume(self, tokens: int, documents: int) -> None:
        """Continue after the first ``tokens`` and ``documents`` that an earlier preparation wrote.
        Raises OSError if they do not exist."""
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
        """Close unfinished files; harmless after ``finish``."""
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
    """Progress of a preparation, as recorded in its folder. groups: number of groups of texts that
    are in the files. last: the split of a text that has not ended yet."""

    groups: Size = 0
    last: SplitName | None = None
    tokens: dict[SplitName, Size]
    documents: dict[SplitName, Size]


class Draft:
    """A corpus that is being written in ``folder``: the writers of both splits. kept: the progress
    of an earlier preparation, if this one resumes from it."""

    def __init__(self, folder: Path, dtype: str, shard_tokens: int) -> None:
        self.folder, self.dtype, self.shard_tokens = folder, dtype, shard_tokens
        self.writers = self._writers()
        self.kept: Kept | None = None
        self._kept_at = time.monotonic()

    def _writers(self) -> dict[SplitName, SplitWriter]:
        return {name: SplitWriter(self.folder, name, DTYPES[self.dtype], self.shard_tokens) for name in SPLITS}

    @property
    def tokens(self) -> int:
        """Tokens of both splits."""
        return sum(writer.tokens for writer in self.writers.values())

    @property
    def is_kept(self) -> bool:
        """True if a later preparation can resume from here."""
        return (self.folder / PROGRESS_FILE).exists()

    def begin(self) -> None:
        """Resume an earlier preparation; start anew if nothing usable of it exists."""
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
        """Record the progress, if ``KEEP_EVERY`` seconds have passed since the last time."""
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
        """Write the index of the finished corpus."""
        write_synced(self.folder / INDEX_FILE, [index.encode()])
        (self.folder / PROGRESS_FILE).unlink(missing_ok=True)

    def close(self) -> None:
        """Close all files."""
        for writer in self.writers.values():
            writer.close()


def _write(file: FileIO, content: bytes) -> None:
    data = memoryview(content)
    while data:
        data = data[file.write(data) :]


def _cut_back(path: Path, size: int) -> None:
    """Truncate a file to its last recorded size. Raises OSError if it is shorter."""
    if path.stat().st_size < size:
        raise OSError(f"{path} is shorter than it was")
    os.truncate(path, size)


# ---- encoding ----


AHEAD = 4 << 20
"""Bytes of text that are encoded at the same time, at most, unless one text is longer: 120 bytes of
memory each."""
THREADS = 3

Encoded = tuple[list[Text], list[np.ndarray]]


def encode_ahead(groups: Iterator[list[Text]], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Yield each group with the ids of its texts, int64 [tokens] each, in order."""
    waiting, size = deque[tuple[list[Text], int, Future[list[np.ndarray]]]](), 0
    pool = ThreadPoolExecutor(THREADS, "encode")
    try:
        for group in groups:
            length = sum(len(text.text) for text in group)
            while waiting and (size + length > AHEAD or len(waiting) >= THREADS):
                texts, done, future = waiting.popleft()
                yield texts, future.result()
                size -= done
            waiting.append((group, length, pool.submit(tokenizer.encode_many, [text.text for text in group])))
            size += length
        for texts, _, future in waiting:
            yield texts, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
