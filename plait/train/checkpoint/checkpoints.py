"""Save and restore checkpoints from which a run resumes exactly, under the same parallel degrees or
others.

Tensors are stored by logical piece (``weights/layers.0.attn.q.weight``). Each rank states which
range of which whole tensor it holds. A range that several ranks hold is written once. A rank that
loads reads the ranges that it needs, whichever rank wrote them. Files are safetensors and a JSON
manifest: reading them executes no code. ``save`` copies to host memory and returns. A thread
writes, over a separate process group, so that its collectives never mix with training's.
"""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.base.errors import CheckpointError, PlaitError, RunLost
from plait.core.runs.attempts import Epoch
from plait.train.checkpoint.folder import CheckpointFolder, Keep, Manifest, measure
from plait.train.checkpoint.ranges import (
    Range,
    Tensors,
    assign_readers,
    assign_writers,
    describe_held,
    describe_wanted,
    distribute,
    ranges_of,
    read_ranges,
    write_ranges,
)
from plait.train.comm.tree import broadcast, gather
from plait.train.model.units import ShardBox


class Restored(NamedTuple):
    """The result of ``restore``. warnings: a line for every damaged checkpoint that was skipped."""

    step: int
    state: dict[str, Any]
    warnings: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one run, written in the background. Every method is called by all ranks of
    ``group``.

    held: by tensor name, the boxes (ranges of whole tensors) that it holds. keep: the complete
    checkpoints to keep on disk, or how many; with 1, the previous checkpoint stays until the next
    one begins. group: a gloo group of all ranks, used for nothing else, whose timeout bounds every
    wait for a rank; None for a single process. read_only: leave the folder as it is, to read the
    checkpoints of a running job; otherwise remove what a crash left in it. beside: function that
    the writing thread calls on every rank after each checkpoint; ``gathered_statistics`` holds all
    results. epoch: the attempt at the run, if there is one. Raises CheckpointError if the folder
    cannot be used.

        checkpoints = Checkpoints(folder, optimizer.held)
        checkpoints.save(100, {"weights": model.named}, {"sequences": 3200})
        checkpoints.finish()
        restored = checkpoints.restore({"weights": model.named})
    """

    def __init__(
        self,
        folder: Path,
        held: Mapping[str, Sequence[ShardBox]],
        *,
        keep: int | Keep = 2,
        group: dist.ProcessGroup | None = None,
        read_only: bool = False,
        statistics: Callable[[], Any] | None = None,
        epoch: Epoch | None = None,
    ) -> None:
        keep = Keep(keep) if isinstance(keep, int) else keep
        assert keep.last >= 1, f"{keep} leaves nothing to resume from"
        self._read_only = read_only
        self._folder, self._keep, self._peers = CheckpointFolder(folder, epoch), keep, Peers(group)
        self._held = held
        self._staged: dict[tuple[str, str], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._step = 0
        self._prune = True
        self._statistics = statistics
        self.gathered_statistics: list[Any] = []
        """Results of ``statistics`` after the last checkpoint, by rank; empty before the first."""
        self.before_commit: Callable[[], object] = lambda: None
        """Function that rank 0's writing thread calls before a checkpoint becomes complete, to
        flush other files to disk."""
        if not read_only:
            with _explained(f"{folder}: cannot hold checkpoints"):
                self._peers.run_on_first(self._folder.open)

    @property
    def saving(self) -> bool:
        """True while a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def writing(self) -> int:
        """The step of the checkpoint that is being written; 0 if none is."""
        return self._step if self.saving else 0

    def save(
        self, step: int, tensors: Tensors, state: Mapping[str, Any], *, wait: bool = False, prune: bool = True
    ) -> None:
        """Copy ``tensors`` to host memory and start writing them, with ``state`` (rank 0's, plain
        JSON values).

        The tensors may be changed as soon as this returns. wait: finish before returning. prune:
        delete older checkpoints; pass False while no finite step was made from the newest. Raises
        CheckpointError on every rank if this checkpoint could not be completed (wait), or the
        previous one (otherwise). In the latter case this checkpoint is still being written.
        """
        assert not self._read_only, "opened to read only"
        snapshot = json.loads(json.dumps(dict(state)))
        before = self._join()
        staged = self._stage(tensors)
        for kind, by_name in tensors.items():
            for name, tensor in by_name.items():
                staged[kind][name].copy_(tensor.detach())
        self._step = step
        self._prune = prune
        self._thread = threading.Thread(
            target=self._write, args=(step, ranges_of(staged, self._held), snapshot), name="checkpoint", daemon=True
        )
        self._thread.start()
        if wait:
            self.finish()
        elif before is not None:
            raise before

    def finish(self) -> None:
        """Wait for the checkpoint being written. Raises CheckpointError, on every rank, if it could
        not be completed.

        Training may go on after that error: earlier checkpoints are untouched, and the next
        ``save`` tries again.
        """
        failure = self._join()
        if failure is not None:
            raise failure

    def newest(self) -> int:
        """Return the step of the newest checkpoint whose files all exist, after waiting for the one
        being written; 0 if there is none. Raises CheckpointError."""
        self.finish()
        with _explained(f"{self._folder.root}: cannot be read"):
            return max(self._peers.run_on_first(self._folder.survey)[0][:1], default=0)

    def restore(self, tensors: Tensors) -> Restored | None:
        """Fill ``tensors`` in place from the newest intact checkpoint; return None if there is no
        checkpoint.

        A damaged checkpoint is skipped with a warning and, unless opened read-only, renamed. Raises
        CheckpointError if all checkpoints are damaged, and, like ``load``, for one of another
        model.
        """
        self.finish()
        root = self._folder.root
        with _explained(f"{root}: cannot be read"):
            steps, found, aside = self._peers.run_on_first(self._folder.survey)
            problems = [(step, problem) for step, problem in found]
            for step in steps:
                manifest = self._manifest(step)
                problem = self._problem(manifest)
                if problem is None:
                    self._fill(manifest, tensors)
                    return Restored(step, manifest.state, self._set_aside_unusable(problems, instead=step))
                problems.append((step, problem))
            if problems or aside:
                each = "; ".join([problem for _, problem in sorted(problems)] + aside)
                fix = "To start anew, remove the folder or give the run another name with run.name=NAME"
                raise CheckpointError(f"{root}: none of its checkpoints can be used. {each}. {fix}")
        return None

    def load(self, step: int, tensors: Tensors) -> dict[str, Any]:
        """Fill ``tensors`` in place from the checkpoint of ``step``, and return its state.

        Raises CheckpointError, on every rank and with ``tensors`` untouched, for a missing or
        damaged file (checksums are compared first), and for a tensor that is missing or has another
        shape or dtype. Kinds in the checkpoint that are not in ``tensors`` are ignored.
        """
        self.finish()
        with _explained(f"{self._folder.path(step)}: cannot be read"):
            manifest = self._manifest(step)
            if problem := self._problem(manifest):
                raise CheckpointError(
                    f"{problem}. {self._peers.run_on_first(lambda: self._folder.describe_other_steps(step))}"
                )
            self._fill(manifest, tensors)
        return manifest.state

    def mark_not_finite(self, step: int) -> str:
        """Rename the checkpoint of ``step``, because steps from it are not finite. Return its new
        name; empty if there is no such checkpoint. Raises CheckpointError."""
        self.finish()
        with _explained(f"{self._folder.path(step)}: cannot be set aside"):
            there = self._folder.path(step).is_dir
            return self._peers.run_on_first(lambda: self._folder.set_aside(step, "not-finite") if there() else "")

    @property
    def not_finite(self) -> list[tuple[int, str]]:
        """Step and name of the checkpoints that were renamed by ``mark_not_finite``, as this rank
        sees the folder."""
        names = [path.name for path in self._folder.root.glob("step-*.not-finite")]
        return [(int(name[5:].partition(".")[0]), name) for name in names if name[5:].partition(".")[0].isdigit()]

    # ---- reading ----

    def _manifest(self, step: int) -> Manifest:
        """Return the manifest of ``step``, as rank 0 reads it."""
        return Manifest.from_text(self._peers.run_on_first(lambda: self._folder.read(step).to_text()))

    def _problem(self, manifest: Manifest) -> str | None:
        """Return what is wrong with a checkpoint's contents, None if nothing is. Called by all
        ranks; each reads a share of the files."""
        names = sorted(manifest.files)[self._peers.rank :: self._peers.size]
        problems = self._peers.run_on_all(lambda: self._folder.problem(manifest, names))
        return next(filter(None, problems), None)

    def _fill(self, manifest: Manifest, tensors: Tensors) -> None:
        """Load this rank's ranges. For a range that several ranks hold, one rank reads it and sends
        it to the others. ``tensors`` change only once every rank has its ranges."""
        staged, path, peers = self._stage(tensors), self._folder.path(manifest.step), self._peers
        ranges = ranges_of(staged, self._held)
        found = assign_readers(peers.run_on_all(lambda: describe_wanted(ranges)))
        mine = {part for share in found if share.ranks[0] == peers.rank for part in share.parts}
        own = [one for one in ranges if (one.key, one.box) in mine]
        peers.run_on_all(lambda: read_ranges(path, own, manifest.tensors))
        distribute(found, ranges, peers.rank, peers.group)
        with torch.no_grad():  # range by range: checkpoints do not contain padding
            for into, read in zip(ranges_of(tensors, self._held), ranges_of(staged, self._held), strict=True):
                into.tensor.copy_(read.tensor)

    def _set_aside_unusable(self, problems: list[tuple[int, str]], instead: int) -> tuple[str, ...]:
        """Rename the checkpoints that were not used; return a line on each."""
        warnings: list[str] = []
        for step, problem in sorted(problems):
            line = f"{problem}. The checkpoint of step {instead} is used instead"
            if not self._read_only:
                kept = self._peers.run_on_first(lambda step=step: self._folder.set_aside(step))
                line += f"; the unusable one is now {kept}"
            warnings.append(line)
        return tuple(warnings)

    # ---- writing ----

    def _join(self) -> BaseException | None:
        """Wait for the checkpoint being written; return its error, if any."""
        if self._thread is not None:
            self._thread.join()  # the group's timeout bounds the thread's own waits
        failure, self._thread, self._failure = self._failure, None, None
        return failure

    def _stage(self, tensors: Tensors) -> dict[str, dict[str, Tensor]]:
        """Return a host buffer for every tensor. Buffers are kept from one checkpoint to the next,
        since allocating fresh (or pinned) memory is slow."""
        staged: dict[str, dict[str, Tensor]] = {}
        for kind, by_name in tensors.items():
            for name, tensor in by_name.items():
                buffer = self._staged.get((kind, name))
                if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
                    self._staged[kind, name] = buffer
                staged.setdefault(kind, {})[name] = buffer
        return staged

    def _write(self, step: int, ranges: list[Range], state: dict[str, Any]) -> None:
        """Write a checkpoint in the background thread: all ranks write and checksum their files,
        then rank 0 renames the folder to its final name."""
        try:
            with _explained(f"{self._folder.partial(step)}: cannot be written"):
                self._write_files(step, ranges, state)
        except BaseException as error:  # noqa: BLE001  (finish raises it in the main thread)
            self._failure = error

    def _write_files(self, step: int, ranges: list[Range], state: dict[str, Any]) -> None:
        peers, folder = self._peers, self._folder
        tensors, needed = assign_writers(peers.run_on_all(lambda: describe_held(ranges)))

        def write() -> dict[str, tuple[int, int]]:
            name = write_ranges(partial, peers.rank, ranges, tensors)
            return {} if name is None else {name: measure(partial / name)}

        def begin() -> str:
            if self._prune:  # finite steps were made from the newest checkpoint
                folder.prune(self._keep)
            folder.begin(step, needed)
            return str(folder.partial(step))

        def commit() -> None:
            self.before_commit()
            folder.commit(step, files, state, tensors=tensors)
            if self._prune:  # no step was made from this checkpoint yet, so keep the previous one
                folder.prune(replace(self._keep, last=max(self._keep.last, 2)))

        try:
            partial = Path(peers.run_on_first(begin))
            files = {name: (size, crc) for part in peers.run_on_all(write) for name, (size, crc) in part.items()}
            peers.run_on_first(commit)
            if self._statistics:
                self.gathered_statistics = peers.run_on_all(self._statistics)
        except BaseException as error:
            if peers.rank == 0:
                folder.abandon(step)  # before the error message counts the free bytes
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise folder.full(step, needed) from None
            raise


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn errors of the file system or of lost peers into CheckpointError; other errors pass
    through."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{what}: {error}") from error


