"""Sizes of products in 8 and 4 bits: what Transformer Engine refuses, as rules on strategies.

Its ``assert_dim_for_fp8_exec`` (transformer_engine/pytorch/utils.py) wants matrices whose height 8 divides
and whose width 16 divides; its quantisers of blocks want multiples of these. A row is a token of a
micro-batch; a width is what a product sums over, of a rank of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import JobError
from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import Points
from plait.plan.frameworks import Rule

MULTIPLES: Mapping[Precision, tuple[int, int]] = {"fp8": (8, 16), "mxfp8": (32, 32), "nvfp4": (16, 16)}
"""The numbers that must divide height and width, by precision."""


def fp8_rules(model: ModelSpec, sequence: int, precision: Precision) -> Iterator[Rule]:
    """Rules on the products of a model's layers. sequence: tokens."""
    height, width = MULTIPLES[precision]
    engine = f"Transformer Engine multiplies in {precision} what {height} divides in height and {width} in width"
    yield Rule(
        f"{engine}, which a micro-batch's tokens of sequences of {sequence:,} do not", "data.sequence_length",
        f"Use a multiple of {height} tokens on each rank of the sequence, or another train.micro_batch_size",
        partial(_rows, sequence, height),
    )  # fmt: skip
    for key, size, cut in _widths(model):
        share = ", shared out over tp ranks," if cut else ""
        yield Rule(
            f"{engine}: {key} = {size:,}{share} is none such", key if key.startswith("model.") else "model.hidden",
            f"Use a multiple of {width}{' x tp' if cut else ''}, or train.precision=bf16-mixed",
            partial(_width, size, width, cut),
        )  # fmt: skip


def check_widths(model: ModelSpec, precision: Precision) -> None:
    """Raise JobError for a model of which no strategy keeps the rules."""
    if odd := odd_widths(model, precision):
        height, width = MULTIPLES[precision]
        problem = f"Transformer Engine multiplies in {precision} what {height} divides in height and {width} in width"
        fix = f"Use a multiple of {width}, or train.precision=bf16-mixed"
        raise JobError(f"{problem}, which {' and '.join(odd)} are not", key=odd[0].split()[0], fix=fix)


def odd_widths(model: ModelSpec, precision: Precision) -> list[str]:
    """Widths that cannot be multiplied in a precision even where no rank shares them out."""
    return [f"{key} {size:,}" for key, size, _ in _widths(model) if size % MULTIPLES[precision][1]]


def _widths(model: ModelSpec) -> Iterator[tuple[str, int, bool]]:
    """Yield what products of layers sum over: key, size, and whether tensor parallelism cuts it."""
    yield "model.hidden", model.hidden, False
    if not model.kv_lora_rank:
        yield "model.num_heads x head_size", model.num_heads * model.head_size, True
    if not model.experts or model.experts.first_dense or model.experts.every > 1:
        yield "model.ffn_hidden", model.ffn_hidden, True
    if model.experts:
        yield "model.experts.ffn_hidden", model.experts.ffn_hidden, True


def _rows(sequence: int, height: int, points: Points) -> NDArray[np.bool_]:
    return np.asarray(points.micro * sequence % (points.cp * height) == 0)


def _width(size: int, width: int, cut: bool, points: Points) -> NDArray[np.bool_]:
    return np.asarray(size % (width * (points.tp if cut else 1)) == 0) & np.ones(len(points), dtype=bool)
