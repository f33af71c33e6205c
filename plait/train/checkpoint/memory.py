"""Keep copies of the training state in host memory, from which restarted ranks resume: they lose
fewer steps than from the newest checkpoint on disk.

Each rank copies its tensors to a file in its host's memory (``core.runs.host_memory``). A thread
then sends the copy to a rank of the next host, which keeps it too, so that one host may be lost. At
a start, ranks compare the copies on their hosts, and choose the newest step that every rank can get
from its own host or by message. Copies serve only the same plan on as many ranks; any other plan
resumes from disk. A copy has a checksum and appears whole or not at all.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open

from plait.core.base.codec.data import decode
from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import JobError
from plait.core.base.files import replacing
from plait.train.checkpoint.ranges import Tensors, content, header
from plait.train.comm.tree import gather

KEPT = 2
"""The number of steps whose copies each rank keeps: while one is being made, the one before is
whole."""


class Copy(NamedTuple):
    """A rank's state after ``step`` steps, in a file of a host's memory. size: bytes. crc:
    CRC-32."""

    rank: int
    step: int
    size: int
    crc: int
    state: dict[str, Any]


class MemoryCheckpoints:
    """The copies of one run on this rank's host. Every method is called by all ranks of ``group``.

    folder: the host's folder in memory. plan: the plan's hash; copies of another plan are ignored.
    neighbour: distance in ranks to the rank of another host that keeps a second copy; 0: no second
    copy. group: a gloo group of all ranks, used for nothing else; None for a single rank.
    """

    def __init__(self, folder: Path, *, plan: str, neighbour: int, group: dist.ProcessGroup | None) -> None:
        self.folder, self.plan, self.group = folder, plan, group
        self.rank, self.world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.neighbour = neighbour % self.world
        self._thread: threading.Thread | None = None
        self._by_rank: list[list[Copy]] = []
        self.failure: Exception | None = None
        """The error of the last copy, if it could not be made or sent; else None."""

    def keep(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """Copy ``tensors`` now, and send the copy in the background; waits for the copy before."""
        self.finish()
        named = {f"{kind}/{name}": tensor for kind, by_name in tensors.items() for name, tensor in by_name.items()}
        host = [content(tensor.detach().cpu()) for tensor in named.values()]
        parts = [header({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()}), *host]
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        copy = Copy(self.rank, step, sum(len(part) for part in parts), crc, dict(state))
        self.failure = None
        try:
            self._write(copy, parts)
        except OSError as error:  # memory is full: the run goes on with checkpoints on disk
            self.failure = error
        if self.neighbour:
            self._thread = threading.Thread(target=self._exchange, args=(copy, parts), name="memory", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait until the last copy was sent."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def newest(self) -> int:
        """Return the newest step whose copies every rank can get; 0 if there is none."""
        self._by_rank = self._held()
        return max(_complete(self._by_rank, self.world), default=0)

    def restore(self, step: int, tensors: Tensors) -> dict[str, Any]:
        """Fill ``tensors`` with the copies of ``step``, the result of ``newest``; return the
        state."""
        by_rank = self._by_rank
        holders = _complete(by_rank, self.world)[step]
        for owner, source in enumerate(holders):
            if source != owner and self.rank in (source, owner):
                self._hand_over(_copy(by_rank[source], owner, step), source)
        mine = _copy(by_rank[holders[self.rank]], self.rank, step)
        with safe_open(self._file(mine), framework="pt") as file, torch.no_grad():
            for kind, by_name in tensors.items():
                for name, tensor in by_name.items():
                    tensor.copy_(file.get_tensor(f"{kind}/{name}"))
        return mine.state

    # ---- files ----

    def _file(self, copy: Copy) -> Path:
        return self.folder / f"rank-{copy.rank:05d}-step-{copy.step:08d}.safetensors"

    def _write(self, copy: Copy, parts: Sequence[bytes | memoryview]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self._file(copy)) as path, path.open("wb", buffering=0) as file:
            for part in parts:
                file.write(part)
        with replacing(self._file(copy).with_suffix(".json")) as path:
            path.write_text(json.dumps({"plan": self.plan, "world": self.world, "copy": copy}))
        told = sorted(self.folder.glob(f"rank-{copy.rank:05d}-step-*.json"))
        for old in told[:-KEPT]:
            old.unlink(missing_ok=True)
            old.with_suffix(".safetensors").unlink(missing_ok=True)

    def _held(self) -> list[list[Copy]]:
        """Return, by rank, the intact copies on its host."""
        found: list[Copy] = []
        for path in sorted(self.folder.glob("rank-*.json")):
            with suppress(OSError, ValueError, KeyError, JobError):
                values = read_table(path)
                copy = decode(Copy, values["copy"])
                if (values["plan"], values["world"]) == (self.plan, self.world) and self._whole(copy):
                    found.append(copy)
        return [[Copy(*one) for one in copies] for copies in gather(found, self.group)]

    def _whole(self, copy: Copy) -> bool:
        size = crc = 0
        with self._file(copy).open("rb") as file:
            while block := file.read(1 << 24):
                size, crc = size + len(block), zlib.crc32(block, crc)
        return (size, crc) == (copy.size, copy.crc)

    # ---- messages ----

    def _exchange(self, copy: Copy, parts: Sequence[bytes | memoryview]) -> None:
        """Send this rank's copy to its neighbour, and keep the copy that arrives."""
        try:
            target, source = (self.rank + self.neighbour) % self.world, (self.rank - self.neighbour) % self.world
            told = torch.tensor([copy.step, copy.size, copy.crc])
            heard = torch.empty_like(told)
            self._both(told, target, heard, source)
            _, size, crc = (int(one) for one in heard)
            coming = torch.empty(size, dtype=torch.uint8)
            self._both(torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), target, coming, source)
            self._write(Copy(source, copy.step, size, crc, copy.state), [coming.numpy().data])
        except (OSError, RuntimeError) as error:
            self.failure = error

    def _both(self, gives: torch.Tensor, target: int, takes: torch.Tensor, source: int) -> None:
        sent = dist.isend(gives, group=self.group, group_dst=target)
        dist.recv(takes, group=self.group, group_src=source)
        if sent:
            sent.wait()

    def _hand_over(self, copy: Copy, source: int) -> None:
        """Send a copy from the rank ``source``, which holds it, to the rank that it belongs to."""
        if self.rank == source:
            data = torch.frombuffer(bytearray(self._file(copy).read_bytes()), dtype=torch.uint8)
            dist.send(data, group=self.group, group_dst=copy.rank)
        else:
            data = torch.empty(copy.size, dtype=torch.uint8)
            dist.recv(data, group=self.group, group_src=source)
            self._write(copy, [data.numpy().data])


def _copy(copies: Sequence[Copy], rank: int, step: int) -> Copy:
    return next(one for one in copies if (one.rank, one.step) == (rank, step))


def _complete(by_rank: Sequence[Sequence[Copy]], world: int) -> dict[int, list[int]]:
    """Return the steps for which the copies of all ranks exist. For each step: a list, by rank, of
    the rank that holds its copy; itself if possible."""
    where: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, copies in enumerate(by_rank):
        for one in copies:
            where[one.step][one.rank].append(rank)
    return {
        step: [rank if rank in owners[rank] else owners[rank][0] for rank in range(world)]
        for step, owners in where.items()
        if all(owners.get(rank) for rank in range(world))
    }