# ---- agreement between ranks ----

SHARED_ERRORS: Mapping[str, type[PlaitError]] = {"checkpoint": CheckpointError, "lost": RunLost}
"""Errors that keep their class on other ranks."""


class Peers:
    """All ranks of ``group``, or a single process. Results travel between ranks, so they must be
    plain JSON values.

    The group's timeout bounds all waits: a rank that does not answer raises RuntimeError on the
    others.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def run_on_all(self, work: Callable[[], Any]) -> list[Any]:
        """Run ``work`` on every rank. Return all results, by rank, or raise on every rank if one
        fails."""
        result, failure = _attempt(work)
        told = _encode_error(failure, self.rank)
        answers = gather((result, told), self.group) if self.size > 1 else [(result, told)]
        if failure is not None:
            raise failure
        for _, told in answers:
            if told is not None:
                raise _decode_error(told)
        return [answer for answer, _ in answers]

    def run_on_first(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on rank 0 alone. Return its result, or raise its error, on every rank."""
        result, failure = _attempt(work) if self.rank == 0 else (None, None)
        told = None
        if self.size > 1:
            result, told = broadcast((result, _encode_error(failure, self.rank)), 0, self.group)
        if failure is not None:
            raise failure
        if told is not None:
            raise _decode_error(told)
        return result


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001  (raised again once the others know)
        return None, error


def _encode_error(error: Exception | None, rank: int) -> dict[str, Any] | None:
    """Return an error as plain values, to send to the other ranks."""
    if error is None:
        return None
    for kind, one in SHARED_ERRORS.items():
        if isinstance(error, one):
            return {"kind": kind, "text": str(error)}
    if isinstance(error, OSError):  # with its errno: other ranks recognize a full disk by it
        file = () if error.filename is None else (str(error.filename),)
        return {"kind": "system", "args": [error.errno, error.strerror, *file] if error.errno else [str(error)]}
    return {"kind": "bug", "text": f"rank {rank}: {error!r}"}


def _decode_error(fields: dict[str, Any]) -> Exception:
    if fields["kind"] in SHARED_ERRORS:
        return SHARED_ERRORS[fields["kind"]](fields["text"])
    if fields["kind"] == "system":
        return OSError(*fields["args"])
    return RuntimeError(fields["text"])
