"""Prepared corpora and the batches read from them.

A corpus folder holds ``index.json`` and, for each split, shards ``train-00000.bin``: one unbroken
little-endian stream
of token ids (uint16 or uint32) cut into files at any place. ``plait.train.data.prepare.prepare`` writes such
folders.

A stream of training sequences has no state. The split is cut into *windows* of ``sequence + 1`` tokens at a
stride of ``sequence`` (the last token of a window is only a target, and is the first input of the next). An
epoch is one pseudo-random order of all windows, and sequence number g of the stream is window ``order(g //
windows)[g % windows]``.
So a resume position is one integer, the number of sequences consumed, and stays exact when the batch size or
the
number of ranks changes. Windows cross document boundaries: end-of-text is a token like any other, and
attention is not cut at it. At most ``sequence`` tokens at the very end of a split fill no window and are
never read.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from plait.core.errors import DataError, JobError

if TYPE_CHECKING:
    import torch

SplitName = Literal["train", "eval"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
INDEX_FILE = "index.json"
FORMAT, VERSION = "plait corpus", 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ROUNDS = 8  # of the Feistel network below: even over four windows every order then comes equally often within 2 %


@dataclass(frozen=True, kw_only=True)
class Shard:
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
    shards: tuple[Shard, ...]

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

    def to_json(self) -> str:
        """The text of ``index.json``."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def read(path: Path) -> Index:
        """Parse and check ``index.json``; ``DataError`` says what is wrong with it."""
        try:
            raw = json.loads(path.read_bytes())
            if raw["format"] != FORMAT or not isinstance(raw["version"], int):
                raise ValueError(f"format is {raw['format']!r}, not {FORMAT!r}")
            if raw["version"] != VERSION:
                raise ValueError(f"version {raw['version']}, and this Plait reads version {VERSION}")
            return _index(raw)
        except FileNotFoundError as error:
            raise DataError(
                f"{path}: no such file, so {path.parent} is not a prepared corpus; prepare it first"
            ) from error
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"has no key {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{path}: not a usable corpus index ({what}); {_remedy(path.parent)}") from error


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
        return cls(folder, Index.read(folder / INDEX_FILE))

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

    def verify(self) -> None:
        """Read every shard and compare its checksum; ``DataError`` names the first damaged one."""
        for name, split in self.index.splits.items():
            for shard, array in zip(split.shards, self._maps[name], strict=True):
                crc = 0
                for begin in range(0, len(array), 1 << 22):
                    crc = zlib.crc32(array[begin : begin + (1 << 22)].tobytes(), crc)
                if crc != shard.crc32:
                    path = self.folder / shard.file
                    raise DataError(
                        f"{path}: damaged (checksum {crc:08x}, expected {shard.crc32:08x}); {_remedy(self.folder)}"
                    )


