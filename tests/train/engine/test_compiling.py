"""What is compiled before the first step is all that steps need, whatever their slices; torch's
tracer is real here, what it hands its graphs to is not, but for one function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from plait.core.cluster.hardware import HERE
from plait.core.job.refine import refine
from plait.core.job.spec import Job
from plait.plan.make import make_plan
from plait.train.engine import agreement as compiling
from plait.train.engine.agreement import compile_ahead
from plait.train.engine.assembly import RankPart, assemble
from plait.train.engine.feed import micro_batches
from plait.train.machine.gpu import device_of
from plait.train.model import compiled as module
from plait.train.model.compiled import Compiled, Compiler
from plait.train.tune.measure import measure

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own use, in its compiler
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt", "dropout": 0.1, "attention_dropout": 0.1},
    "llama": {"family": "llama", "num_kv_heads": 2, "ffn_hidden": 24, "dropout": 0.1},
    "llama, dropped": {"family": "llama", "num_kv_heads": 2, "ffn_hidden": 24, "attention_dropout": 0.1},
    "plain": {"family": "gpt"},
    "u": {"family": "utransformer", "num_layers": 5, "levels": 2},
}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Everything but what makes code of graphs."""
    compiler = Compiler(lambda graph, _: graph.forward)
    kernels = Compiled(compiler.table())
    monkeypatch.setattr(module, "compiler", lambda: compiler)
    monkeypatch.setattr(module, "compiled", lambda: kernels)
    yield compiler
    torch._dynamo.reset()


def part_of(name: str, batch: int, **strategy: Any) -> RankPart:
    small = {"num_layers": 2, "hidden": 16, "num_heads": 4, "vocab": 37, "max_sequence": 8}
    job = Job.from_dict(
        {
            "model": small | MODELS[name],
            "data": {"sequence_length": 8},
            "train": {"global_batch_size": batch, "micro_batch_size": 0},
            "strategy": {"compile": True, **strategy},
        }
    )
    return assemble(make_plan(job, HERE, vocab=37), 0, device_of(None), eval_batches=1)


SLICED: list[tuple[int, dict[str, Any]]] = [
    (5, {"slices": {"batch": 3, "columns": 2}, "recompute": "full"}),
    (3, {"slices": {"batch": 2, "columns": 1}, "recompute": "selective"}),
    (4, {}),
]


def cases() -> Iterator[Any]:
    """Every model with every slicing; the suite has some."""
    for name, (at, (batch, strategy)) in product(MODELS, enumerate(SLICED)):
        marks = () if (name, at) in (("gpt", 0), ("llama", 1), ("llama, dropped", 1)) else pytest.mark.contract
        yield pytest.param(name, batch, strategy, id=f"{name}-{at}", marks=marks)


def step(part: RankPart, batch: int) -> float:
    tokens = torch.randint(0, 37, (batch, 8), generator=torch.Generator().manual_seed(batch))
    batches = part.own(micro_batches(tokens, tokens, torch.arange(batch), batch, 0))
    part.gradients.zero()
    loss = part.pipeline.run(batches)
    assert part.evaluator is not None and loss is not None
    part.evaluator.run(batches)
    return loss.item()


@pytest.mark.parametrize(("name", "batch", "strategy"), list(cases()))
def test_steps_compile_nothing_more(traced: Compiler, name: str, batch: int, strategy: dict[str, Any]) -> None:
    """Uneven slices (2, 2, 1; 2, 1) and evaluation included."""
    part = part_of(name, batch, **strategy)
    done = compile_ahead(part)
    assert not done.problem
    assert done.functions == traced.variants > 0
    assert str(done).startswith(f"compiled {done.functions} functions in ")
    loss = step(part, batch)
    assert traced.variants == done.functions
    plain = part.under(replace(part.plan, strategy=replace(part.plan.strategy, compile=False)))
    assert step(plain, batch) == pytest.approx(loss, rel=1e-5)


def test_other_batches_take_no_more_variants(traced: Compiler) -> None:
    compile_ahead(part_of("plain", 6, slices={"batch": 4, "columns": 1}))  # slices of 2 and 1
    known = traced.variants
    for batch in (2, 3, 7):
        step(part_of("plain", batch, slices={"batch": 2, "columns": 1}), batch)
        assert traced.variants == known


def test_one_variant_too_many_is_an_error_and_not_a_fall_back(
    traced: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_VARIANTS", 2)
    gelu = Compiled(Compiler(lambda graph, _: graph.forward).table()).functions["gelu"]
    gelu(torch.ones(3, 4))
    gelu(torch.ones(3, 4, dtype=torch.float64))
    with pytest.raises(FailOnRecompileLimitHit):
        gelu(torch.ones(3, 4, dtype=torch.bfloat16))


def use_failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A compiler that fails so."""

    def fail(graph: Any, inputs: Any) -> Any:
        raise error

    compiler = Compiler(fail)
    kernels = Compiled(compiler.table())
    monkeypatch.setattr(module, "compiler", lambda: compiler)
    monkeypatch.setattr(module, "compiled", lambda: kernels)


def test_a_compiler_that_fails_is_a_problem_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told, not raised: the others wait for this rank's word."""
    use_failing(monkeypatch, RuntimeError("no g++ here\nand more"))
    done = compile_ahead(part_of("plain", 2))
    assert done.problem.startswith("rank 0: ") and "no g++ here" in done.problem and "\n" not in done.problem


def test_what_ranks_compile_is_told_of_those_who_took_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for each other; of several problems the first is told."""
    others = [[3, 1e6, ""], [700, 0.5, "no g++"], [5, 2.0, "no room"]]
    monkeypatch.setattr(compiling, "gather", lambda own: [own, *others])
    monkeypatch.setattr(compiling, "_compile", lambda part: 4)
    done = compile_ahead(part_of("plain", 2))
    assert (done.functions, done.seconds, done.problem) == (700, 1e6, "rank 2: no g++")


def timed_steps(steps_left: int) -> tuple[bool, str]:
    """Whether ``auto`` chose to compile, and its note."""
    part = part_of("plain", 2, compile="auto")
    tokens = torch.zeros((2, 8), dtype=torch.int64)
    found = measure(part, part.own(micro_batches(tokens, tokens, torch.arange(2), 2, 0)), steps_left)
    assert {one.strategy.compile for one in found.compiled} in (set(), {False, True})
    refined = refine(part.plan, found)
    assert not refined.choices.any
    faster = min(found.compiled, key=lambda one: one.seconds).strategy.compile if found.compiled else False
    assert refined.strategy.compile == faster
    return bool(found.compiled), found.notes["compile"]


def test_auto_times_steps_where_the_run_is_long_enough(traced: Compiler) -> None:
    tried, note = timed_steps(10)
    assert not tried and note.startswith("not tried") and traced.variants == 0
    tried, note = timed_steps(10**9)
    assert tried and note.startswith(f"compiled {traced.variants} functions in ") and traced.variants > 0


def test_auto_goes_on_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    use_failing(monkeypatch, FileNotFoundError("g++"))
    assert timed_steps(10**9) == (False, "not possible (rank 0: FileNotFoundError: g++)")
