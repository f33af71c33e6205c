"""Verify before the first step that all ranks agree: on the plan, the package and their instruction
lists. Compile formulas, if the plan wants it.

Every rank derives its lists from floating-point costs, and collectives are matched by their order
alone. In case of a mismatch gloo silently adds unrelated tensors, and NCCL hangs. Each rank
compiles for itself.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import plait
from plait.core.base.errors import ScheduleError
from plait.core.parallel.strategy import slice_sizes
from plait.train.comm.tree import gather
from plait.train.engine.assembly import RankPart
from plait.train.machine.device import torch_dtype
from plait.train.model.embedding import padding_start
from plait.train.model.warm_up import Slice, WarmUp


class Statement(NamedTuple):
    """Versions and hashes that must agree between ranks. pp_rank: pipeline rank, whose ranks all
    have the same instruction lists."""

    version: str
    plan: str
    schedule: str
    pp_rank: int
    lists: str


def statement(part: RankPart) -> Statement:
    """Return this rank's statement, over the instruction lists that it will run."""
    lists = hashlib.sha256()
    for stage, executor in sorted(part.pipeline.executors.items()):
        for phase, programme in executor.programmes.items():
            words = " ".join(f"{action.verb}:{action.op}" for action, _ in programme)
            lists.update(f"{stage} {phase} {words}\n".encode())
    schedule = hashlib.sha256(str(part.pipeline.schedule).encode()).hexdigest()
    return Statement(plait.__version__, part.plan.hash, schedule, part.groups.pp_rank, lists.hexdigest())


def agree(part: RankPart) -> None:
    """Raise ScheduleError on every rank if ranks disagree. The error names the ranks that differ
    from rank 0 (for lists: from the first rank of their ``pp_rank``), and in what."""
    own = statement(part)
    raise_if_different([Statement(*one) for one in gather(own)])


def raise_if_different(statements: Sequence[Statement]) -> None:
    """Raise the error of ``agree``. statements: the statements of all ranks, in the order of
    ranks."""
    first = {one.pp_rank: one for one in reversed(statements)}
    checks: list[tuple[str, Callable[[Statement], tuple[str, str]], str]] = [
        ("version of Plait", lambda one: (one.version, statements[0].version), "every host needs the same"),
        ("plan", lambda one: (one.plan, statements[0].plan), "every host needs the same plan.json"),
        ("pipeline schedule", lambda one: (one.schedule, statements[0].schedule), "every host needs the same software"),
        (
            "order of segment ops",
            lambda one: (one.lists, first[one.pp_rank].lists),
            "the hosts computed different costs",
        ),
    ]
    for what, pair, why in checks:
        others = [rank for rank, one in enumerate(statements) if len(set(pair(one))) > 1]
        if others:
            rank, (theirs, ours) = others[0], pair(statements[others[0]])
            names = ", ".join(map(str, others))
            raise ScheduleError(
                f"rank{'s' * (len(others) > 1)} {names} would run a different {what} than the other ranks "
                f"(rank {rank} has {theirs[:12]}, expected {ours[:12]}): {why}."
            )


@dataclass(frozen=True)
class Compilation:
    """The result of compiling on all ranks. functions: the most of any rank. seconds: the slowest
    rank's. problem: of the first rank that could not compile; empty if all could."""

    functions: int
    seconds: float
    problem: str

    def __str__(self) -> str:
        """Return one line for the log."""
        return f"compiled {self.functions} functions in {self.seconds:.1f} s"


def compile_ahead(part: RankPart) -> Compilation:
    """Compile the functions that a part's stages need under its plan and under all candidate
    strategies. Called by all ranks at the same point; changes nothing else."""
    start, functions, problem = time.perf_counter(), 0, ""
    try:
        functions = _compile(part)
    except Exception as error:  # noqa: BLE001  (a compiler may raise anything; every rank must learn of it)
        problem = _first_line(error)
    found = gather([functions, time.perf_counter() - start, problem])
    problems = [f"rank {rank}: {text}" for rank, (_, _, text) in enumerate(found) if text]
    return Compilation(
        max(count for count, _, _ in found), max(seconds for _, seconds, _ in found), problems[0] if problems else ""
    )


def _compile(part: RankPart) -> int:
    from plait.train.model import compiled as ours  # the compiler takes seconds to import

    plan, pp_rank = part.plan, part.groups.pp_rank
    kernels, before = ours.compiled(), ours.compiler().variants
    for model in part.models.stages:
        spec = model.spec
        warm = WarmUp(
            spec,
            torch_dtype(plan.workload.precision),
            part.device.torch_device,
            model.embedding.rows if model.stage.heads else 0,
            share if (share := padding_start(model.embedding, spec.vocab)) < model.embedding.rows else None,
            bool(spec.dropout or spec.attention_dropout),
        )
        warm.run(kernels, _slices(part, pp_rank, spec.levels))
    return ours.compiler().variants - before


def _slices(part: RankPart, pp_rank: int, levels: int) -> list[Slice]:
    """Return one slice of each kind to compile for. A slice of one sequence is another kind than a
    slice of several."""
    plan = part.plan
    rows = plan.rows_of(part.rank, plan.workload.micro_batch)
    tp, tokens = plan.strategy_of(pp_rank).tp, plan.workload.sequence // plan.strategy.cp
    found: dict[tuple[object, ...], Slice] = {}
    for one in (plan.strategy, *plan.choices.strategies):
        for samples in slice_sizes(rows.stop - rows.start, one.p1):
            for level in range(levels + 1):
                kind = (one.p2, one.sequence_parallel, samples == 1, tokens >> level == 1)
                cut = Slice(strategy=replace(one, tp=tp), sequence=tokens >> level, samples=samples)
                found.setdefault(kind, cut)
    return list(found.values())


def _first_line(error: BaseException) -> str:
    """Return a compiler's error message in one line: of the exception that torch wraps, and the
    error line of a C++ compiler's output."""
    inner: BaseException = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    said = next((line for line in lines if "error: " in line), lines[0] if lines else "")
    return f"{type(inner).__name__}: {said}" if said else type(inner).__name__
