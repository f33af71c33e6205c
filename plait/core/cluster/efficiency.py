"""Efficiency: the share of a cluster's nominal peaks that a training step reaches, as constants
with their origin.

``specs/efficiency/*.toml`` has one file for each generation of devices; a cluster's file names one
and may replace single constants. ``step.seconds.rates`` turns them into seconds;
``plan.calibrate.fit`` fits them to measured steps. ``Overhead`` is the device memory that holds no
tensors, and the part of it that must not be planned for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from plait.core.base.codec.data import NotNegative, Section
from plait.core.base.codec.toml_text import read_toml
from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError, nearest
from plait.core.model.precision import QUANTISED, Precision


class Constant(Section):
    """A number of a cluster or efficiency file, with its source, date and uncertainty."""

    value: Annotated[float, Field(ge=0, le=1e30)]
    """The number: bytes, seconds, FLOP/s, bytes/s, or a plain ratio."""
    source: str
    """Source of the number."""
    date: Annotated[str, Field(pattern=r"^\d{4}(-\d{2}){0,2}$")]
    """Date of the source: year, or with month and day."""
    error: NotNegative = 0.0
    """Standard deviation of the number, relative to it."""
    outlier: bool | None = None
    """``true``: the value is correct, though it lies far outside of the values of shipped
    clusters."""


class Links(Section):
    """Performance of collectives on links of one kind."""

    share: Constant
    """Share of a link's rate that large messages reach."""
    latency: Constant
    """Latency of a collective of two ranks, as a multiple of the tier's; a group of n takes log2 n
    times as long."""
    hop: Constant
    """Latency of each rank that a ring passes, as a multiple of the tier's latency."""
    half: Constant
    """Bytes of a rank's part of a message at which half of ``share`` is reached."""


class Spread(Section):
    """Standard deviations of log(predicted / measured) for steps that were left out of a fit,
    scaled so that four fifths of these steps lie between p10 and p90."""

    node: Constant
    """Spread for jobs on one node."""
    nodes: Constant
    """Spread for jobs on several nodes, with at most short pipelines."""
    pipeline: Constant
    """Spread for jobs on several nodes, with long pipelines."""


class Efficiency(Section):
    """Shares of a device's and its links' peak rates that a training step reaches, and
    overheads."""

    matmul: Constant
    """Share of the peak that large matrix products reach."""
    matmul_fp8: Constant
    """Share of the peak that large matrix products reach in fp8, quantisation included."""
    matmul_mxfp8: Constant
    """Share of the peak that large matrix products reach in mxfp8, quantisation included."""
    matmul_nvfp4: Constant
    """Share of the peak that large matrix products reach in nvfp4, quantisation included."""
    matmul_wave: Constant
    """Elements of a product's result that keep half the device busy: a product m x k x n takes 1 +
    wave / (m n) times as long."""
    matmul_depth: Constant
    """Terms of a sum that take as long as its start and end: a product m x k x n takes 1 + depth /
    k times as long."""
    matmul_odd: Constant
    """Slowdown factor of attention's products whose head size is no multiple of 8, which tensor
    cores cannot do."""
    matmul_launch: Constant
    """Overhead in seconds of each matrix product, however small it is."""
    attention_forward: Constant
    """Share of the peak that a fused attention kernel reaches in the forward of long sequences."""
    attention_backward: Constant
    """Share of the peak that a fused attention kernel reaches in the backward of long sequences."""
    attention_short: Constant
    """Keys at which the fused kernel reaches half of these shares."""
    attention_launch: Constant
    """Overhead in seconds of each attention, however small it is."""
    attention_score_bytes: Constant
    """Bytes moved in the forward for each of the queries x keys scores that attention without a
    fused kernel writes to memory; twice as many in the backward."""
    memory: Constant
    """Share of the memory's rate that elementwise operations reach."""
    logit_bytes: Constant
    """Bytes that the loss moves for each logit, forward and backward."""
    elementwise: Constant
    """Bytes that elementwise operations move, as a multiple of the least that fused operations
    would move."""
    inside: Links
    """Performance of links between the ranks of a node."""
    across: Links
    """Performance of links between nodes."""
    tiers: Literal["sum", "slowest"] = "sum"
    """Duration of collectives over several tiers of links. ``sum``: each tier's seconds one after
    the other. ``slowest``: the slowest tier's, since a ring passes all tiers at once. Latencies add
    up either way, and so do all-to-alls. Shipped constants are fitted to published steps with
    ``sum``."""
    slow_computation: Constant
    """Slowdown factor of computation while communication runs concurrently."""
    slow_communication: Constant
    """Slowdown factor of communication while computation runs concurrently."""
    optimizer_bytes: Constant
    """Bytes moved for each parameter that a rank's optimizer owns: states, gradients, clipping."""
    host_layer: Constant
    """Seconds in which the host launches the forward of one layer; a device is never faster."""
    host_collective: Constant
    """Additional host seconds for each collective of tensor parallelism."""
    step: Constant
    """Overhead in seconds of every step: data, logging, the learning rate."""
    jitter: Constant
    """Standard deviation of a node's step time, relative to it; a step waits for the slowest
    node."""
    spread: Spread
    """Spread of measured steps around predictions."""

    def matmul_in(self, precision: Precision) -> Constant:
        """Return the share of the peak that large matrix products reach in a precision."""
        return getattr(self, f"matmul_{precision}") if precision in QUANTISED else self.matmul


