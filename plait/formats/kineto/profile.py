"""Reader of a PyTorch profiler trace (Kineto's JSON) as a profile: times of matrix products,
attention and collectives by shape.

| event | content read (by the sources of pytorch/kineto and torch 2.1 to 2.9, November 2026) |
|---|---|
| ``cpu_op`` with ``Input Dims``, ``Input type`` (``record_shapes=True``) | shape, by ``External id`` |
| ``kernel`` with ``External id``, ``dur`` in microseconds | time of the operator that launched it |
| ``kernel`` with ``Collective name``, ``In msg nelems``, ``dtype``, ``Process Group Ranks`` | a collective |

The time of a product or of attention is the median over runs that overlap no collective. A
collective's kernel includes the wait for its peers, so the shortest of at least ``FEWEST`` runs
counts. Other events are counted and ignored.
"""

from __future__ import annotations

import datetime
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import numpy as np

from plait.core.base.codec.json_stream import read_stream
from plait.core.base.codec.json_text import is_list, is_table
from plait.core.base.errors import JobError
from plait.core.base.files import reason_of
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.numbers import as_number
from plait.core.cluster.profile import AttentionCore, CollectiveKind, Curve, Group, Machine, Point, Product, Profile
from plait.core.model.precision import Precision
from plait.formats.kineto.events import Comm, Ops, TraceEvents

FEWEST = 3
"""Least number of recorded collectives of one size and group of which the shortest is taken."""
PRODUCTS: Mapping[str, int] = {"aten::mm": 0, "aten::addmm": 1, "aten::_scaled_mm": 0}
"""Operators of one matrix product, with the index of the input that is the left matrix."""
PRECISIONS: Mapping[str, Precision] = {
    "c10::BFloat16": "bf16-mixed", "c10::Half": "bf16-mixed", "float": "fp32", "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}  # fmt: skip
"""Precision by the input's type; fp16 is as fast as bf16."""


class Fused(NamedTuple):
    """An attention operator. query: index of the query input. heads: index of the query's head
    dimension. causal: index of the argument for causal masks. yes: texts of this argument that mean
    causal."""

    query: int
    heads: int
    causal: int
    yes: tuple[str, ...] = ("True", "true", "1")


ATTENTION: Mapping[str, Fused] = {
    "aten::_flash_attention_forward": Fused(0, 2, 8), "aten::_flash_attention_backward": Fused(1, 2, 11),
    "aten::_efficient_attention_forward": Fused(0, 2, 9, ("1", "2")),
    "aten::_efficient_attention_backward": Fused(1, 2, 14, ("1", "2")),
    "aten::_scaled_dot_product_cudnn_attention": Fused(0, 1, 6),
    "aten::_scaled_dot_product_cudnn_attention_backward": Fused(1, 1, 14),
}  # fmt: skip
"""Attention operators with fused kernels, by torch's native_functions.yaml."""
COLLECTIVES: Mapping[str, tuple[CollectiveKind, str]] = {
    "allreduce": ("all_reduce", "in"), "all_reduce": ("all_reduce", "in"),
    "_allgather_base": ("all_gather", "out"), "allgather": ("all_gather", "out"),
    "all_gather": ("all_gather", "out"), "allgather_into_tensor_coalesced": ("all_gather", "out"),
    "_reduce_scatter_base": ("reduce_scatter", "in"), "reduce_scatter": ("reduce_scatter", "in"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "in"),
    "all_to_all": ("all_to_all", "in"), "alltoall_base": ("all_to_all", "in"),
    "all_to_allv": ("all_to_all", "in"), "broadcast": ("broadcast", "in"),
}  # fmt: skip
"""Kind of collective by the name that process groups write, and the side (in or out) with the whole
tensor."""
NCCL = re.compile("^nccl", re.IGNORECASE)
MOST_BYTES = 1 << 53


class _Shapes:
    """Products and attention by the ``External id`` of their operators."""

    def __init__(self, over: IgnoredInput) -> None:
        self.over = over
        self.known: dict[int, Product | AttentionCore] = {}

    def add(self, name: Any, args: Mapping[str, Any]) -> None:
        """Add an operator's shape."""
        if name not in PRODUCTS and name not in ATTENTION:
            return
        external = as_number(args.get("External id", args.get("external id")))
        if type(external) is not int or "Input Dims" not in args:
            self.over.note("product(s) and attention without shapes (the profiler's record_shapes)", name)
            return
        try:
            shape = _product(name, args) if name in PRODUCTS else _attention(name, args)
        except (KeyError, IndexError, TypeError, ValueError):
            shape = None
        if shape is None:
            self.over.note("product(s) and attention of a shape, type or mask that no plan uses", name)
        else:
            self.known[external] = shape


def kineto_profile(path: Path, ranks_per_node: int, over: IgnoredInput) -> Profile:
    """Return the profile of one rank's trace. over: ignored input. Raises JobError if the file is
    no trace, or has no usable product, attention or collective."""
    shapes = _Shapes(over)
    events = TraceEvents(over, kinds=("kernels",), operator=shapes.add)
    try:
        header = read_stream(path, {"traceEvents": events.add}, over, bare="traceEvents")
        date = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).date().isoformat()
        world = events.facts(header).world or 1
    except (OSError, ValueError) as error:
        raise JobError(f"cannot be read: {reason_of(error)}", file=str(path), fix="Give a whole trace") from None
    kernels = events.ops(header)
    sent = (kernels.comm >= 0) | kernels.named(NCCL)
    products, attention = _computed(kernels, sent, shapes)
    curves = tuple(_curves(kernels, sent, path.name, ranks_per_node, world))
    if not products and not attention and not curves:
        said = "; ".join(over.lines())
        fix = "Profile with record_shapes=True, three steps or more"
        raise JobError(f"has no product, attention or collective of use{': ' + said if said else ''}",
                       file=str(path), fix=fix)  # fmt: skip
    each = min(ranks_per_node, world)
    machine = Machine(device=_device(header), kind="cuda", ranks=world, ranks_per_node=each, backend="nccl")
    return Profile(machine=machine, date=date, collectives=curves, products=products, attention=attention)


