"""A trace of PyTorch's profiler (Kineto's JSON) as a profile: products, attention and collectives by shape.

| event | what is taken (pytorch/kineto and torch 2.1 to 2.9, read November 2026) |
|---|---|
| ``cpu_op`` with ``Input Dims``, ``Input type`` (``record_shapes=True``) | shape, by ``External id`` |
| ``kernel`` with ``External id``, ``dur`` in microseconds | time of the operator that launched it |
| ``kernel`` with ``Collective name``, ``In msg nelems``, ``dtype``, ``Process Group Ranks`` | a collective |

A product's or attention's time is the median of those that ran beside no collective. A collective's kernel
waits for the other ranks, so the shortest of at least ``FEWEST`` counts. All else is counted and passed over.
"""

from __future__ import annotations

import datetime
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple, cast

from plait.core.base.codec.json_stream import read_stream
from plait.core.base.errors import JobError
from plait.core.base.files import reason_of
from plait.core.base.numbers import as_number
from plait.core.base.passed_over import PassedOver
from plait.core.cluster.profile import AttentionCore, CollectiveKind, Curve, Group, Machine, Point, Product, Profile
from plait.core.model.precision import Precision

FEWEST = 3
"""Collectives of one size and group."""
MOST_EVENTS, MOST_RANKS = 2_000_000, 1 << 20
LATEST = 1e15
"""Microseconds."""
PRODUCTS: Mapping[str, int] = {"aten::mm": 0, "aten::addmm": 1, "aten::_scaled_mm": 0}
"""Operators of one product, and which of their inputs is the left matrix."""
PRECISIONS: Mapping[str, Precision] = {
    "c10::BFloat16": "bf16-mixed", "c10::Half": "bf16-mixed", "float": "fp32", "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}  # fmt: skip
"""Types of inputs; fp16 is as fast as bf16."""


class Fused(NamedTuple):
    """An attention operator. query: which input. heads: which dimension of it. causal: which argument says
    so. yes: texts that do."""

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
"""Those whose kernels are one; by torch's native_functions.yaml."""
COLLECTIVES: Mapping[str, tuple[CollectiveKind, str]] = {
    "allreduce": ("all_reduce", "In msg nelems"), "all_reduce": ("all_reduce", "In msg nelems"),
    "_allgather_base": ("all_gather", "Out msg nelems"), "allgather": ("all_gather", "Out msg nelems"),
    "all_gather": ("all_gather", "Out msg nelems"), "allgather_into_tensor_coalesced": ("all_gather", "Out msg nelems"),
    "_reduce_scatter_base": ("reduce_scatter", "In msg nelems"), "reduce_scatter": ("reduce_scatter", "In msg nelems"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "In msg nelems"),
    "all_to_all": ("all_to_all", "In msg nelems"), "alltoall_base": ("all_to_all", "In msg nelems"),
    "all_to_allv": ("all_to_all", "In msg nelems"), "broadcast": ("broadcast", "In msg nelems"),
}  # fmt: skip
"""Names as process groups write them, and which count is of the whole tensor."""
BYTES = {"BFloat16": 2, "Half": 2, "Float": 4, "Double": 8, "Int": 4, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1,
         "Float8_e4m3fn": 1, "Float8_e5m2": 1}  # fmt: skip


class Kernel(NamedTuple):
    """Times in microseconds."""

    external: int
    start: float
    length: float


@dataclass
class KinetoEvents:
    """What of a trace is of use. operators: by ``External id``, the product or attention. kernels: that may
    be theirs. sent: intervals of collectives. collectives: seconds by kind, bytes and ranks."""

    over: PassedOver
    operators: dict[int, Product | AttentionCore] = field(default_factory=dict[int, Any])
    kernels: list[Kernel] = field(default_factory=list[Kernel])
    sent: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    collectives: dict[tuple[CollectiveKind, int, tuple[int, ...]], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, event: Any) -> None:
        """One of ``traceEvents``. Raises ValueError for too many of use."""
        if not isinstance(event, dict) or event.get("ph") != "X":
            return
        values = cast("dict[str, Any]", event)
        given, category = values.get("args"), str(values.get("cat", "")).lower()
        args = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        if category in ("cpu_op", "operator"):
            self._operator(str(values.get("name", "")), args)
        elif category == "kernel":
            self._kernel(values, args)

    def _operator(self, name: str, args: Mapping[str, Any]) -> None:
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
            self._room()
            self.operators[external] = shape

    def _kernel(self, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        start, length = as_number(event.get("ts")), as_number(event.get("dur"))
        if not (_number(start) and _number(length) and 0 < length <= LATEST and abs(start) <= LATEST * 1e3):
            self.over.note("kernel(s) of which time or length cannot be", str(event.get("name"))[:60])
            return
        self._room()
        if "Collective name" in args or str(event.get("name", "")).lower().startswith("nccl"):
            self.sent.append((start, start + length))
            self._collective(args, length * 1e-6)
        elif type(external := as_number(args.get("External id", args.get("external id")))) is int:
            self.kernels.append(Kernel(external, start, length))

    def _collective(self, args: Mapping[str, Any], seconds: float) -> None:
        kind, counted = COLLECTIVES.get(str(args.get("Collective name", "")).lower(), ("send", ""))
        ranks, size = _ranks(args.get("Process Group Ranks")), as_number(args.get(counted))
        item = BYTES.get(str(args.get("dtype")).removeprefix("c10::"))
        if not counted or not ranks or not item or type(size) is not int or not 0 < size < 1 << 50:
            what = "collective(s) of no kind, size, type or group that a plan uses"
            self.over.note(what, str(args.get("Collective name", "no name"))[:60])
            return
        whole = size * item * (len(ranks) if kind == "all_to_all" else 1)
        self.collectives[kind, whole, ranks].append(seconds)

    def _room(self) -> None:
        if len(self.kernels) + len(self.operators) + len(self.sent) > MOST_EVENTS:
            raise ValueError(f"it has more than {MOST_EVENTS:,} kernels and operators: profile fewer steps")


def kineto_profile(path: Path, ranks_per_node: int, over: PassedOver) -> Profile:
    """The profile of one rank's trace. Raises JobError for a file that is none, or that tells nothing."""
    events = KinetoEvents(over)
    try:
        header = read_stream(path, {"traceEvents": events.add}, over, bare="traceEvents")
        date = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).date().isoformat()
    except (OSError, ValueError) as error:
        raise JobError(f"cannot be read: {reason_of(error)}", file=str(path), fix="Give a whole trace") from None
    world = _world(header, events)
    products, attention = _computed(events)
    curves = tuple(_curves(events, path.name, ranks_per_node, world))
    if not products and not attention and not curves:
        said = "; ".join(over.lines())
        fix = "Profile with record_shapes=True, three steps or more"
        raise JobError(f"has no product, attention or collective of use{': ' + said if said else ''}",
                       file=str(path), fix=fix)  # fmt: skip
    each = min(ranks_per_node, world)
    machine = Machine(device=_device(header), kind="cuda", ranks=world, ranks_per_node=each, backend="nccl")
    return Profile(machine=machine, date=date, collectives=curves, products=products, attention=attention)


def _world(header: Mapping[str, Any], events: KinetoEvents) -> int:
    info = header.get("distributedInfo")
    said = info.get("world_size") if isinstance(info, dict) else None
    most = max((max(ranks) + 1 for _, _, ranks in events.collectives), default=1)
    return max(most, said) if type(said) is int and 0 < said <= MOST_RANKS else most


def _device(header: Mapping[str, Any]) -> str:
    found = header.get("deviceProperties")
    first = found[0] if isinstance(found, list) and found else {}
    return str(first.get("name", ""))[:100] if isinstance(first, dict) else ""


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
    length = 3 - told.heads  # the other of the two
    return AttentionCore(
        batch=query[0], heads=query[told.heads], queries=query[length], keys=key[length], head_size=query[3],
        precision=precision, backward=name.endswith("_backward"), seconds=1.0,
    )  # fmt: skip


def _ranks(text: Any) -> tuple[int, ...]:
    """Of a group, as it stands in a trace; none where some are left out, or they are not evenly spaced."""
    if (
        not isinstance(text, str)
        or len(text) > 1 << 20
        or not re.fullmatch(r"\[\s*\d{1,7}(?:\s*,\s*\d{1,7})+\s*\]", text)
    ):
        return ()
    ranks = tuple(map(int, text.strip("[] ").split(",")))
    step = ranks[1] - ranks[0]
    return ranks if step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)) else ()


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- times ----


