"""Muon on matrices that are sharded over ranks: one rank of each group orthogonalises the whole
matrix.

A rank's momentum and masters stay its shards of units, as with AdamW. In each round of
``core.parallel.sharding.rounds`` the parts of up to one matrix per rank are sent to its owner. The
owner orthogonalises it and returns to each rank its parts:

    network    | in 0 | in 1 |      | out 0 | in 2 | out 1 | in 3 | ...
    processor         | matrix of 0 | matrix of 1  | matrix of 2  | ...

All exchanges but the first in and the last out are hidden; the last out overlaps AdamW on all other
parameters. Data are sent in the precision of orthogonalisation. bf16 halves the bytes at no loss,
since torch's Muon also rounds first.

Newton-Schulz iterations, as in torch.optim.Muon, give roughly the nearest orthogonal matrix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plait.core.job.settings import MuonSection
from plait.core.parallel.sharding import MUON_KINDS, Sharding, Unit, rounds
from plait.core.reshard.layouts import Box
from plait.core.step.traffic import UnitOp
from plait.train.comm.background import Background, BackgroundHandle
from plait.train.comm.wire import Exchanger, Splits
from plait.train.machine.device import RankDevice
from plait.train.model.pieces import pieces
from plait.train.model.transformer import Share, StageModels, Transformer
from plait.train.model.units import ShardBox, UnitLayout, unit_shapes
from plait.train.record.recorder import Recorder


def orthogonalise(matrix: Tensor, muon: MuonSection) -> Tensor:
    """Return roughly U V^T for ``matrix`` = U S V^T [A, B], in the matrix's dtype; its singular
    values lie between 0.5 and 1.5.

    The operations are those of torch.optim.Muon in bf16 (torch 2.13, torch/optim/_muon.py), so that
    both give the same bits.
    """
    a, b, c = muon.ns_coefficients
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm().clamp(min=muon.eps)
    for _ in range(muon.ns_steps):
        gram = wide @ wide.T
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.addmm(wide, update, wide, beta=a)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def adjusted(rate: float, shape: tuple[int, ...], muon: MuonSection) -> float:
    """Return the learning rate of a matrix [A, B]: ``rate`` times the factor of
    ``muon.adjust_lr``."""
    rows, columns = shape
    if muon.adjust_lr == "original":
        return rate * max(1.0, rows / columns) ** 0.5
    return rate * 0.2 * max(rows, columns) ** 0.5


class Member(NamedTuple):
    """A rank of a group: its tensor-parallel rank and its index among the replicas."""

    tp_rank: int
    replica: int


@dataclass(frozen=True)
class MatrixGroup:
    """Ranks that share matrices, in the order of their process group, and this rank's recorder."""

    members: tuple[Member, ...]
    sharding: Sharding
    wire: Exchanger
    device: RankDevice
    recorder: Recorder | None = None


@dataclass(frozen=True)
class Matrix:
    """One logical matrix. parts: by member of the group, the parts in its shard of the unit."""

    name: str
    shape: tuple[int, int]
    unit: Unit
    parts: tuple[tuple[ShardBox, ...], ...]

    def sent_parts(self, owner: int) -> list[list[ShardBox]]:
        """Return, by member, the parts that it sends to the owner. Of replicated parts the owner's
        own is used, else that of the next member."""
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
    """Return the matrices that Muon updates, by name, with the parts of each member. Names and
    parts are equal on every rank of the group."""
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
                for part in layout.held("optim") if unit[0] in MUON_KINDS else ():
                    if len(part.piece.shape) == 2:
                        own[part.piece.name].append(part)
                        about[part.piece.name] = (part.piece.shape[0], part.piece.shape[1]), unit
        held.append(own)
    return {name: Matrix(name, *each, tuple(tuple(own[name]) for own in held)) for name, each in about.items()}


class MuonExchange(NamedTuple):
    """This rank's view of one exchange of a round. gives: parts that it sends, in order. takes:
    parts that it receives. splits: numbers per rank. moves: True if data leave any rank."""

    gives: tuple[tuple[Matrix, ShardBox], ...]
    takes: tuple[tuple[Matrix, ShardBox], ...]
    splits: Splits
    moves: bool


def rank_exchange(
    parts: Mapping[tuple[int, int], Sequence[tuple[Matrix, ShardBox]]], rank: int, size: int
) -> MuonExchange:
    """Return this rank's view of an exchange. parts: by sender and receiver, of all ranks."""

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
    """This rank's view of a round: its matrix, if it owns one, the exchange to the owners and the
    exchange back."""

    own: Matrix | None
    to_owner: MuonExchange
    from_owner: MuonExchange


