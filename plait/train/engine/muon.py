"""Muon on matrices of which ranks hold parts: each is orthogonalised whole, by one rank of those that hold
it.

A rank's momentum and masters stay what they are under AdamW: its shards of units. Per round of
``core.parallel.matrices`` the parts of up to one matrix a rank go to its owner, which orthogonalises it and
sends every rank of the group back what that holds:

    network    | in 0 | in 1 |      | out 0 | in 2 | out 1 | in 3 | ...
    processor         | matrix of 0 | matrix of 1  | matrix of 2  | ...

So but for the first way in and the last way out what travels is hidden, the latter behind AdamW of everything
else. What travels is in the precision that orthogonalises: bf16 halves it, and loses nothing that torch's
Muon, which rounds first, would keep.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plait.core.job.settings import MuonSection
from plait.core.parallel.matrices import rounds
from plait.core.parallel.optimizers import HIDDEN
from plait.core.parallel.sharding import Sharding, Unit
from plait.core.reshard.layouts import Box
from plait.core.step.units import UnitOp
from plait.train.comm.background import Background, BackgroundHandle
from plait.train.comm.wire import Exchanger, Splits
from plait.train.engine.orthogonal import adjusted, orthogonalise
from plait.train.machine.device import RankDevice
from plait.train.model.pieces import pieces
from plait.train.model.transformer import Share, StageModels, Transformer
from plait.train.model.units import ShardBox, UnitLayout, unit_shapes
from plait.train.record.recorder import Recorder


class Member(NamedTuple):
    """A rank of a group, by what it holds: its tensor-parallel share, and which of its replicas it is."""

    tp_rank: int
    replica: int


@dataclass(frozen=True)
class MatrixGroup:
    """Ranks that share matrices, in their wire's order, and this one's recorder."""

    members: tuple[Member, ...]
    sharding: Sharding
    wire: Exchanger
    device: RankDevice
    recorder: Recorder | None = None


@dataclass(frozen=True)
class Matrix:
    """One logical matrix. parts: of it, by member of the group, where each lies in its shard of the unit."""

    name: str
    shape: tuple[int, int]
    unit: Unit
    parts: tuple[tuple[ShardBox, ...], ...]

    def given(self, owner: int) -> list[list[ShardBox]]:
        """By member, the parts that it sends to the owner: of equal ones the owner's own, else the next
        member's."""
        found: list[list[ShardBox]] = [[] for _ in self.parts]
        seen = set[Box]()
        for step in range(len(self.parts)):
            member = (owner + step) % len(self.parts)
            for part in self.parts[member]:
                if part.box not in seen:
                    seen.add(part.box)
                    found[member].append(part)
        return found


def matrices_of(models: Share, members: Sequence[Member], sharding: Sharding) -> dict[str, Matrix]:
    """The matrices that Muon updates, by name, and who holds which part. Names and parts are the same on
    every rank of the group."""
    assert isinstance(models, StageModels | Transformer)
    stages = models.stages if isinstance(models, StageModels) else [models]
    held: list[dict[str, list[ShardBox]]] = []
    about: dict[str, tuple[tuple[int, int], Unit]] = {}
    for member in members:
        own = defaultdict[str, list[ShardBox]](list)
        for model in stages:
            found = pieces(model.spec, model.strategy, member.tp_rank, model.stage)
            for unit, shape in unit_shapes(found, model.embedding.rows, model.stage.index).items():
                layout = UnitLayout(unit, shape.shapes, shape.pieces, (sharding, member.replica))
                for part in layout.held("optim") if unit[0] in HIDDEN else ():
                    if len(part.piece.shape) == 2:
                        own[part.piece.name].append(part)
                        about[part.piece.name] = (part.piece.shape[0], part.piece.shape[1]), unit
        held.append(own)
    return {name: Matrix(name, *each, tuple(tuple(own[name]) for own in held)) for name, each in about.items()}


class MuonExchange(NamedTuple):
    """One exchange of a round, of this rank. gives: parts that it sends, in order; takes: parts that come.
    splits: how many numbers of which rank. moves: whether anything leaves any rank."""

    gives: tuple[tuple[Matrix, ShardBox], ...]
    takes: tuple[tuple[Matrix, ShardBox], ...]
    splits: Splits
    moves: bool


def way(parts: Mapping[tuple[int, int], Sequence[tuple[Matrix, ShardBox]]], rank: int, size: int) -> MuonExchange:
    """This rank's exchange. parts: by sender and receiver, everybody's."""

    def numbers(source: int, target: int) -> int:
        return sum(part.box.elements for _, part in parts.get((source, target), ()))

    ranks = range(size)
    return MuonExchange(
        gives=tuple(one for target in ranks for one in parts.get((rank, target), ())),
        takes=tuple(one for source in ranks for one in parts.get((source, rank), ())),
        splits=Splits(
            [numbers(source, rank) for source in ranks],
            [numbers(rank, target) for target in ranks],
            sum(numbers(*pair) for pair in parts),
        ),
        moves=any(source != target and found for (source, target), found in parts.items()),
    )


class MuonRound(NamedTuple):
    """Of this rank: its matrix, if it owns one, and what travels."""

    own: Matrix | None
    there: MuonExchange
    back: MuonExchange


def rounds_of(matrices: Mapping[str, Matrix], rank: int, size: int) -> list[MuonRound]:
    """All rounds of a step, as member ``rank`` of ``size`` sees them."""
    found: list[MuonRound] = []
    for owned in rounds({name: one.shape for name, one in matrices.items()}, size):
        there, back = (defaultdict[tuple[int, int], list[tuple[Matrix, ShardBox]]](list) for _ in range(2))
        for owner, name in sorted(owned.items()):
            matrix = matrices[name]
            for member, given in enumerate(matrix.given(owner)):
                there[member, owner] += [(matrix, part) for part in given]
                back[owner, member] += [(matrix, part) for part in matrix.parts[member]]
        own = matrices[owned[rank]] if rank in owned else None
        found.append(MuonRound(own, way(there, rank, size), way(back, rank, size)))
    return found


