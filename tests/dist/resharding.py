"""What each rank runs in ``test_reshard``: moves between random layouts, every tile compared with
its part of the whole tensor."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.core.base.errors import ReshardError
from plait.core.reshard.layouts import Reshard, TensorLayout
from plait.core.reshard.plan import WAYS, Message, ReshardPlan
from plait.plan.reshard.boundary import Fabric, even_hosts, plan_reshard
from plait.train.comm.lanes import BackgroundHandle, Lane
from plait.train.machine.device import RankDevice

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "float8_e4m3fn",
)
Started = tuple[BackgroundHandle, Tensor | None, Tensor | None]
DEVICE = RankDevice(torch.device("cpu"))
_lanes: dict[str, Lane] = {}


class DelayedLane(Lane):
    """A lane whose messages are posted late by random times, differently on every rank."""

    def _post(self, message: Message, buffer: Tensor) -> Any:
        time.sleep(_chance.choice((0.0, 0.0, 0.0, 0.002)))
        return super()._post(message, buffer)


_chance = random.Random()


def lane(name: str) -> Lane:
    """One of this process's lanes; ranks open them in the same order."""
    if name not in _lanes:
        _lanes[name] = (DelayedLane if name.startswith("delayed") else Lane)(DEVICE)
    return _lanes[name]


class Move(NamedTuple):
    """One case: a plan, the type of the tensor, and whether tiles are parts of larger tensors."""

    plan: ReshardPlan
    dtype: str
    strided: bool


def random_moves(seed: int, count: int, ranks: int) -> list[Move]:
    """The same on every rank."""
    chance = random.Random(seed)
    return [_random_move(chance, ranks) for _ in range(count)]


def _random_move(chance: random.Random, ranks: int) -> Move:
    shape = tuple(chance.randint(1, 13) for _ in range(chance.randint(0, 3)))
    half, apart = ranks // 2, chance.random() < 0.7
    source = _random_layout(chance, len(shape), list(range(half)) if apart else list(range(ranks)))
    destination = _random_layout(chance, len(shape), list(range(half, ranks)) if apart else list(range(ranks)))
    dtype = chance.choice(DTYPES)
    itemsize = getattr(torch, dtype).itemsize
    least = chance.choice((32, 256, 1 << 16))
    fabric = Fabric(hosts=even_hosts(ranks, chance.choice((1, 2, 4))), rate=1e6, latency=chance.choice((0.0, 1e-4)),
                    nics_per_host=chance.choice((1, 2)), min_chunk=least, max_chunk=4 * least)  # fmt: skip
    way = chance.choice((None, *WAYS))
    order = chance.choice(("list", "naive", "load_balance"))
    return Move(
        plan_reshard(Reshard(source, destination, shape, itemsize), fabric, order=order, way=way),
        dtype,
        chance.random() < 0.5,
    )


def _random_layout(chance: random.Random, dims: int, ranks: list[int]) -> TensorLayout:
    mesh = chance.choice(
        [mesh for mesh in ((1,), (2,), (4,), (2, 2), (1, 4), (3,), (1, 3), (2, 4)) if prod(mesh) <= len(ranks)]
    )
    spec: list[list[int]] = [[] for _ in range(dims)]
    for axis in chance.sample(range(len(mesh)), len(mesh)):
        if dims and chance.random() < 0.7:
            spec[chance.randrange(dims)].append(axis)
    return TensorLayout(mesh, tuple(chance.sample(ranks, prod(mesh))), tuple(map(tuple, spec)))


def whole(move: Move, salt: int) -> Tensor:
    """The tensor that is moved: every rank makes all of it."""
    values = (torch.arange(prod(move.plan.shape)) * 7 + salt) % 61
    return (values % 2 if move.dtype == "bool" else values).to(getattr(torch, move.dtype)).reshape(move.plan.shape)


def begin(move: Move, rank: int, on: Lane, salt: int) -> Started:
    """Start a move; returns what to wait for, the destination tile and the larger tensor that it
    lies in."""
    plan, tensor = move.plan, whole(move, salt)
    source = destination = around = None
    if rank in plan.source.ranks:
        source = tensor[plan.source.tile(rank, plan.shape).slices].clone()
        if move.strided and source.ndim > 1:
            source = source.transpose(0, -1).contiguous().transpose(0, -1)
    if rank in plan.destination.ranks:
        shape = plan.destination.tile(rank, plan.shape).shape
        around = torch.ones([size + 2 * move.strided for size in shape], dtype=tensor.dtype)
        destination = around[tuple(slice(1, -1) for _ in shape)] if move.strided else around
    return on.start(plan, source, destination), destination, around


def wrong(move: Move, rank: int, destination: Tensor | None, around: Tensor | None, salt: int) -> str:
    """What is wrong with a destination tile, or nothing."""
    if destination is None or around is None:
        return ""
    want = whole(move, salt)[move.plan.destination.tile(rank, move.plan.shape).slices]
    if not torch.equal(destination.to(torch.complex128), want.to(torch.complex128)):
        ways = [step.way for step in move.plan.steps]
        return f"rank {rank}: {move.plan.source} -> {move.plan.destination} {move.plan.shape} {move.dtype} {ways}"
    destination.fill_(1)
    return "" if bool((around.to(torch.complex128) == 1).all()) else f"rank {rank}: wrote beside its tile"


