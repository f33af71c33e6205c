"""Execute reshard plans: every rank sends and receives its own messages, in the background, while
computation continues.

A `Lane` is one background thread and its process groups; it serves any number of plans. Reshards of
one lane run one after the other in the order of their start, which must be the same on every rank.
Reshards of two lanes are independent: activations of a pipeline go down one lane while gradients
come up the other. `Lane` explains staging, gloo and NCCL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.base.errors import ReshardError
from plait.core.reshard.layouts import Box, boxes_of_range, local_copies
from plait.core.reshard.plan import Act, Message, ReshardPlan, messages, script
from plait.train.comm.background import Background, BackgroundHandle
from plait.train.comm.log import Messages
from plait.train.comm.tree import differing_ranks
from plait.train.comm.world import new_group
from plait.train.machine.device import RankDevice


class Lane:
    """One background thread that reshards, and its process groups.

    Its ranks open it together; ranks that share several lanes open them in the same order. ranks:
    the lane's ranks; None: all. messages: recorder of its messages.

    The thread executes the messages of `plait.core.reshard.plan`, which cannot deadlock. Boxes that
    are not contiguous are packed chunk by chunk, so that staging needs a few chunks and not a copy
    of the tensor. A chunk that is passed on is sent from the buffer it arrived in.

    gloo: one group; a message without a receive waits at its sender. NCCL (and RCCL): all
    point-to-point messages of two ranks share one communicator and one stream, whatever their tags.
    So there are two groups, towards higher ranks and towards lower ones; in each, both ends see the
    same order. With NCCL ranks post in the list's order, since kernels of one thread may share a
    hardware queue (`script`'s ``in_order``).
    """

    def __init__(
        self, device: RankDevice, ranks: Sequence[int] | None = None, messages: Messages | None = None
    ) -> None:
        self.device, self.rank, self.messages = device, dist.get_rank(), messages
        self.ranks = sorted(ranks if ranks is not None else range(dist.get_world_size()))
        self._up = new_group(self.ranks, device.backend, few=True)
        self._down = self._up if device.backend == "gloo" else new_group(self.ranks, device.backend, few=True)
        self._pool: list[Tensor] = []
        self._background = Background(device, "reshard")

    def prepare(self, plan: ReshardPlan) -> None:
        """Verify that all ranks of the lane have the same plan, and connect pairs that will
        communicate. Called once per plan by all ranks together.

        Raises ReshardError naming the ranks that have another plan.
        """
        if differ := differing_ranks(plan.key, self.ranks):
            raise ReshardError(
                f"Ranks {differ} have a different reshard plan than rank {self.ranks[0]}. "
                "Use equal arguments on all ranks."
            )
        # A first message is a rendezvous: without one order of the pairs on all ranks, two could deadlock.
        token = torch.zeros(1, dtype=torch.uint8, device=self.device.torch_device)
        for src, dst in sorted({(message.src, message.dst) for message in messages(plan)}):
            if self.rank in (src, dst):
                self._post(Message(src, dst, 0, 0, 1), token).wait()
        self.device.synchronize()

    def start(self, plan: ReshardPlan, source: Tensor | None, destination: Tensor | None) -> BackgroundHandle:
        """Start to move this rank's tile ``source`` and to fill its tile ``destination``; None if
        the rank has no such tile.

        Either may have any strides (a part of a larger tensor). Raises ReshardError if shape or
        dtype do not match the plan.
        """
        _check(plan, self.rank, source, "source")
        _check(plan, self.rank, destination, "destination")
        if source is not None and destination is not None and source.dtype != destination.dtype:
            raise ReshardError(
                f"Rank {self.rank}: the source tile is {source.dtype}, the destination tile {destination.dtype}. "
                "Convert before or after."
            )
        if self.messages is None:
            return self._background.start(lambda: self._carry(plan, source, destination))
        tile = source if source is not None else destination
        size = 0 if tile is None else tile.numel() * tile.element_size()
        return self._background.start(self.messages.move(size, lambda: self._carry(plan, source, destination)))

    def close(self) -> None:
        """End the thread after all started reshards, and destroy the groups. Called by every rank
        of the lane."""
        self._background.close()
        for group in {self._up, self._down}:
            dist.destroy_process_group(group)

    def _carry(self, plan: ReshardPlan, source: Tensor | None, destination: Tensor | None) -> None:
        """Execute this rank's part of the plan."""
        tiles = _Tiles(plan, self.rank, source, destination)
        tiles.copy_local()
        part = _part(plan, self.rank, in_order=self._up is not self._down)
        receiving: dict[int, _Posted] = {}
        sending: dict[int, _Posted] = {}
        held: dict[_Key, Tensor] = {}  # staging buffers of received chunks that will be passed on
        left = Counter(part.forwards)
        for verb, number in part.acts:
            message = part.listed[number]
            key = _Key(*message[2:])
            if verb == "receive":
                receiving[number] = self._begin(message, *self._buffer(tiles, message, receiving=True))
            elif verb == "send" and key in held:
                stage = held[key]
                sending[number] = self._begin(message, stage[: (message.stop - message.start) * plan.itemsize], stage)
            elif verb == "send":
                sending[number] = self._begin(message, *self._buffer(tiles, message, receiving=False))
            elif number in receiving:
                posted = receiving.pop(number)
                buffer, stage = posted.buffer, posted.stage
                self._settle(posted)
                if stage is not None:
                    tiles.unpack(message, buffer)
                    if left[key]:
                        held[key] = stage
                    else:
                        self._pool.append(stage)
            else:
                posted = sending.pop(number)
                stage = posted.stage
                self._settle(posted)
                left[key] -= 1
                if stage is not None and not (
                    key in held and left[key] > 0
                ):  # else the buffer will be sent to another rank
                    held.pop(key, None)
                    self._pool.append(stage)

    def _begin(self, message: Message, buffer: Tensor, stage: Tensor | None) -> _Posted:
        record = 0
        if self.messages is not None:
            sends = message.src == self.rank
            record = self.messages.post(message.dst if sends else message.src, sends=sends, size=buffer.numel())
        return _Posted(self._post(message, buffer), buffer, stage, record)

    def _settle(self, posted: _Posted) -> None:
        """Wait until a message has arrived or left; on a GPU the thread's stream waits, not the
        host."""
        posted.work.wait()
        if self.messages is not None:
            self.messages.settled(posted.record)

    def _buffer(self, tiles: _Tiles, message: Message, *, receiving: bool) -> tuple[Tensor, Tensor | None]:
        """Return the bytes to send from or receive into, and their staging buffer; None if the
        bytes lie in the tile itself."""
        direct = tiles.direct(message, receiving)
        if direct is not None:
            return direct, None
        nbytes = (message.stop - message.start) * tiles.plan.itemsize
        stage = self._stage(nbytes)
        if not receiving:
            tiles.pack(message, stage[:nbytes])
        return stage[:nbytes], stage

    def _stage(self, nbytes: int) -> Tensor:
        while self._pool:
            stage = self._pool.pop()
            if stage.numel() >= nbytes:
                return stage
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device.torch_device)

    def _post(self, message: Message, buffer: Tensor) -> Any:
        group = self._up if message.src < message.dst else self._down
        if message.src == self.rank:
            return dist.isend(buffer, message.dst, group=group, tag=message.step)
        return dist.irecv(buffer, message.src, group=group, tag=message.step)


