"""Efficiency: what of a cluster's nominal peaks a training step reaches, as constants with their origin.

``specs/efficiency/*.toml`` has one file for each generation of devices; a cluster's file names one and may
replace single constants. ``step.seconds.rates`` turns them into seconds; ``plait.plan.calibrate`` fits them
to measured steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from plait.core.base.codec.data import NotNegative, Section
from plait.core.base.codec.toml_text import read_toml
from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError, nearest
from plait.core.model.precision import QUANTISED, Precision


class Constant(Section):
    """A number with its origin."""

    value: Annotated[float, Field(ge=0, le=1e30)]
    """In bytes, seconds, FLOP/s, bytes/s, or a plain ratio."""
    source: str
    """Who says so."""
    date: Annotated[str, Field(pattern=r"^\d{4}(-\d{2}){0,2}$")]
    """When: year, or with month and day."""
    error: NotNegative = 0.0
    """How far it may be off: one standard deviation, relative."""
    outlier: bool | None = None
    """``true``: the value is meant, though it lies far outside of what shipped clusters have."""


class Links(Section):
    """What collectives reach on links of one kind."""

    share: Constant
    """Of a link's rate, by large messages."""
    latency: Constant
    """Of a collective of two, as a multiple of the tier's; a group of n takes log2 n times as long."""
    hop: Constant
    """Of each rank that a ring passes, as a multiple of the tier's latency."""
    half: Constant
    """Bytes of a rank's part of a message at which half of ``share`` is reached."""


class Spread(Section):
    """Standard deviations of log(predicted / measured) of steps that were left out of a fit, scaled so that
    four fifths of them lie between p10 and p90."""

    node: Constant
    """Of jobs on one node."""
    nodes: Constant
    """On several, with at most short pipelines."""
    pipeline: Constant
    """On several, with long pipelines."""


class Efficiency(Section):
    """What of the peaks is reached, and what is lost beside."""

    matmul: Constant
    """Share of the peak that large matrix products reach."""
    matmul_fp8: Constant
    """The same in fp8, quantisation included."""
    matmul_mxfp8: Constant
    """In mxfp8."""
    matmul_nvfp4: Constant
    """In nvfp4."""
    matmul_wave: Constant
    """Elements of a product's result that keep half the device busy: m x k x n takes 1 + wave / (m n) as
    long."""
    matmul_depth: Constant
    """Terms of a sum that take as long as to begin and end it: 1 + depth / k as long."""
    matmul_odd: Constant
    """Factor of products of attention whose head size is no multiple of 8, which tensor cores cannot do."""
    matmul_launch: Constant
    """Seconds that a product takes however small it is."""
    attention_forward: Constant
    """Share of the peak that a fused attention kernel reaches over long sequences, forward."""
    attention_backward: Constant
    """The same, backward."""
    attention_short: Constant
    """Keys at which the fused kernel reaches half of that."""
    attention_launch: Constant
    """Seconds that attention takes however small it is."""
    attention_score_bytes: Constant
    """Bytes moved forward for each of the queries x keys scores that attention without a fused kernel writes
    to memory; twice as many backward."""
    memory: Constant
    """Share of the memory's rate that elementwise operations reach."""
    logit_bytes: Constant
    """Bytes that the loss moves for each logit, forward and backward."""
    elementwise: Constant
    """Bytes that elementwise operations move, as a multiple of the least that fused ones would."""
    inside: Links
    """Links between the ranks of a node."""
    across: Links
    """Links between nodes."""
    tiers: Literal["sum", "slowest"] = "sum"
    """What collectives over several tiers of links take: each tier's seconds one after the other, or the
    slowest's, since a ring passes all at once. Latencies add up either way, and so do all-to-alls. Constants
    that ship are fitted to published steps with ``sum``."""
    slow_computation: Constant
    """Factor of computation while communication runs beside it."""
    slow_communication: Constant
    """Factor of communication while computation runs beside it."""
    optimizer_bytes: Constant
    """Bytes moved for each parameter that a rank's optimizer owns: states, gradients, clipping."""
    host_layer: Constant
    """Seconds in which the host launches the forward of one layer; a device is never faster."""
    host_collective: Constant
    """Seconds more for each collective of tensor parallelism."""
    step: Constant
    """Seconds of every step beside all this: data, logging, the learning rate."""
    jitter: Constant
    """Standard deviation of a node's step time, relative; a step waits for the slowest node."""
    spread: Spread
    """How far predictions may be off."""

    def matmul_in(self, precision: Precision) -> Constant:
        """Share of the peak that large matrix products reach in a precision."""
        return getattr(self, f"matmul_{precision}") if precision in QUANTISED else self.matmul


SHARES = (
    "matmul", *(f"matmul_{name}" for name in QUANTISED), "attention_forward", "attention_backward", "memory",
)  # fmt: skip
"""Constants that are a share of a device's peak."""


def efficiency_file(name: str) -> Path:
    """Of the constants that ship under that name. Raises JobError."""
    folder = specs_folder() / "efficiency"
    known = sorted(file.stem for file in folder.glob("*.toml"))
    if name not in known:
        raise JobError(f"no constants '{name}'{nearest(name, known)}", key="efficiency", fix=f"Use {', '.join(known)}")
    return folder / f"{name}.toml"


def resolve_efficiency(values: object) -> object:
    """What a cluster's file says about efficiency, names replaced by what they stand for: a name, or a table
    with ``like`` and the constants that differ; anything else as it is."""
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