def rounds_of(matrices: Mapping[str, Matrix], rank: int, size: int) -> list[MuonRound]:
    """Return all rounds of a step for member ``rank`` of ``size``."""
    found: list[MuonRound] = []
    for owned in rounds({name: one.shape for name, one in matrices.items()}, size):
        there, back = (defaultdict[tuple[int, int], list[tuple[Matrix, ShardBox]]](list) for _ in range(2))
        for owner, name in sorted(owned.items()):
            matrix = matrices[name]
            for member, given in enumerate(matrix.sent_parts(owner)):
                there[member, owner] += [(matrix, part) for part in given]
                back[owner, member] += [(matrix, part) for part in matrix.parts[member]]
        own = matrices[owned[rank]] if rank in owned else None
        found.append(MuonRound(own, rank_exchange(there, rank, size), rank_exchange(back, rank, size)))
    return found


class Muon:
    """Updates the hidden matrices of a rank's optimizer shards.

    gradients, momentum, masters: flat, by unit; gradients are overwritten. sent: bytes that this
    rank has sent so far.
    """

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
        """Orthogonalise ``updates`` and subtract them from ``masters``. decay: weight decay by name.
        wait: waits for an exchange. meanwhile: called while the last exchange is under way."""
        count, flights = len(self.rounds), dict[tuple[str, int], BackgroundHandle | None]()

        def send(at: int) -> None:
            if at < count:
                there = self.rounds[at].to_owner
                self._pack("give", at, there.gives, lambda matrix, part: part.of(updates[matrix.unit]))
                flights["in", at] = self._start(there, "give", "take", at)

        def settle(at: int) -> None:
            wait(flights.pop(("out", at)), UnitOp("await", ("matrices", at), True))
            for (matrix, part), found in self._parts("come", at, self.rounds[at].from_owner.takes):
                own = part.of(masters[matrix.unit])
                own.mul_(1 - rate * decay(matrix.name))
                own.add_(found, alpha=-adjusted(rate, matrix.shape, self.settings))

        send(0)
        send(1)
        for at, one in enumerate(self.rounds):
            wait(flights.pop(("in", at)), UnitOp("await", ("matrices", at), False))
            if one.own is not None:
                whole = self._whole(one.own, at)
                self._pack("go", at, one.from_owner.gives, lambda _, part, whole=whole: whole[part.box.slices])
            flights["out", at] = self._start(one.from_owner, "go", "come", at)
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
        """Return the orthogonalised update of the matrix that this rank owns in round ``at``."""
        whole = torch.empty(matrix.shape, dtype=self.dtype, device=self.group.device.torch_device)
        for (_, part), found in self._parts("take", at, self.rounds[at].to_owner.takes):
            whole[part.box.slices] = found
        return orthogonalise(whole, self.settings)

    # ---- exchanges ----

    def _start(self, exchange: MuonExchange, source: str, target: str, at: int) -> BackgroundHandle | None:
        """Start an exchange of round ``at`` from one buffer to another. Returns None if no data
        leave any rank; the exchange is then complete."""
        given, into = (
            self._slot(source, at, sum(exchange.splits.out)),
            self._slot(target, at, sum(exchange.splits.into)),
        )
        if not exchange.moves or self._background is None:
            into.copy_(given)
            return None
        size = (sum(exchange.splits.out) - exchange.splits.out[self.group.wire.rank]) * self.dtype.itemsize
        self.sent += size
        wire, recorder = self.group.wire, self.group.recorder

        def job() -> int:
            wire.exchange(into, given, exchange.splits).wait()
            return size

        if recorder is None:
            return self._background.start(job)
        name = recorder.name_of(UnitOp("exchange", ("matrices", at), source == "go"))
        return self._background.start(recorder.recorded_job(name, job, step=recorder.current_step()))

    def _pack(
        self, slot: str, at: int, parts: Sequence[tuple[Matrix, ShardBox]], value: Callable[[Matrix, ShardBox], Tensor]
    ) -> None:
        for (matrix, part), view in self._parts(slot, at, parts):
            view.copy_(value(matrix, part))

    def _parts(
        self, slot: str, at: int, parts: Sequence[tuple[Matrix, ShardBox]]
    ) -> list[tuple[tuple[Matrix, ShardBox], Tensor]]:
        """Return each part with its view of a buffer, in the part's shape."""
        sizes = [part.box.elements for _, part in parts]
        flat = self._slot(slot, at, sum(sizes))
        return [(one, found.view(one[1].box.shape)) for one, found in zip(parts, flat.split(sizes), strict=True)]

    def _slot(self, name: str, at: int, numbers: int) -> Tensor:
        """Return the first ``numbers`` numbers of a buffer. A buffer is reused two rounds later,
        when its contents have been read."""
        key = name, at % 2
        if key not in self._slots:
            self._slots[key] = torch.empty(
                self.numbers(name, at % 2), dtype=self.dtype, device=self.group.device.torch_device
            )
        return self._slots[key][:numbers]

    def numbers(self, name: str, parity: int) -> int:
        """Return how many numbers a communication buffer must hold. name: of the buffer. parity: of
        the rounds that use it."""
        ways = [one.to_owner if name in ("give", "take") else one.from_owner for one in self.rounds[parity::2]]
        sides = [sum(one.splits.out if name in ("give", "go") else one.splits.into) for one in ways]
        return max(sides, default=0)