class _Key(NamedTuple):
    """Key of a chunk that a rank receives and passes on: the plan's step, and the range of elements
    in the step's box."""

    step: int
    start: int
    stop: int


class _Posted(NamedTuple):
    """A message in flight; keeps its memory alive. stage: the staging buffer of ``buffer``, if any.
    record: the number of its record."""

    work: Any
    buffer: Tensor
    stage: Tensor | None
    record: int


class _RankScript(NamedTuple):
    """One rank's part of a plan: its messages, its actions, and how often it sends each chunk that
    it has received."""

    listed: list[Message]
    acts: list[Act]
    forwards: dict[_Key, int]


@lru_cache(maxsize=64)
def _part(plan: ReshardPlan, rank: int, *, in_order: bool) -> _RankScript:
    listed = [message for message in messages(plan) if rank in message[:2]]
    arriving = {_Key(*message[2:]) for message in listed if message.dst == rank}
    forwards = Counter(key for message in listed if message.src == rank and (key := _Key(*message[2:])) in arriving)
    return _RankScript(listed, script(listed, rank, in_order=in_order), forwards)


def _check(plan: ReshardPlan, rank: int, tile: Tensor | None, side: str) -> None:
    layout = plan.source if side == "source" else plan.destination
    if (rank in layout.ranks) != (tile is not None):
        has = "passed a tile" if tile is not None else "passed no tile"
        raise ReshardError(
            f"Rank {rank} {has}, but the {side} layout '{layout}' has tiles on ranks {layout.ranks}. "
            "Pass None on all other ranks."
        )
    if tile is None:
        return
    wanted = layout.tile(rank, plan.shape).shape
    if tuple(tile.shape) != wanted:
        raise ReshardError(
            f"The {side} tile of rank {rank} has shape {tuple(tile.shape)}, "
            f"but the layout '{layout}' requires {wanted}."
        )
    if tile.element_size() != plan.itemsize:
        raise ReshardError(
            f"The {side} tile of rank {rank} is {tile.dtype}, {tile.element_size()} bytes an element; "
            f"the plan is for {plan.itemsize}."
        )