class Muon:
    """Updates the hidden matrices of a rank's optimizer shards.

    gradients, momentum, masters: flat, by unit; gradients are overwritten. sent: bytes that this rank has
    sent so far."""

    def __init__(self, models: Share, group: MatrixGroup, settings: MuonSection, dtype: torch.dtype) -> None:
        self.group, self.settings = group, settings
        self.dtype = torch.bfloat16 if settings.precision == "bf16" else dtype
        self.matrices = matrices_of(models, group.members, group.sharding)
        size, rank = group.wire.size, group.wire.rank
        self.rounds = rounds_of(self.matrices, rank, size)
        self.sent = 0
        self._background = Background(group.device, "matrices") if size > 1 else None
        self._slots: dict[tuple[str, int], Tensor] = {}

    def step(
        self,
        masters: Mapping[Unit, Tensor],
        updates: Mapping[Unit, Tensor],
        rate: float,
        decay: Callable[[str], float],
        wait: Callable[[BackgroundHandle | None, UnitOp], None],
        meanwhile: Callable[[], object],
    ) -> None:
        """Orthogonalise ``updates`` and take them off ``masters``. decay: of a matrix, by its name. wait: for
        what travels. meanwhile: what else there is to do while the last of it does."""
        count, flights = len(self.rounds), dict[tuple[str, int], BackgroundHandle | None]()

        def send(at: int) -> None:
            if at < count:
                there = self.rounds[at].there
                self._pack("give", at, there.gives, lambda matrix, part: part.of(updates[matrix.unit]))
                flights["in", at] = self._start(there, "give", "take", at)

        def settle(at: int) -> None:
            wait(flights.pop(("out", at)), UnitOp("await", ("matrices", at), True))
            for (matrix, part), found in self._parts("come", at, self.rounds[at].back.takes):
                own = part.of(masters[matrix.unit])
                own.mul_(1 - rate * decay(matrix.name))
                own.add_(found, alpha=-adjusted(rate, matrix.shape, self.settings))

        send(0)
        send(1)
        for at, one in enumerate(self.rounds):
            wait(flights.pop(("in", at)), UnitOp("await", ("matrices", at), False))
            if one.own is not None:
                whole = self._whole(one.own, at)
                self._pack("go", at, one.back.gives, lambda _, part, whole=whole: whole[part.box.slices])
            flights["out", at] = self._start(one.back, "go", "come", at)
            send(at + 2)
            if at:
                settle(at - 1)
        meanwhile()
        if count:
            settle(count - 1)

    def close(self) -> None:
        """End the thread that communicates."""
        if self._background:
            self._background.close()

    def _whole(self, matrix: Matrix, at: int) -> Tensor:
        """The update of this rank's matrix in a round, orthogonalised."""
        whole = torch.empty(matrix.shape, dtype=self.dtype, device=self.group.device.torch_device)
        for (_, part), found in self._parts("take", at, self.rounds[at].there.takes):
            whole[part.box.slices] = found
        return orthogonalise(whole, self.settings)

    # ---- what travels ----

    def _start(self, one: MuonExchange, source: str, target: str, at: int) -> BackgroundHandle | None:
        """Begin an exchange of round ``at`` from one buffer to another; None where nothing leaves any rank,
        and it is over."""
        given, into = self._slot(source, at, sum(one.splits.out)), self._slot(target, at, sum(one.splits.into))
        if not one.moves or self._background is None:
            into.copy_(given)
            return None
        size = (sum(one.splits.out) - one.splits.out[self.group.wire.rank]) * self.dtype.itemsize
        self.sent += size
        wire, recorder = self.group.wire, self.group.recorder

        def job() -> int:
            wire.exchange(into, given, one.splits).wait()
            return size

        if recorder is None:
            return self._background.start(job)
        name = recorder.name_of(UnitOp("exchange", ("matrices", at), source == "go"))
        return self._background.start(recorder.handed(name, job, step=recorder.ticket()))

    def _pack(
        self, slot: str, at: int, parts: Sequence[tuple[Matrix, ShardBox]], value: Callable[[Matrix, ShardBox], Tensor]
    ) -> None:
        for (matrix, part), place in self._parts(slot, at, parts):
            place.copy_(value(matrix, part))

    def _parts(
        self, slot: str, at: int, parts: Sequence[tuple[Matrix, ShardBox]]
    ) -> list[tuple[tuple[Matrix, ShardBox], Tensor]]:
        """Each part, and its place in a buffer, in its own shape."""
        sizes = [part.box.elements for _, part in parts]
        flat = self._slot(slot, at, sum(sizes))
        return [(one, found.view(one[1].box.shape)) for one, found in zip(parts, flat.split(sizes), strict=True)]

    def _slot(self, name: str, at: int, numbers: int) -> Tensor:
        """The first numbers of a buffer; each is used again two rounds later, when what it held is done
        with."""
        key = name, at % 2
        if key not in self._slots:
            self._slots[key] = torch.empty(
                self.numbers(name, at % 2), dtype=self.dtype, device=self.group.device.torch_device
            )
        return self._slots[key][:numbers]

    def numbers(self, name: str, parity: int) -> int:
        """How many a buffer has."""
        ways = [one.there if name in ("give", "take") else one.back for one in self.rounds[parity::2]]
        sides = [sum(one.splits.out if name in ("give", "go") else one.splits.into) for one in ways]
        return max(sides, default=0)
