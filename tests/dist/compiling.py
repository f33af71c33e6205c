"""What each rank runs in ``test_compiled``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from plait.core.job.plan import Plan
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.seconds.segment_costs import SegmentCosts
from plait.train.model import compiled as module
from plait.train.model import formulas
from plait.train.model.compiled import Compiled, compiler
from tests.dist import equality, pipelining


@cache
def formulas_alone() -> Compiled:
    """The formulas that are compiled elsewhere, run op by op: the same numbers in no time."""
    return Compiled(formulas.ALL)


@contextmanager
def by_formulas() -> Iterator[None]:
    """What asks for compiled functions meanwhile gets ``formulas_alone``."""
    used = module.compiled
    module.compiled = formulas_alone  # type: ignore[assignment]
    try:
        yield
    finally:
        module.compiled = used


def worst_error(rank: int, spec: ModelSpec, strategies: list[Strategy]) -> list[tuple[float, str]]:
    """``lone_error`` of each strategy."""
    return [lone_error(rank, spec, strategy) for strategy in strategies]


def lone_error(rank: int, spec: ModelSpec, strategy: Strategy) -> tuple[float, str]:
    """``equality.worst_error``, by the formulas alone."""
    with by_formulas():
        return equality.worst_error(rank, spec, strategy)


def job_error(
    rank: int, planned: Plan, costs: SegmentCosts | None = None, delay: int | None = None, detailed: bool = False
) -> tuple[float, str]:
    """``pipelining.job_error``; of a plan that compiles, by the formulas alone."""
    with by_formulas():
        return pipelining.job_error(rank, planned, costs, delay, detailed)


def really(rank: int, spec: ModelSpec, strategies: list[Strategy]) -> dict[str, Any]:
    """The same of compiled functions, and how many variants were compiled for each strategy."""
    errors, variants = [], []
    for strategy in strategies:
        before = compiler().variants
        errors.append(equality.worst_error(rank, spec, strategy))
        variants.append(compiler().variants - before)
    return {"errors": errors, "variants": variants}


def bits(rank: int, spec: ModelSpec, strategy: Strategy) -> tuple[float, Tensor]:
    """Loss and gradients of one step in fp32."""
    torch.manual_seed(0)
    return equality.bits(rank, spec, strategy)
