"""Check the inputs of a custom training loop before the engine computes with them: batches,
learning rates, and values to save with a checkpoint.

``named_states`` returns a run's weights by name, whole or this rank's parts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from plait.core.base.errors import JobError
from plait.core.base.numbers import shown
from plait.core.model.families import check_family
from plait.core.reshard.layouts import Box
from plait.train.checkpoint.folder import file_of
from plait.train.checkpoint.huggingface import contents
from plait.train.checkpoint.ranges import assign_writers, describe_held, ranges_of
from plait.train.comm.tree import gather
from plait.train.comm.wire import sum_over
from plait.train.engine.assembly import RankPart
from plait.train.engine.optimizer import Optimizer
from plait.train.model.documents import are_starts
from plait.train.model.embedding import IGNORED


class OwnBatch(NamedTuple):
    """A batch of whole sequences in host memory: tensors [B, S], int64 except for the weights,
    which are floating-point."""

    tokens: Tensor
    labels: Tensor
    weights: Tensor | None
    starts: Tensor | None


def checked_batch(
    tokens: Tensor, labels: Tensor | None, weights: Tensor | None, starts: Tensor | None,
    *, sequence: int, vocab: int,
) -> OwnBatch:  # fmt: skip
    """Return the batch of tokens [B, S + 1] without labels, or of tokens [B, S] with labels. Raises
    JobError for wrong types and shapes, for ids outside the vocabulary, for weights that are not
    finite, and for wrong document starts."""
    given = {"tokens": tokens, "labels": labels, "weights": weights, "starts": starts}
    for name, one in given.items():
        _check_tensor(name, one, whole=name != "weights")
    length = sequence if labels is not None else sequence + 1
    shape = (len(tokens), length)
    if tuple(tokens.shape) != shape or not len(tokens):
        beside = "beside labels" if labels is not None else "without labels; the last token is only a target"
        problem = f"tokens have shape {tuple(tokens.shape)}, and not [B, {length}], {beside}"
        raise JobError(problem, key="data.sequence_length", fix=f"Give tensors of [B, {length}]")
    _check_ids("tokens", tokens, vocab, ignored=False)
    if labels is None:
        tokens, labels = tokens[:, :-1], tokens[:, 1:]
    for name, one in (("labels", labels), ("weights", weights), ("starts", starts)):
        if one is not None and tuple(one.shape) != tuple(tokens.shape):
            problem = f"{name} have shape {tuple(one.shape)}, and the tokens are [{len(tokens)}, {sequence}]"
            raise JobError(problem, key="data.sequence_length", fix=f"Give tensors of [{len(tokens)}, {sequence}]")
    _check_ids("labels", labels, vocab, ignored=True)
    if weights is not None and not bool(torch.isfinite(weights).all()):
        raise JobError("weights are not all finite", key="weights", fix="Give 0 to what is not to count")
    if starts is not None and not are_starts(starts.cpu()):
        raise JobError("starts are not, for each token, the position of its document's first", key="starts",
                       fix="Of documents of 2 and 3 tokens they are 0, 0, 2, 2, 2")  # fmt: skip
    return OwnBatch(
        tokens.cpu().long().contiguous(), labels.cpu().long().contiguous(),
        None if weights is None else weights.cpu(), None if starts is None else starts.cpu().long(),
    )  # fmt: skip


def _check_tensor(name: str, one: object, *, whole: bool) -> None:
    if one is None and name != "tokens":
        return
    if not isinstance(one, Tensor):
        fix = "Use torch.as_tensor"
        if isinstance(one, Mapping | tuple):
            fix = "Pass its tensors separately: engine.step(tokens, labels, weights=...)"
        raise JobError(f"{name} are a {type(one).__name__}, no tensor", key=name, fix=fix)
    if whole and (one.is_floating_point() or one.is_complex() or one.dtype == torch.bool):
        raise JobError(f"{name} are {one.dtype}, and ids are whole numbers", key=name, fix="Give int64")
    if one.ndim != 2:
        raise JobError(f"{name} have shape {tuple(one.shape)}", key=name, fix="Give [B, S], a row for each sequence")


def _check_ids(name: str, ids: Tensor, vocab: int, *, ignored: bool) -> None:
    counted = ids[ids != IGNORED] if ignored else ids
    if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= vocab):
        problem = f"{name} from {int(counted.min())} to {int(counted.max())} are not all of the model's {vocab}"
        also = f", and {IGNORED} where a target does not count" if ignored else ""
        raise JobError(problem, key="model.vocab", fix=f"Ids are 0 to {vocab - 1}{also}")


def checked_number(name: str, value: object, *, zero: bool) -> float:
    """Return ``value`` (also a scalar of numpy or torch) as a float. Raises JobError unless it is
    finite and above 0. zero: 0 is allowed too."""
    try:
        found = math.nan if isinstance(value, bool | str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found) or found < 0 or (found == 0 and not zero):
        least = "of at least 0" if zero else "above 0"
        raise JobError(f"{shown(value)} is not allowed", key=name, fix=f"Allowed: a number {least}")
    return found


def check_loader(loader: object) -> None:
    """Raise JobError if ``loader`` is not iterable."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise JobError(f"{shown(loader)} is no iterable", key="loader", fix="Give a list or a DataLoader")


def check_own(own: object, key: str = "own") -> None:
    """Raise JobError for values that cannot be saved as JSON in a checkpoint. key: the name of the
    value in the error message."""
    fix = "Give a dict of numbers, texts, lists and dicts; tensors as tensor.tolist()"
    if own is not None and not isinstance(own, Mapping):
        raise JobError(f"a {type(own).__name__} is no dict", key=key, fix=fix)
    for name, value in dict[Any, Any](own or {}).items():
        try:
            json.dumps({name: value})
        except (TypeError, ValueError) as error:
            raise JobError(f"{shown(name)} cannot be saved: {error}", key=key, fix=fix) from None


Parts = dict[str, list[tuple[Box, Tensor]]]


def named_states(part: RankPart, optimizer: Optimizer, kind: Literal["full", "sharded", "huggingface"]) -> Any:
    """Return the master weights by name, in the form that ``Engine.state_dict`` describes. Called
    by all ranks at the same point; whole tensors are summed over the ranks one at a time."""
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
    """Return, by tensor name, the tensor's shape and the boxes that this rank contributes; in the
    same order on all ranks."""
    written = assign_writers(gather(describe_held(ranges)))
    found: dict[str, tuple[tuple[int, ...], set[Box]]] = {}
    for key, stored in sorted(written.tensors.items()):
        mine = {box for file, box in stored.parts if file == file_of(part.rank)}
        found[key.partition("/")[2]] = stored.shape, mine
    return found


def _renamed(part: RankPart, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a run's tensors under Hugging Face's names and in its shapes. whole: all tensors of
    the model."""
    found: dict[str, Tensor] = {}
    for name, members in contents(part.plan.model).items():
        value = whole[members[0][0].name].new_empty(members[0][1].shape)
        for piece, at in members:
            one = whole[piece.name]
            value[at.ranges(piece)] = one.t() if at.transposed else one
        found[name] = value
    return found