class Batches:
    """An endless stream of shuffled training sequences that is a pure function of the position.

    The same corpus, split, ``sequence`` (tokens) and ``seed`` give the same stream on any machine, whatever
    the batch size, the number of ranks and the shard size; ``identity`` names that stream, to be kept beside
    a position.

    ``batch`` is the global batch, in sequences. Raises ``JobError`` for a wrong setting and ``DataError``
    when the split is empty or shorter than one sequence.
    """

    def __init__(self, corpus: Corpus, split: SplitName, *, sequence: int, batch: int, seed: int = 0) -> None:
        if split not in SPLITS:
            raise JobError(f"{split!r} is not a split", key="split", fix=f"Choose one of {', '.join(SPLITS)}")
        for key, value in (("sequence", sequence), ("batch", batch)):
            if value < 1:
                raise JobError(f"must be at least 1, got {value}", key=key)
        self.corpus, self.sequence, self.batch, self.seed = corpus, sequence, batch, seed
        self.split: SplitName = split
        tokens = corpus.num_tokens(split)
        self.windows = (tokens - 1) // sequence
        """Sequences in one epoch."""
        if tokens == 0:
            raise DataError(
                f"{corpus.folder}: the {split} split is empty; prepare the corpus again with a larger eval_fraction"
            )
        if self.windows < 1:
            raise DataError(
                f"{corpus.folder}: the {split} split has {tokens} tokens and one sequence of {sequence} "
                f"needs {sequence + 1}; add text or lower the sequence length"
            )

    @cached_property
    def identity(self) -> str:
        """A hash of all that decides the stream; a position means nothing under another identity."""
        parts = (self.corpus.index.splits[self.split].digest, self.split, self.sequence, self.seed)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def epoch(self, consumed: int) -> float:
        """Epochs done after ``consumed`` sequences."""
        return consumed / self.windows

    def window_ids(self, start: int, count: int) -> np.ndarray:
        """The window that each of the sequences ``start .. start + count`` of the stream shows: int64
        [count]."""
        assert start >= 0, f"the stream begins at 0, not at {start}"
        epochs, places = np.divmod(np.arange(start, start + count, dtype=np.int64), self.windows)
        result = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            result[here] = _permute(places[here], self.windows, f"{self.seed}/{epoch}")
        return result

    def take(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences ``start .. start + count`` of the stream: tokens and targets, int64 [count, S] each."""
        return self._gather(self.window_ids(start, count))

    def batch_after(self, consumed: int, *, rank: int = 0, world: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """The part of data-parallel ``rank`` of ``world`` in the batch that follows ``consumed`` sequences:
        [B / world, S]."""
        first, count = self._share(rank, world)
        return self.take(consumed + first, count)

    def batch_at(self, step: int, *, rank: int = 0, world: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """``batch_after(step * batch)``: the batch of a run that has had this batch size from its first
        step."""
        return self.batch_after(step * self.batch, rank=rank, world=world)

    def sample_ids_after(self, consumed: int, *, rank: int = 0, world: int = 1) -> np.ndarray:
        """The number in the stream of each sequence of ``batch_after``: int64 [B / world]; never repeats
        within a run."""
        first, count = self._share(rank, world)
        return np.arange(count, dtype=np.int64) + (consumed + first)

    def sample_ids(self, step: int, *, rank: int = 0, world: int = 1) -> np.ndarray:
        """The number in the stream of each sequence of ``batch_at``: int64 [B / world]."""
        return self.sample_ids_after(step * self.batch, rank=rank, world=world)

    def eval_batches(self, n: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The first ``n`` batches of this split in its own order; every batch is full.

        Stops early rather than show a window twice; a split of less than one batch gives one batch that
        repeats windows.
        """
        first, count = self._share(rank, world)
        for number in range(min(n, max(1, self.windows // self.batch))):
            ids = np.arange(count, dtype=np.int64) + (number * self.batch + first)
            yield self._gather(ids % self.windows)

    def _share(self, rank: int, world: int) -> tuple[int, int]:
        """Where the contiguous part of ``rank`` begins in a batch, and its size."""
        assert 0 <= rank < world, f"rank {rank} outside 0..{world - 1}"
        if self.batch % world:
            raise JobError(
                f"{self.batch} sequences do not divide over {world} ranks",
                key="batch",
                fix=f"Use a multiple of {world}",
            )
        return rank * (self.batch // world), self.batch // world

    def _gather(self, window_ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        import torch  # here, so that preparing a corpus starts without the seconds this import takes

        rows = np.empty((len(window_ids), self.sequence + 1), np.int64)
        for row, window in zip(rows, window_ids, strict=True):
            row[:] = self.corpus.read(self.split, int(window) * self.sequence, self.sequence + 1)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def _permute(places: np.ndarray, size: int, key: str) -> np.ndarray:
    """Where the permutation of ``range(size)`` named by ``key`` sends ``places``: int64, same shape [n].

    A Feistel network on the smallest even number of bits that holds ``size``, walked until the value falls
    back inside (fewer than four walks on average). It needs no memory for any size, and unlike
    ``numpy.random`` its result is ours
    to keep: an upgrade of a library cannot change where a resumed run continues.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest(), "<u8")

    def walk(values: np.ndarray) -> np.ndarray:
        left, right = values >> half, values & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_mix(right + keys[number]) & mask)
        return (left << half) | right

    result = walk(places.astype(np.uint64))
    while (outside := result >= np.uint64(size)).any():
        result[outside] = walk(result[outside])
    return result.astype(np.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit changes every output bit with probability one half."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _remedy(folder: Path) -> str:
    return f"delete the folder {folder} and prepare the corpus again"


def _index(raw: dict[str, Any]) -> Index:
    """An ``Index`` from parsed JSON; ``ValueError``, ``KeyError`` or ``TypeError`` when it is not one."""
    if raw["dtype"] not in DTYPES:
        raise ValueError(f"dtype {raw['dtype']!r} is not one of {', '.join(DTYPES)}")
    splits: dict[str, Split] = {}
    for name in SPLITS:
        shards = tuple(Shard(**shard) for shard in raw["splits"][name]["shards"])
        for shard in shards:
            if (
                shard.tokens < 1
                or shard.bytes != shard.tokens * DTYPES[raw["dtype"]].itemsize
                or Path(shard.file).name != shard.file
            ):
                raise ValueError(f"shard {shard.file!r} is described wrongly")
        splits[name] = Split(
            documents=int(raw["splits"][name]["documents"]), digest=raw["splits"][name]["digest"], shards=shards
        )
    rest = {key: raw[key] for key in ("dtype", "vocab", "end_of_text", "tokenizer", "source")}
    return Index(**rest, splits=splits)


def _map_shard(folder: Path, shard: Shard, index: Index) -> np.ndarray:
    """The shard as a read-only memory map [tokens], after its size was checked."""
    path = folder / shard.file
    try:
        found = path.stat().st_size
        if found != shard.bytes:
            raise DataError(f"{path}: has {found} bytes and the index says {shard.bytes}; {_remedy(folder)}")
        return np.memmap(path, dtype=DTYPES[index.dtype], mode="r")
    except FileNotFoundError as error:
        raise DataError(f"{path}: the shard is missing, expected {shard.bytes} bytes; {_remedy(folder)}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be mapped: {error.strerror}; check its permissions") from error
