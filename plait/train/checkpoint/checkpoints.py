"""Checkpoints from which a run resumes exactly, under the same tensor-parallel degree or another.

Tensors are stored by logical piece (``weights/layers.0.attn.q.weight``): a rank says which range of which
whole tensor it holds, ranges held by several ranks are written once, and a rank that loads reads the ranges
it needs, whoever wrote them. Files are safetensors and a JSON manifest: reading them executes nothing.
``save`` copies to host memory and returns; a thread writes, over a process group of its own so that its
collectives never mix with training's.
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

from plait.core.base.errors import CheckpointError
from plait.core.runs.epoch import Epoch
from plait.train.checkpoint.folder import CheckpointFolder, Keep, measure
from plait.train.checkpoint.manifest import Manifest
from plait.train.checkpoint.peers import Peers
from plait.train.checkpoint.ranges import Range, Tensors, assign, described, ranges_of, read_ranges, write_ranges
from plait.train.checkpoint.readers import pass_on, shares, told
from plait.train.model.units import ShardBox


class Restored(NamedTuple):
    """What ``restore`` has loaded. warnings: a line for every damaged checkpoint that was passed over."""

    step: int
    state: dict[str, Any]
    warnings: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one run, written in the background. Every method is called by all ranks of
    ``group``.

    held: what the tensors to save hold, by their names. keep: which complete checkpoints stay on disk, or how
    many; of one the one before stays, until the next begins. group: a gloo group of all ranks, used for
    nothing else, whose timeout bounds every wait for a rank; None for a single process. read_only: leave the
    folder as it is, so that a running job can be looked at; otherwise what a crash left in it is removed here
    and now. beside: asked on every rank by the thread that writes, after each checkpoint; what all said is
    ``told``. epoch: of the attempt at the run, if one was begun. Raises CheckpointError if the folder cannot
    be used.

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
        beside: Callable[[], Any] | None = None,
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
        self._beside = beside
        self.told: list[Any] = []
        """What every rank said beside the last checkpoint, by rank; nothing before the first."""
        self.before_it_counts: Callable[[], object] = lambda: None
        """Called by rank 0's thread that writes: what else has to be on disk by then."""
        if not read_only:
            with _explained(f"{folder}: cannot hold checkpoints"):
                self._peers.lead(self._folder.open)

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written right now."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def writing(self) -> int:
        """The step of the checkpoint that is being written right now; 0 if none is."""
        return self._step if self.saving else 0

    def save(
        self, step: int, tensors: Tensors, state: Mapping[str, Any], *, wait: bool = False, prune: bool = True
    ) -> None:
        """Copy ``tensors`` to host memory and start writing them, with ``state`` (rank 0's, plain JSON
        values).

        The tensors may be changed as soon as this returns. wait: finish before returning. prune: older ones
        may go; not where nobody knows of the newest whether steps from it are finite. Raises
        CheckpointError on every rank if this checkpoint could not be completed (wait), or the one before it
        (otherwise); in that case this one is being written all the same.
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
        """Wait for the checkpoint being written. Raises CheckpointError, on every rank, if it could not be
        completed.

        Training may go on after that: the checkpoints before it are untouched and the next ``save`` tries
        anew.
        """
        failure = self._join()
        if failure is not None:
            raise failure

    def newest(self) -> int:
        """The step of the newest checkpoint whose files are all there, once what is being written is there
        too; 0 if there is none. Raises CheckpointError."""
        self.finish()
        with _explained(f"{self._folder.root}: cannot be read"):
            return max(self._peers.lead(self._folder.survey)[0][:1], default=0)

    def restore(self, tensors: Tensors) -> Restored | None:
        """Fill ``tensors`` in place from the newest checkpoint that is whole; None where there has never been
        one.

        One that is damaged is passed over with a warning and, unless opened to read only, set aside. Raises
        CheckpointError if none is whole but some are there, and as ``load`` does for one of another model.
        """
        self.finish()
        root = self._folder.root
        with _explained(f"{root}: cannot be read"):
            steps, found, aside = self._peers.lead(self._folder.survey)
            problems = [(step, problem) for step, problem in found]
            for step in steps:
                manifest = self._manifest(step)
                problem = self._problem(manifest)
                if problem is None:
                    self._fill(manifest, tensors)
                    return Restored(step, manifest.state, self._pass_over(problems, instead=step))
                problems.append((step, problem))
            if problems or aside:
                each = "; ".join([problem for _, problem in sorted(problems)] + aside)
                fix = "To start anew, remove the folder or give the run another name with run.name=NAME"
                raise CheckpointError(f"{root}: none of its checkpoints can be used. {each}. {fix}")
        return None

    def load(self, step: int, tensors: Tensors) -> dict[str, Any]:
        """Fill ``tensors`` in place from the checkpoint of ``step``, and return its state.

        Raises CheckpointError, on every rank and with ``tensors`` untouched, for a missing or damaged file
        (checksums are compared first) and for a tensor that is missing or of another shape or dtype. Kinds
        that the checkpoint has and ``tensors`` has not are left alone.
        """
        self.finish()
        with _explained(f"{self._folder.path(step)}: cannot be read"):
            manifest = self._manifest(step)
            if problem := self._problem(manifest):
                raise CheckpointError(f"{problem}. {self._peers.lead(lambda: self._folder.others(step))}")
            self._fill(manifest, tensors)
        return manifest.state

    def pass_over(self, step: int) -> str:
        """Take the checkpoint of ``step`` out of the way, because steps from it are not finite; its new name,
        empty if there is none. Raises CheckpointError."""
        self.finish()
        with _explained(f"{self._folder.path(step)}: cannot be set aside"):
            there = self._folder.path(step).is_dir
            return self._peers.lead(lambda: self._folder.set_aside(step, "not-finite") if there() else "")

    @property
    def passed_over(self) -> list[tuple[int, str]]:
        """Checkpoints that were, as this rank sees them: step and name."""
        names = [path.name for path in self._folder.root.glob("step-*.not-finite")]
        return [(int(name[5:].partition(".")[0]), name) for name in names if name[5:].partition(".")[0].isdigit()]

    # ---- reading ----

    def _manifest(self, step: int) -> Manifest:
        """As rank 0 reads it."""
        return Manifest.from_text(self._peers.lead(lambda: self._folder.read(step).to_text()))

    def _problem(self, manifest: Manifest) -> str | None:
        """What is wrong with a checkpoint's contents; each rank reads a share of the files."""
        names = sorted(manifest.files)[self._peers.rank :: self._peers.size]
        problems = self._peers.agree(lambda: self._folder.problem(manifest, names))
        return next(filter(None, problems), None)

    def _fill(self, manifest: Manifest, tensors: Tensors) -> None:
        """Get this rank's ranges: what several ranks hold one of them reads and passes on. ``tensors`` change
        once every rank has its own."""
        staged, path, peers = self._stage(tensors), self._folder.path(manifest.step), self._peers
        ranges = ranges_of(staged, self._held)
        found = shares(peers.agree(lambda: told(ranges)))
        mine = {part for share in found if share.ranks[0] == peers.rank for part in share.parts}
        own = [one for one in ranges if (one.key, one.box) in mine]
        peers.agree(lambda: read_ranges(path, own, manifest.tensors))
        pass_on(found, ranges, peers.rank, peers.group)
        with torch.no_grad():  # range by range: padding belongs to no checkpoint
            for into, read in zip(ranges_of(tensors, self._held), ranges_of(staged, self._held), strict=True):
                into.tensor.copy_(read.tensor)

    def _pass_over(self, problems: list[tuple[int, str]], instead: int) -> tuple[str, ...]:
        """A line on each checkpoint that was not used; it is set aside."""
        warnings: list[str] = []
        for step, problem in sorted(problems):
            line = f"{problem}. The checkpoint of step {instead} is used instead"
            if not self._read_only:
                line += f"; the unusable one is now {self._peers.lead(lambda step=step: self._folder.set_aside(step))}"
            warnings.append(line)
        return tuple(warnings)

    # ---- writing ----

    def _join(self) -> BaseException | None:
        """Wait for the checkpoint being written; what went wrong with it."""
        if self._thread is not None:
            self._thread.join()  # the thread's own waits have a limit: the group's timeout
        failure, self._thread, self._failure = self._failure, None, None
        return failure

    def _stage(self, tensors: Tensors) -> dict[str, dict[str, Tensor]]:
        """A host buffer for every tensor, kept from one checkpoint to the next: fresh (or pinned) memory is
        slow to get."""
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
        """The background thread: all ranks write, each vouches for its file, rank 0 gives the folder its
        final name."""
        try:
            with _explained(f"{self._folder.partial(step)}: cannot be written"):
                self._write_files(step, ranges, state)
        except BaseException as error:  # noqa: BLE001  (finish raises it where somebody listens)
            self._failure = error

    def _write_files(self, step: int, ranges: list[Range], state: dict[str, Any]) -> None:
        peers, folder = self._peers, self._folder
        tensors, needed = assign(peers.agree(lambda: described(ranges)))

        def write() -> dict[str, tuple[int, int]]:
            name = write_ranges(partial, peers.rank, ranges, tensors)
            return {} if name is None else {name: measure(partial / name)}

        def begin() -> str:
            if self._prune:  # steps were made from the newest, or this one would not be written
                folder.prune(self._keep)
            folder.begin(step, needed)
            return str(folder.partial(step))

        def commit() -> None:
            self.before_it_counts()
            folder.commit(step, files, state, tensors=tensors)
            if self._prune:  # from this one no step was made yet: the one before stays
                folder.prune(replace(self._keep, last=max(self._keep.last, 2)))

        try:
            partial = Path(peers.lead(begin))
            files = {name: (size, crc) for part in peers.agree(write) for name, (size, crc) in part.items()}
            peers.lead(commit)
            if self._beside:
                self.told = peers.agree(self._beside)
        except BaseException as error:
            if peers.rank == 0:
                folder.abandon(step)  # before the error counts the bytes that are free
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise folder.full(step, needed) from None
            raise


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn what the file system or a lost peer raises into a CheckpointError; bugs pass through."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{what}: {error}") from error
