"""What a loop of one's own hands to the engine, checked before anything is computed with it: whole batches,
rates, and what is to be saved."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.core.base.errors import JobError
from plait.core.base.numbers import shown
from plait.train.model.documents import are_starts
from plait.train.model.loss import IGNORED


class OwnBatch(NamedTuple):
    """Tensors [B, S] of whole sequences in host memory: int64, weights floating."""

    tokens: Tensor
    labels: Tensor
    weights: Tensor | None
    starts: Tensor | None


def own_batch(
    tokens: Tensor, labels: Tensor | None, weights: Tensor | None, starts: Tensor | None,
    *, sequence: int, vocab: int,
) -> OwnBatch:  # fmt: skip
    """Tokens [B, S + 1] alone, or [B, S] beside labels. Raises JobError for what is no such tensor, for ids
    that the model has not, and for weights that are not finite."""
    given = {"tokens": tokens, "labels": labels, "weights": weights, "starts": starts}
    for name, one in given.items():
        _check_tensor(name, one, whole=name != "weights")
    length = sequence if labels is not None else sequence + 1
    shape = (len(tokens), length)
    if tuple(tokens.shape) != shape or not len(tokens):
        beside = "beside labels" if labels is not None else "without labels, of which the last is a target alone"
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
            fix = "Give the tensors that it has one by one: engine.step(tokens, labels, weights=...)"
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


def own_number(name: str, value: object, *, zero: bool) -> float:
    """``value``, also of numpy or torch, as a float. Raises JobError for what is no finite number above 0.
    zero: 0 is one too."""
    try:
        found = math.nan if isinstance(value, bool | str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found) or found < 0 or (found == 0 and not zero):
        least = "of at least 0" if zero else "above 0"
        raise JobError(f"{shown(value)} is not allowed", key=name, fix=f"Allowed: a number {least}")
    return found


def check_loader(loader: object) -> None:
    """Raise JobError for what nothing can be taken from."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise JobError(f"{shown(loader)} is no iterable", key="loader", fix="Give a list or a DataLoader")


def check_own(own: object, key: str = "own") -> None:
    """Raise JobError for what no checkpoint can give back. key: what it is, for people."""
    fix = "Give a dict of numbers, texts, lists and dicts; tensors as tensor.tolist()"
    if own is not None and not isinstance(own, Mapping):
        raise JobError(f"a {type(own).__name__} is no dict", key=key, fix=fix)
    for name, value in dict[Any, Any](own or {}).items():
        try:
            json.dumps({name: value})
        except (TypeError, ValueError) as error:
            raise JobError(f"{shown(name)} cannot be saved: {error}", key=key, fix=fix) from None