def carry_out(rank: int, seed: int, count: int, ranks: int, name: str) -> list[str]:
    """Random moves one after the other, all started before the first is awaited."""
    moves = random_moves(seed, count, ranks)
    for move in moves:
        lane(name).prepare(move.plan)
    _chance.seed(seed * 31 + rank)
    return await_all(rank, [(salt, move, begin(move, rank, lane(name), salt)) for salt, move in enumerate(moves)])


def await_all(rank: int, started: list[tuple[int, Move, Started]]) -> list[str]:
    """Wait for everything; returns what is wrong."""
    problems: list[str] = []
    for salt, move, (handle, tile, around) in started:
        handle.wait()
        problems.append(wrong(move, rank, tile, around, salt))
    return [problem for problem in problems if problem]


def both_ways(rank: int, seed: int, count: int) -> list[str]:
    """Activations down and gradients up, on two lanes, started in an order of each rank's own."""
    _chance.seed(seed * 31 + rank)
    down, up = lane("delayed down"), lane("delayed up")
    there, back = TensorLayout.parse("(2) S0 R"), TensorLayout.parse("(2)@2 R S0")
    fabric = Fabric(hosts=even_hosts(4, 2), rate=1e6, latency=1e-4, min_chunk=64, max_chunk=256)
    forward = Move(plan_reshard(Reshard(there, back, (37, 21), 4), fabric), "float32", False)
    backward = Move(plan_reshard(Reshard(back, there, (37, 21), 4), fabric), "float32", True)
    started: list[tuple[int, Move, Started]] = []
    for salt in range(count):
        pair = [(forward, down), (backward, up)]
        for move, on in pair if rank % 2 else pair[::-1]:
            started.append((salt, move, begin(move, rank, on, salt)))
    return [
        problem
        for salt, move, (handle, tile, around) in started
        if (problem := (handle.wait(), wrong(move, rank, tile, around, salt))[1])
    ]


def large(rank: int, way: str) -> list[str]:
    """Some megabytes in many chunks, with computation meanwhile."""
    fabric = Fabric(hosts=even_hosts(4, 1), rate=1e9, latency=1e-5, min_chunk=1 << 12, max_chunk=1 << 16)
    source, destination = TensorLayout.parse("(1) R R R"), TensorLayout.parse("(3)@1 R R R")
    move = Move(plan_reshard(Reshard(source, destination, (64, 65, 67), 4), fabric, way=way), "float32", True)  # type: ignore[arg-type]
    handle, tile, around = begin(move, rank, lane("plain"), 3)
    busy = torch.ones(64, 64)
    while not handle.done():
        busy = busy @ busy / 64
    handle.wait()
    return [problem] if (problem := wrong(move, rank, tile, around, 3)) else []


def check_refusals(said: Sequence[Sequence[str]]) -> None:
    """Hold what four ranks were told, as ``refusals`` gives it, to the reasons."""
    assert [len(each) for each in said] == [4, 0, 3, 0]
    assert "Rank 0 passed no tile, but the source layout" in said[0][0]
    assert "but the layout '(2) S0' requires (4,)" in said[0][1]
    assert "8 bytes an element" in said[0][2]
    assert all("passed a tile" in each for each in (said[0][3], said[2][0]))
    assert "requires (8,)" in said[2][2]


def refusals(rank: int) -> list[str]:
    """What ranks are told that start something else than the plan says."""
    plan = plan_reshard(
        Reshard(TensorLayout.parse("(2) S0"), TensorLayout.parse("(2)@2 R"), (8,), 4),
        Fabric(hosts=even_hosts(4, 2), rate=1.0),
    )
    right, large, wide = torch.zeros(4), torch.zeros(8), torch.zeros(4, dtype=torch.float64)
    tries: dict[int, list[tuple[Tensor | None, Tensor | None]]] = {
        0: [(None, None), (large, None), (wide, None), (right, large)],
        2: [(right, large), (None, None), (None, right)],
    }
    said: list[str] = []
    plain = lane("plain")  # by all ranks, also those that try nothing: any of these tests may come first
    for source, destination in tries.get(rank, []):
        try:
            plain.start(plan, source, destination)
        except ReshardError as error:
            said.append(str(error))
    return said


def disagree(rank: int) -> str:
    """Rank 1 has made another plan."""
    fabric = Fabric(hosts=even_hosts(4, 2), rate=1.0)
    plan = plan_reshard(
        Reshard(TensorLayout.parse("(2) S0"), TensorLayout.parse("(2)@2 R"), (8 + (rank == 1),), 4), fabric
    )
    try:
        lane("plain").prepare(plan)
    except ReshardError as error:
        return str(error)
    return ""