def _computed(events: KinetoEvents) -> tuple[tuple[Product, ...], tuple[AttentionCore, ...]]:
    """Products and attention, each with the median of its times."""
    ends = _merged(events.sent)
    times: dict[int, float] = defaultdict(float)
    beside: set[int] = set()
    for kernel in events.kernels:
        if kernel.external in events.operators:
            times[kernel.external] += kernel.length * 1e-6
            if _overlaps(ends, kernel.start, kernel.start + kernel.length):
                beside.add(kernel.external)
    events.over.note("product(s) and attention beside a collective", count=len(beside))
    by_shape: dict[Product | AttentionCore, list[float]] = defaultdict(list)
    for external, seconds in times.items():
        if external not in beside:
            by_shape[events.operators[external]].append(seconds)
    found = [
        shape.model_copy(update={"seconds": median(some), "spread": _spread(some)}) for shape, some in by_shape.items()
    ]
    products = tuple(one for one in found if isinstance(one, Product))
    return products, tuple(one for one in found if isinstance(one, AttentionCore))


def _spread(seconds: Sequence[float]) -> float:
    """Half the distance between the quartiles, relative."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 2 / middle


def _merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _overlaps(merged: Sequence[tuple[float, float]], start: float, end: float) -> bool:
    at = bisect_left(merged, (end,))
    return at > 0 and merged[at - 1][1] > start


def _curves(events: KinetoEvents, source: str, ranks_per_node: int, world: int) -> Iterable[Curve]:
    """Collectives by kind and group."""
    some: dict[tuple[CollectiveKind, Group], dict[int, float]] = defaultdict(dict)
    for (kind, size, ranks), seconds in events.collectives.items():
        if len(seconds) < FEWEST:
            events.over.note(f"collective(s) that ran fewer than {FEWEST} times", kind, len(seconds))
            continue
        group = Group.of(ranks, ranks_per_node, at_once=max(1, world // len(ranks)))
        sizes = some[kind, group]
        sizes[size] = min(*seconds, sizes.get(size, float("inf")))
    for (kind, group), sizes in some.items():
        points = tuple(Point(bytes=size, seconds=sizes[size]) for size in sorted(sizes))
        yield Curve(kind=kind, group=group, points=points, source=f"Kineto, {source}")
