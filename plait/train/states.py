"""A run's weights by name, while it is on: whole tensors put together from all ranks, or this rank's
parts."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from plait.core.model.families import check_family
from plait.core.reshard.layouts import Box
from plait.train.checkpoint.huggingface import contents
from plait.train.checkpoint.manifest import file_of
from plait.train.checkpoint.ranges import assign, described, ranges_of
from plait.train.comm.objects import gather
from plait.train.comm.wire import sum_over
from plait.train.engine.assembly import RankPart
from plait.train.engine.optimizer import Optimizer

Parts = dict[str, list[tuple[Box, Tensor]]]


def named_states(part: RankPart, optimizer: Optimizer, kind: Literal["full", "sharded", "huggingface"]) -> Any:
    """Master weights by name. Called by all ranks at the same point; one whole tensor at a time travels."""
    if part.shards:
        part.shards.settle()
    ranges = ranges_of({"master": optimizer.state()["master"]}, optimizer.held)
    own: Parts = {}
    for one in ranges:
        own.setdefault(one.key.partition("/")[2], []).append((one.box, one.tensor.detach()))
    if kind == "sharded":
        return {name: [(box, tensor.cpu()) for box, tensor in boxes] for name, boxes in own.items()}
    if kind == "huggingface":
        check_family(part.plan.model)
    whole: dict[str, Tensor] = {}
    for name, (shape, mine) in _assigned(part, ranges).items():
        value = torch.zeros(shape, dtype=optimizer.gradients.dtype, device=part.device.torch_device)
        for box, tensor in own.get(name, ()):
            if box in mine:
                value[box.slices] = tensor
        sum_over(part.groups.world, value)
        if part.rank == 0:
            whole[name] = value.cpu()
    return _renamed(part, whole) if kind == "huggingface" and part.rank == 0 else whole


def _assigned(part: RankPart, ranges: Any) -> dict[str, tuple[tuple[int, ...], set[Box]]]:
    """By tensor, in one order on all ranks: its shape, and the boxes that this rank gives."""
    written = assign(gather(described(ranges)))
    found: dict[str, tuple[tuple[int, ...], set[Box]]] = {}
    for key, stored in sorted(written.tensors.items()):
        mine = {box for file, box in stored.parts if file == file_of(part.rank)}
        found[key.partition("/")[2]] = stored.shape, mine
    return found


def _renamed(part: RankPart, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of Hugging Face, in its shapes."""
    found: dict[str, Tensor] = {}
    for name, members in contents(part.plan.model).items():
        value = whole[members[0][0].name].new_empty(members[0][1].shape)
        for piece, at in members:
            one = whole[piece.name]
            value[at.ranges(piece)] = one.t() if at.transposed else one
        found[name] = value
    return found