def _device(header: Mapping[str, Any]) -> str:
    found = header.get("deviceProperties")
    first = found[0] if is_list(found) and found else None
    return str(first.get("name", ""))[:100] if is_table(first) else ""


# ---- shapes ----


def _product(name: str, args: Mapping[str, Any]) -> Product | None:
    left = PRODUCTS[name]
    (m, k), (same, n) = args["Input Dims"][left : left + 2]
    precision = PRECISIONS.get(args["Input type"][left])
    if precision is None or k != same:
        return None
    return Product(m=m, k=k, n=n, precision=precision, seconds=1.0)


def _attention(name: str, args: Mapping[str, Any]) -> AttentionCore | None:
    told = ATTENTION[name]
    query, key = args["Input Dims"][told.query : told.query + 2]
    precision = PRECISIONS.get(args["Input type"][told.query])
    causal = str(args["Concrete Inputs"][told.causal])
    if precision is None or causal not in told.yes or len(query) != 4:
        return None
    length = 3 - told.heads  # the other one of dimensions 1 and 2
    return AttentionCore(
        batch=query[0], heads=query[told.heads], queries=query[length], keys=key[length], head_size=query[3],
        precision=precision, backward=name.endswith("_backward"), seconds=1.0,
    )  # fmt: skip


# ---- times ----


def _computed(kernels: Ops, sent: np.ndarray, shapes: _Shapes) -> tuple[tuple[Product, ...], tuple[AttentionCore, ...]]:
    """Return products and attention, each with the median of its times without concurrent
    collectives."""
    end = kernels.start + kernels.length
    order = np.argsort(kernels.start[sent])
    begins, until = kernels.start[sent][order], np.maximum.accumulate(end[sent][order])
    before = np.searchsorted(begins, end)  # collectives that began before each kernel ended
    beside = np.concatenate([[-np.inf], until])[before] > kernels.start
    times: dict[int, float] = defaultdict(float)
    disturbed: set[int] = set()
    for row in np.flatnonzero(~sent & (kernels.length > 0)):
        external = int(kernels.external[row])
        if external in shapes.known:
            times[external] += float(kernels.length[row]) * 1e-6
            if beside[row]:
                disturbed.add(external)
    kernels.over.note("product(s) and attention beside a collective", count=len(disturbed))
    by_shape: dict[Product | AttentionCore, list[float]] = defaultdict(list)
    for external, seconds in times.items():
        if external not in disturbed:
            by_shape[shapes.known[external]].append(seconds)
    found = [
        shape.model_copy(update={"seconds": median(some), "spread": _spread(some)}) for shape, some in by_shape.items()
    ]
    products = tuple(one for one in found if isinstance(one, Product))
    return products, tuple(one for one in found if isinstance(one, AttentionCore))


def _spread(seconds: Sequence[float]) -> float:
    """Return half the interquartile range, relative to the median."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 2 / middle


def _curves(kernels: Ops, sent: np.ndarray, source: str, ranks_per_node: int, world: int) -> Iterable[Curve]:
    """Yield the curves of collectives by kind and group."""
    seconds: dict[tuple[CollectiveKind, int, tuple[int, ...]], list[float]] = defaultdict(list)
    for row in np.flatnonzero(sent & (kernels.length > 0)):
        if key := _collective(kernels.comm_of(int(row))):
            seconds[key].append(float(kernels.length[row]) * 1e-6)
        else:
            what = "collective(s) of no kind, size, type or group that a plan uses"
            kernels.over.note(what, kernels.name_of(int(row))[:60])
    some: dict[tuple[CollectiveKind, Group], dict[int, float]] = defaultdict(dict)
    for (kind, size, ranks), each in seconds.items():
        if len(each) < FEWEST:
            kernels.over.note(f"collective(s) that ran fewer than {FEWEST} times", kind, len(each))
            continue
        group = Group.of(ranks, ranks_per_node, at_once=max(1, world // len(ranks)))
        sizes = some[kind, group]
        sizes[size] = min(*each, sizes.get(size, float("inf")))
    for (kind, group), sizes in some.items():
        points = tuple(Point(bytes=size, seconds=sizes[size]) for size in sorted(sizes))
        yield Curve(kind=kind, group=group, points=points, source=f"Kineto, {source}")


def _collective(comm: Comm | None) -> tuple[CollectiveKind, int, tuple[int, ...]] | None:
    """Return (kind, bytes of the whole tensor, ranks of the group) of a collective; None for
    collectives that no plan uses, and for unevenly spaced ranks."""
    if comm is None or comm.name.lower() not in COLLECTIVES or len(comm.ranks) < 2:
        return None
    kind, side = COLLECTIVES[comm.name.lower()]
    size = comm.bytes if side == "in" else comm.bytes_out
    first, second = comm.ranks[:2]
    evenly = second > first and comm.ranks == tuple(range(first, comm.ranks[-1] + 1, second - first))
    if not evenly or not 0 < size < MOST_BYTES:
        return None
    return kind, size * (len(comm.ranks) if kind == "all_to_all" else 1), comm.ranks