class _Tiles:
    """A rank's source and destination tile of a reshard, and the boxes of its messages in them."""

    def __init__(self, plan: ReshardPlan, rank: int, source: Tensor | None, destination: Tensor | None) -> None:
        self.plan, self.rank = plan, rank
        self._source = None if source is None else (source.detach(), plan.source.tile(rank, plan.shape))
        self._destination = (
            None if destination is None else (destination.detach(), plan.destination.tile(rank, plan.shape))
        )
        self._seen: dict[tuple[int, bool], tuple[Tensor, Tensor | None]] = {}

    def copy_local(self) -> None:
        """Copy the boxes that this rank both has and needs."""
        for box, rank in local_copies(self.plan.source, self.plan.destination, self.plan.shape):
            if rank == self.rank:
                _cut(self._destination, box).copy_(_cut(self._source, box))

    def direct(self, message: Message, receiving: bool) -> Tensor | None:
        """Return the message's bytes in the tile itself; None if the box is not contiguous
        there."""
        flat = self._box(message, receiving)[1]
        return None if flat is None else flat[message.start * self.plan.itemsize : message.stop * self.plan.itemsize]

    def pack(self, message: Message, buffer: Tensor) -> None:
        """Copy a message's elements from the source tile into ``buffer``."""
        for part, view in self._parts(message, buffer, receiving=False):
            part.copy_(view)

    def unpack(self, message: Message, buffer: Tensor) -> None:
        """Copy a message's elements from ``buffer`` into the destination tile."""
        for part, view in self._parts(message, buffer, receiving=True):
            view.copy_(part)

    def _parts(self, message: Message, buffer: Tensor, *, receiving: bool) -> list[tuple[Tensor, Tensor]]:
        view, _ = self._box(message, receiving)
        packed, at, found = buffer.view(view.dtype), 0, list[tuple[Tensor, Tensor]]()
        for box in boxes_of_range(tuple(view.shape), message.start, message.stop):
            found.append((packed[at : at + box.elements].view(box.shape), view[box.slices]))
            at += box.elements
        return found

    def _box(self, message: Message, receiving: bool) -> tuple[Tensor, Tensor | None]:
        """Return the task's box in its source or destination tile, and the box's bytes if they are
        contiguous."""
        task = self.plan.steps[message.step].task
        from_source = not receiving and self.rank in task.holders
        key = (message.step, from_source)
        if key not in self._seen:
            view = _cut(self._source if from_source else self._destination, task.box)
            self._seen[key] = (view, view.reshape(-1).view(torch.uint8) if view.is_contiguous() else None)
        return self._seen[key]


def _cut(tile: tuple[Tensor, Box] | None, box: Box) -> Tensor:
    assert tile is not None, "the plan needs a tile on this rank, which start() has checked"
    return tile[0][box.within(tile[1]).slices]