SHARES = (
    "matmul", *(f"matmul_{name}" for name in QUANTISED), "attention_forward", "attention_backward", "memory",
)  # fmt: skip
"""Constants that are a share of a device's peak."""


def efficiency_file(name: str) -> Path:
    """Return the path of the shipped constants called ``name``. Raises JobError for an unknown
    name."""
    folder = specs_folder() / "efficiency"
    known = sorted(file.stem for file in folder.glob("*.toml"))
    if name not in known:
        raise JobError(f"no constants '{name}'{nearest(name, known)}", key="efficiency", fix=f"Use {', '.join(known)}")
    return folder / f"{name}.toml"


def resolve_efficiency(values: object) -> object:
    """Return the efficiency in a cluster's file with names replaced by their constants. values: a
    name, or a table with ``like`` and the constants that differ; anything else is returned as it
    is."""
    if isinstance(values, str):
        return read_toml(efficiency_file(values))
    if not isinstance(values, dict):
        return values
    own = cast("dict[str, Any]", values)
    if not isinstance(own.get("like"), str):
        return own
    merged = read_toml(efficiency_file(own["like"]))
    for key, value in own.items():
        if key != "like":
            inner = merged.get(key)
            nested = key in ("inside", "across", "spread") and isinstance(inner, dict) and isinstance(value, dict)
            merged[key] = {**cast("dict[str, Any]", inner), **value} if nested else value
    return merged


# ---- memory besides tensors ----


_FITTED = "fitted to published measurements (docs/adr/0014)"


def _fitted(value: float, error: float) -> Constant:
    return Constant(value=value, source=_FITTED, date="2026-11", error=error)


_LEFT_OUT = "fitted to published memory, sources left out in turn (docs/adr/0014)"


def _doubt(value: float, error: float) -> Constant:
    return Constant(value=value, source=_LEFT_OUT, date="2026-11", error=error)


class Uncertainty(Section):
    """Uncertainty of predicted memory, by kind of memory: one standard deviation, as a share of it.
    Kinds have independent errors."""

    lasting: Constant = _doubt(0.02, 0.1)
    """Uncertainty of tensors that last from step to step: parameters, gradients, optimizer
    states."""
    moving: Constant = _doubt(0.09, 0.3)
    """Uncertainty of memory that a step allocates and frees, with the allocator's waste."""
    beside: Constant = _doubt(1.6, 0.3)
    """Uncertainty of device memory besides tensors: context, buffers of libraries and process
    groups."""


class Overhead(Section):
    """Memory of every rank's device besides tensors. A cluster's file has measured values; the
    defaults are for CUDA devices with NCCL."""

    context: Constant = _fitted(1.0e9, 0.5)
    """Bytes of the driver's context, kernels and libraries' workspaces."""
    communicator: Constant = _fitted(2.0e8, 0.5)
    """Bytes of the buffers of one process group on each of its ranks."""
    slack: Constant = _fitted(0.1, 0.5)
    """Memory that the allocator holds and nothing uses, as a share of the memory that a step
    allocates and frees."""
    stuck: Constant = _fitted(0.03, 0.7)
    """The same share as ``slack`` when memory runs short: fragments that the allocator cannot give
    back."""
    reserve: Constant = _fitted(0.015, 0.5)
    """Share of a device's memory that its driver keeps."""
    doubt: Uncertainty = Uncertainty()
    """Uncertainty of these values, and of predicted tensors."""


def _process(value: float, source: str) -> Constant:
    return Constant(value=value, source=source, date="2026-11", error=0.5)


ON_CPU: Mapping[str, Constant | Uncertainty] = {
    "context": _process(3e8, "a Python process that has imported torch, order of magnitude"),
    "communicator": _process(1e6, "sockets of a gloo group, order of magnitude"),
    "slack": _process(0.18, "specs/jobs/quickstart.toml: 8 of 44 MiB less where glibc maps each block on its own"),
    "stuck": _process(0.18, "the same"),
    "reserve": _process(0.0, "memory of a machine is all there"),
    "doubt": Uncertainty(
        lasting=_process(0.01, "allocator's peaks of 24 shapes (tests/dist/test_estimate.py): at most 1.3 % off"),
        moving=_process(0.05, "the same, with what glibc keeps"),
        beside=_process(0.5, "the errors of context and communicator"),
    ),
}
"""Overhead of ranks without a device of their own."""


def overhead_values(values: Any, *, cpu: bool) -> Any:
    """Return the overhead in a cluster's file, on a CPU with the defaults of ``ON_CPU``."""
    return {**ON_CPU, **cast("dict[str, Any]", values)} if cpu and isinstance(values, dict) else values
