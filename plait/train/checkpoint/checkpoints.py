"""Checkpoints from which a run resumes exactly, under the same tensor-parallel degree or another.

Tensors are stored by logical piece (``weights/layers.0.attn.q.weight``) through torch.distributed.checkpoint:
a
rank says which range of which whole tensor it holds, ranges held by several ranks are written once, and a
rank that
loads reads the ranges it needs, whoever wrote them. ``save`` copies to host memory and returns; a thread
writes, over
a process group of its own so that its collectives never mix with training's.
"""

from __future__ import annotations

import errno
import json
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from plait.core.errors import CheckpointError
from plait.train.checkpoint.folder import CheckpointFolder, measure
from plait.train.model.units import Held

Tensors = Mapping[str, Mapping[str, Tensor]]
"""What is saved and loaded: kind (``weights``, ``exp_avg``, ...) -> name -> tensor that holds what is said of
that name."""
Ranges = dict[tuple[str, tuple[int, ...]], tuple[Held, Tensor]]

_CONTAINER = (
    1500  # bytes around a stored tensor, and its entry in the metadata: for the estimate of what must fit on the disk
)
_COPY = "#copy"
_Result = TypeVar("_Result")


class Checkpoints:
    """The checkpoints of one run, written in the background. Every method is called by all ranks of
    ``group``.

    held: what the tensors to save hold, by their names: ``Optimizer.held``, or ``held_of`` of a model's
    pieces. keep: how many complete checkpoints stay on disk. group: a gloo group of all ranks, used for
    nothing else; None for a single process. read_only: leave the folder as it is, so that a running job can
    be looked at; otherwise what a crash left in it is removed here and now. Raises CheckpointError if the
    folder cannot be used.

        checkpoints = Checkpoints(folder, held_of(model.pieces))
        checkpoints.save(100, {"weights": model.named}, {"sequences": 3200})
        checkpoints.finish()
        state = checkpoints.load(checkpoints.latest(), {"weights": model.named})
    """

    def __init__(
        self,
        folder: Path,
        held: Mapping[str, Sequence[Held]],
        *,
        keep: int = 2,
        group: dist.ProcessGroup | None = None,
        read_only: bool = False,
    ) -> None:
        assert keep >= 1, f"keep = {keep} leaves nothing to resume from"
        self._read_only = read_only
        self._folder, self._keep, self._peers = CheckpointFolder(folder), keep, _Peers(group)
        self._held = held
        self._staged: dict[tuple[str, str], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        if not read_only:
            with _explained(f"{folder}: cannot hold checkpoints"):
                self._peers.lead(self._folder.open)

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written right now."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any], *, wait: bool = False) -> None:
        """Copy ``tensors`` to host memory and start writing them, with ``state`` (rank 0's, plain JSON
        values).

        The tensors may be changed as soon as this returns. wait: finish before returning. Raises
        CheckpointError on
        every rank if this checkpoint could not be completed (wait), or the one before it (otherwise); in that
        case
        this one is being written all the same.
        """
        assert not self._read_only, "opened to read only"
        snapshot = json.loads(json.dumps(dict(state)))
        before = self._join()
        held = self._stage(tensors)
        for kind, name, staged in held:
            staged.copy_(tensors[kind][name])
        self._thread = threading.Thread(
            target=self._write, args=(step, self._ranges(held), snapshot), name="checkpoint", daemon=True
        )
        self._thread.start()
        if wait:
            self.finish()
        elif before is not None:
            raise before

    def finish(self) -> None:
        """Wait for the checkpoint being written. Raises CheckpointError, on every rank, if it could not be
        completed.

        Training may go on after that: the checkpoints before it are untouched and the next ``save`` tries
        anew.
        """
        failure = self._join()
        if failure is not None:
            raise failure

    def latest(self) -> int | None:
        """Step of the newest checkpoint whose files are all there in their right size, None without any."""
        self.finish()
        with _explained(f"{self._folder.root}: cannot be read"):
            return self._peers.lead(lambda: next((manifest.step for manifest in self._folder.complete()), None))

    def load(self, step: int, tensors: Tensors) -> dict[str, Any]:
        """Fill ``tensors`` in place from the checkpoint of ``step``, and return its state.

        Raises CheckpointError, on every rank and with ``tensors`` untouched, for a missing or damaged file
        (checksums
        are compared first) and for a tensor that is missing or of another shape or dtype. Kinds that the
        checkpoint
        has and ``tensors`` has not are left alone.
        """
        self.finish()
        peers, path, held = self._peers, self._folder.path(step), self._stage(tensors)
        with _explained(f"{path}: cannot be read"):
            manifest = peers.lead(lambda: self._folder.read(step))
            names = sorted(manifest.files)[peers.rank :: peers.size]
            peers.agree(lambda: self._folder.verify(manifest, names))
            reader, planner = FileSystemReader(path), _LoadPlanner(path, self._ranges(held))
            with _quiet(alone=peers.size == 1):
                load_distributed(
                    {}, storage_reader=reader, planner=planner, process_group=peers.group, no_dist=peers.size == 1
                )
        with torch.no_grad():
            for kind, name, staged in held:
                for one in self._held[name]:  # one by one: padding belongs to no checkpoint
                    one.of(tensors[kind][name]).copy_(one.of(staged))
        return manifest.state

    # ---- inside ----

    def _join(self) -> BaseException | None:
        """Wait for the checkpoint being written; what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
        failure, self._thread, self._failure = self._failure, None, None
        return failure

    def _stage(self, tensors: Tensors) -> list[tuple[str, str, Tensor]]:
        """A host buffer for every tensor, kept from one checkpoint to the next: fresh (or pinned) memory is
        slow to get."""
        held: list[tuple[str, str, Tensor]] = []
        for kind, by_name in tensors.items():
            for name, tensor in by_name.items():
                staged = self._staged.get((kind, name))
                if staged is None or staged.shape != tensor.shape or staged.dtype != tensor.dtype:
                    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
                    self._staged[kind, name] = staged
                held.append((kind, name, staged.detach()))
        return held

    def _ranges(self, held: list[tuple[str, str, Tensor]]) -> Ranges:
        """``kind/piece name`` and corner -> what is held there, in the host buffer; what another stage saves
        has a name that says so."""
        return {
            (f"{kind}/{one.piece.name}{_COPY * one.piece.copy}", one.box.start): (one, one.of(staged))
            for kind, name, staged in held
            for one in self._held[name]
        }

    def _write(self, step: int, ranges: Ranges, state: dict[str, Any]) -> None:
        """The background thread: all ranks write, each vouches for its files, rank 0 gives the folder its
        final name."""
        whole = {
            key: math.prod(one.piece.shape) * tensor.element_size() + _CONTAINER
            for (key, _), (one, tensor) in ranges.items()
        }
        needed = sum(whole.values())
        try:
            with _explained(
                f"{self._folder.partial(step)}: cannot be written", lambda: self._folder.full(step, needed)
            ):
                try:
                    self._write_files(step, needed, ranges, state)
                except BaseException:
                    if self._peers.rank == 0:
                        self._folder.abandon(step)  # before the error counts the bytes that are free
                    raise
        except BaseException as error:  # noqa: BLE001  (finish raises it where somebody listens)
            self._failure = error

    def _write_files(self, step: int, needed: int, ranges: Ranges, state: dict[str, Any]) -> None:
        peers, folder, partial = self._peers, self._folder, self._folder.partial(step)
        peers.lead(lambda: folder.begin(step, needed))
        writer, planner = FileSystemWriter(partial), _SavePlanner(ranges)
        with _quiet(alone=peers.size == 1):
            save_distributed(
                {}, storage_writer=writer, planner=planner, process_group=peers.group, no_dist=peers.size == 1
            )
        mine = [f"__{peers.rank}_0.distcp", *([".metadata"] if peers.rank == 0 else [])]
        parts = peers.agree(lambda: {name: measure(partial / name) for name in mine})
        files = {name: entry for part in parts for name, entry in part.items()}
        peers.lead(lambda: folder.commit(step, files, state, self._keep))


class _SavePlanner(DefaultSavePlanner):
    """Tells torch.distributed.checkpoint which range of which whole tensor this rank can write."""

    def __init__(self, ranges: Ranges) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._ranges = ranges

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for (key, _), (one, tensor) in self._ranges.items():
            if tensor.numel() and not one.piece.copy:
                chunk = _chunk(one)
                data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), torch.Size(one.piece.shape))
                items.append(WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._ranges[index.fqn, tuple(index.offset or ())][1]


class _LoadPlanner(DefaultLoadPlanner):
    """Asks for the ranges this rank holds; torch.distributed.checkpoint finds out which stored ranges they
    overlap."""

    def __init__(self, path: Path, ranges: Ranges) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._path, self._ranges = path, ranges

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        items: list[Any] = []
        for (wanted, _), (one, tensor) in self._ranges.items():
            key = wanted.removesuffix(_COPY)
            entry = stored.get(key)
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(
                    f"{self._path}: holds no '{key}'. It was saved by another model, or with less than is asked for"
                )
            if tuple(entry.size) != one.piece.shape or entry.properties.dtype != tensor.dtype:
                found, expected = (
                    f"{list(entry.size)} of {entry.properties.dtype}",
                    f"{list(one.piece.shape)} of {tensor.dtype}",
                )
                raise CheckpointError(f"{self._path}: '{key}' is {found}, expected {expected}")
            if tensor.numel():
                reads = create_read_items_for_chunk_list(key, entry, [_chunk(one)])
                items += [replace(read, dest_index=replace(read.dest_index, fqn=wanted)) for read in reads]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._ranges[index.fqn, tuple(index.offset or ())][1]


def _chunk(one: Held) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(one.box.start), torch.Size(one.box.shape))


class _Peers:
    """The ranks that write one checkpoint together: they succeed together, or every one of them gets the
    error."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def agree(self, work: Callable[[], _Result]) -> list[_Result]:
        """``work`` done by every rank: all results, or an error everywhere."""
        result, failure, told = None, None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  (raised again once the others know)
            failure, told = (
                error,
                error
                if isinstance(error, (CheckpointError, OSError))
                else RuntimeError(f"rank {self.rank}: {error!r}"),
            )
        answers: list[Any] = [(result, told)]
        if self.size > 1:
            answers = [None] * self.size
            dist.all_gather_object(answers, (result, told), group=self.group)
        if failure is not None:
            raise failure
        for _, error in answers:
            if error is not None:
                raise error
        return [answer for answer, _ in answers]

    def lead(self, work: Callable[[], _Result]) -> _Result:
        """``work`` done by rank 0 alone: its result, or its error, everywhere."""
        return cast("_Result", self.agree(lambda: work() if self.rank == 0 else None)[0])


@contextmanager
def _explained(what: str, disk_full: Callable[[], CheckpointError] | None = None) -> Iterator[None]:
    """Turn what the file system, a lost peer or torch.distributed.checkpoint raises into a CheckpointError;
    bugs pass through."""
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        causes: list[BaseException] = [error]
        if isinstance(error, CheckpointException):
            causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if isinstance(cause, CheckpointError):
                raise cause from None
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) and disk_full:
                raise disk_full() from None
        raise CheckpointError(f"{what}: {causes[0]}") from error


@contextmanager
def _quiet(*, alone: bool) -> Iterator[None]:
    """torch.distributed.checkpoint warns that a single process is a single process."""
    with warnings.catch_warnings() if alone else nullcontext():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
