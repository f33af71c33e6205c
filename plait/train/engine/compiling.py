"""Compiling before the first step, on all ranks at once, each for itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from plait.core.parallel.strategy import slice_sizes
from plait.train.comm.objects import gather
from plait.train.engine.assembly import RankPart
from plait.train.machine.device import torch_dtype
from plait.train.model.loss import beyond
from plait.train.model.warm_up import Slice, WarmUp


@dataclass(frozen=True)
class Compilation:
    """What came of it, over all ranks. seconds: the slowest rank's. problem: of the first rank that could not
    compile; empty if all could."""

    functions: int
    seconds: float
    problem: str

    def __str__(self) -> str:
        """One line for people."""
        return f"compiled {self.functions} functions in {self.seconds:.1f} s"


def compile_ahead(part: RankPart) -> Compilation:
    """Compile what a part's stages need, under its plan and under those that are still to choose from. Called
    by all ranks at the same point; changes nothing."""
    start, functions, problem = time.perf_counter(), 0, ""
    try:
        functions = _compile(part)
    except Exception as error:  # noqa: BLE001  (a compiler may raise anything; every rank has to hear of it)
        problem = _first_line(error)
    found = gather([functions, time.perf_counter() - start, problem])
    problems = [f"rank {rank}: {text}" for rank, (_, _, text) in enumerate(found) if text]
    return Compilation(
        max(count for count, _, _ in found), max(seconds for _, seconds, _ in found), problems[0] if problems else ""
    )


def _compile(part: RankPart) -> int:
    from plait.train.model import compiled as ours  # the compiler takes seconds to import

    plan, place = part.plan, part.groups.place
    kernels, before = ours.compiled(), ours.compiler().variants
    for model in part.models.stages:
        spec = model.spec
        warm = WarmUp(
            spec,
            torch_dtype(plan.workload.precision),
            part.device.torch_device,
            model.embedding.rows if model.stage.heads else 0,
            share if (share := beyond(model.embedding, spec.vocab)) < model.embedding.rows else None,
            bool(spec.dropout or spec.attention_dropout),
        )
        warm.run(kernels, _slices(part, place, spec.levels))
    return ours.compiler().variants - before


def _slices(part: RankPart, place: int, levels: int) -> list[Slice]:
    """One of each kind: a slice of one sequence is another kind than those of several."""
    plan = part.plan
    rows = plan.rows_of(part.rank, plan.workload.micro_batch)
    tp, tokens = plan.strategy_of(place).tp, plan.workload.sequence // plan.strategy.cp
    found: dict[tuple[object, ...], Slice] = {}
    for one in (plan.strategy, *plan.choices.strategies):
        for samples in slice_sizes(rows.stop - rows.start, one.p1):
            for level in range(levels + 1):
                kind = (one.p2, one.sequence_parallel, samples == 1, tokens >> level == 1)
                cut = Slice(strategy=replace(one, tp=tp), sequence=tokens >> level, samples=samples)
                found.setdefault(kind, cut)
    return list(found.values())


def _first_line(error: BaseException) -> str:
    """What the compiler said, in a line: of what torch has wrapped up, and of a C++ compiler's output, the
    error."""
    inner: BaseException = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    said = next((line for line in lines if "error: " in line), lines[0] if lines else "")
    return f"{type(inner).__name__}: {said}" if said else type(inner).__name__
