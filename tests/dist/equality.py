"""Cases that ranks compare with the unsharded reference, and those of one tensor-parallel group.

The reference is computed once, in the test's own process, and sent to the ranks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.core.step.segments import Collective
from plait.train.comm.wire import NullWire, Wire, open_wire
from plait.train.engine.executor import RankContext, SegmentExecutor, make_executor
from plait.train.engine.feed import micro_batches
from plait.train.engine.gradients import Gradients
from plait.train.engine.groups import Groups
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.optimizer import Optimizer
from plait.train.engine.steps import RankStep, train_step
from plait.train.machine.device import RankDevice
from plait.train.model import compiled as compiled_module
from plait.train.model import formulas
from plait.train.model.compiled import Compiled
from plait.train.model.dropout import DropoutKey
from plait.train.model.transformer import ModelCut, Transformer
from tests.support.peers import Peer
from tests.support.reference import Reference

BATCH, SEQUENCE, STEPS, SEED = 4, 8, 3, 7
RATE, CLIP, TOLERANCE = 1e-2, 0.5, 1e-10
DEVICE = RankDevice(torch.device("cpu"))
Pool = Callable[[int], Any]
Answer = dict[str, Any]
"""The reference's: see ``expected``."""


class Case(Protocol):
    """A model and a way to train it."""

    @property
    def size(self) -> int:
        """Ranks that it takes."""
        ...

    @property
    def compiles(self) -> bool:
        """Whether the strategy has its formulas compiled."""
        ...

    def want(self) -> Answer:
        """The reference's answer."""
        ...

    def error(self, rank: int, want: Answer) -> tuple[float, str]:
        """The largest relative error of anything on a rank, and what it was."""
        ...


def error(rank: int, case: Case, want: Answer) -> tuple[float, str]:
    """A rank's error; formulas that a strategy compiles are run op by op, which takes no time to
    compile."""
    with by_formulas() if case.compiles else nullcontext():
        return case.error(rank, want)


def run(pool: Pool, case: Case, function: Callable[..., Any] = error, *args: Any) -> list[Any]:
    """``function(rank, *args, case, want)`` of every rank."""
    args = (*args, case, case.want())
    return [function(0, *args)] if case.size == 1 else pool(case.size).run(function, *args)


def assert_equal(pool: Pool, *cases: Case) -> None:
    """On every rank everything is what the reference has."""
    for case in cases:
        for found, what in run(pool, case):
            assert found < TOLERANCE, f"{what} is off by {found:.1e} in {case}"


@contextmanager
def by_formulas() -> Iterator[None]:
    """Whoever asks for compiled functions meanwhile gets the formulas that are compiled
    elsewhere."""
    used = compiled_module.compiled
    compiled_module.compiled = lambda: Compiled(formulas.ALL)  # type: ignore[assignment]
    try:
        yield
    finally:
        compiled_module.compiled = used


class DelayedWire:
    """A wire whose collectives start late by a random time, differently on every rank, and whose
    result is poison until then.

    Whoever reads a result before waiting for it computes NaN; whoever relies on timing meets
    another timing.
    """

    def __init__(self, wire: Wire, seed: int) -> None:
        self.wire, self.size, self.rank = wire, wire.size, wire.rank
        self._chance = random.Random(seed * 31 + wire.rank)
        self._thread = ThreadPoolExecutor(1)

    def start(self, kind: Collective, result: Tensor, source: Tensor) -> _Late:
        """Poison now, communicate later."""
        held = source.clone()
        landing = held if kind == "all_reduce" else torch.empty_like(result)
        result.fill_(float("nan"))
        delay = self._chance.choice((0.0, 0.0, 0.001, 0.004))
        return _Late(self._thread.submit(self._late, delay, kind, landing, held), result)

    def _late(self, delay: float, kind: Collective, landing: Tensor, held: Tensor) -> Tensor:
        time.sleep(delay)
        self.wire.start(kind, landing, held).wait()
        return landing


class _Late:
    def __init__(self, future: Future[Tensor], result: Tensor) -> None:
        self.future, self.result = future, result

    def wait(self) -> None:
        self.result.copy_(self.future.result())

    def get_future(self) -> Any:
        """Nobody records these."""
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self.future.done()


@cache
def wire() -> Wire:
    """One group for the whole session, as a run has."""
    return open_wire("gloo") if dist.is_initialized() and dist.get_world_size() > 1 else NullWire()


def batch_of(spec: ModelSpec, step: int, batch: int = BATCH, sequence: int = SEQUENCE) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, targets (a few ignored), sample numbers."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, spec.vocab, (batch, sequence), generator=generator)
    targets = torch.randint(0, spec.vocab, (batch, sequence), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.15] = -100
    return tokens, targets, torch.arange(batch) + step * batch


def details_of(step: int, batch: int = BATCH, sequence: int = SEQUENCE) -> dict[str, Tensor]:
    """Loss weights, many of them 0 and of some sequences nearly all, and where the documents of
    sequences begin: of some sequences there is one, of others nearly every token is one."""
    generator = torch.Generator().manual_seed(500 + step)
    counted = torch.rand(batch, sequence, generator=generator) < torch.rand(batch, 1, generator=generator)
    weights = counted * (0.5 + torch.rand(batch, sequence, generator=generator, dtype=torch.float64))
    weights[0, 0] = 1.0
    begins = torch.rand(batch, sequence, generator=generator) < torch.rand(batch, 1, generator=generator) ** 2
    return {"weights": weights, "starts": (torch.arange(sequence) * begins).cummax(dim=1).values}


def reference_of(spec: ModelSpec) -> Reference | Peer:
    """The plain one; transformers' own where a model is of its newer ones."""
    return Peer(spec) if spec.qk_norm or spec.window else Reference(spec)


@cache
def expected(
    spec: ModelSpec, batch: int = BATCH, sequence: int = SEQUENCE, evaluated: int = 0, detailed: bool = False
) -> Answer:
    """The reference's answer: first step's loss, gradients and norm; weights after all steps, and
    with these the mean loss of an evaluation of two batches of ``evaluated`` sequences. detailed:
    with ``details_of``."""
    reference = reference_of(spec)

    def loss(step: int) -> Tensor:
        tokens, targets, samples = batch_of(spec, step, batch, sequence)
        details = details_of(step, batch, sequence) if detailed else {}
        return reference.loss(tokens, targets, dropout=DropoutKey(SEED, step), samples=samples, **details)

    found = trained(reference, loss)
    if evaluated:
        tokens, targets, _ = evaluation_of(spec, evaluated, sequence)
        details = details_of(STEPS, len(tokens), sequence) if detailed else {}
        found["evaluation"] = reference.loss(tokens, targets, **details).item()
    return found


def trained(
    reference: Reference | Peer, loss_of: Callable[[int], Tensor], update: Callable[..., None] | None = None
) -> Answer:
    """A reference before and after its steps: weights at the start, first step's loss, gradients
    and norm, weights at the end. update: of a named weight, otherwise ``adamw``."""
    reference.perturb()
    weights = reference.weights
    found: Answer = {"start": {name: weight.detach().clone() for name, weight in weights.items()}}
    averages = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
    for step in range(STEPS):
        for w in weights.values():
            w.grad = None
        loss = loss_of(step)
        (loss + getattr(reference, "auxiliary", 0.0)).backward()
        # An expert to which no token went has no gradient.
        gradients = {name: torch.zeros_like(w) if w.grad is None else w.grad.clone() for name, w in weights.items()}
        norm = torch.sqrt(sum((g.square().sum() for g in gradients.values()), torch.zeros(()))).item()
        if step == 0:
            found |= {"loss": loss.item(), "norm": norm, "gradients": gradients}
        for name, w in weights.items():
            given = w, gradients[name] * min(1.0, CLIP / norm), averages[name], step + 1
            update(name, *given) if update else adamw(*given)
    return found | {"weights": {name: w.detach().clone() for name, w in weights.items()}}


def evaluation_of(spec: ModelSpec, batch: int, sequence: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two micro-batches, one behind the other, that no step sees."""
    return batch_of(spec, STEPS, 2 * batch, sequence)


@torch.no_grad()
def adamw(weight: Tensor, gradient: Tensor, averages: tuple[Tensor, Tensor], update: int) -> None:
    """AdamW as its paper has it (arXiv 1711.05101, algorithm 2), with this suite's settings; norms
    and biases do not decay."""
    first, second = averages
    first.lerp_(gradient, 1 - 0.9)
    second.lerp_(gradient.square(), 1 - 0.95)
    decay = 0.1 * weight if weight.ndim > 1 else 0.0
    weight -= RATE * ((first / (1 - 0.9**update)) / ((second / (1 - 0.95**update)).sqrt() + 1e-8) + decay)


def build(
    spec: ModelSpec,
    strategy: Strategy,
    start: dict[str, Tensor] | None = None,
    *,
    over: Wire | None = None,
    micro: int = BATCH,
    dtype: torch.dtype = torch.float64,
) -> tuple[SegmentExecutor, Optimizer]:
    """An executor and optimizer holding this rank's share of the starting weights."""
    over = over or wire()
    model = Transformer(spec, strategy, ModelCut(tp_rank=over.rank), dtype=dtype, device=DEVICE.torch_device)
    with torch.no_grad():
        for piece in model.pieces if start else ():
            assert start is not None
            piece.view(model.named[piece.parameter]).copy_(piece.cut(start[piece.name]))
    gradients = Gradients(model)
    optimizer = Optimizer(model, gradients)
    executor = make_executor(
        model, strategy, over, Load(micro, SEQUENCE), RankContext(DEVICE, seed=SEED), gradients=gradients
    )
    return executor, optimizer


def alone(tp: Wire) -> Groups:
    """A model that is not cut into stages, over one tensor-parallel group."""
    return Groups(Layout.of(tp=tp.size), 0, 0, tp.rank, tp, tp, NullWire())


def _whole(executor: SegmentExecutor, batches: Sequence[MicroBatch]) -> Tensor:
    return torch.stack([executor.run(batch) for batch in batches]).sum()


@dataclass(frozen=True)
class TensorParallel:
    """A case of one tensor-parallel group, without a plan. delay: a seed, where collectives are
    late."""

    spec: ModelSpec
    strategy: Strategy
    micro: int = BATCH
    delay: int | None = None

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.strategy.tp

    @property
    def compiles(self) -> bool:
        """Whether the strategy does."""
        return self.strategy.compile

    def want(self) -> Answer:
        """The reference's answer."""
        return expected(self.spec)

    def over(self) -> Wire:
        """The group's wire."""
        return wire() if self.delay is None else DelayedWire(wire(), self.delay)

    def error(self, rank: int, want: Answer) -> tuple[float, str]:
        """Loss, gradients and norm of the first step, and weights after the last."""
        sharded, over = self.strategy.sequence_parallel, self.over()
        executor, optimizer = build(self.spec, self.strategy, want["start"], over=over, micro=self.micro)
        model, gradients, errors = executor.model, optimizer.gradients, dict[str, float]()
        own = RankStep(partial(_whole, executor), alone(over), sequence_parallel=sharded)
        for step in range(STEPS):
            batches = micro_batches(*batch_of(self.spec, step), self.micro, step)
            if step:
                train_step(own, optimizer, batches, learning_rate=RATE, clip=CLIP)
                continue
            gradients.zero()  # by hand, because clipping scales the gradients
            errors["loss"] = abs(own.run(batches).item() / want["loss"] - 1)
            gradients.finish(over, sequence_parallel=sharded)
            errors |= _errors(model, "gradient of", gradients.named, want["gradients"])
            norm = gradients.norm(over).item()
            errors["norm"] = abs(norm / want["norm"] - 1)
            optimizer.step(RATE, norm=norm, clip=CLIP)
        return worst(errors | _errors(model, "weight", model.named, want["weights"]))

    def bits(self, want: Answer) -> tuple[float, Tensor]:
        """Loss and all gradients of one step in fp32, to be compared bit by bit."""
        over = self.over()
        executor, optimizer = build(self.spec, self.strategy, want["start"], over=over, dtype=torch.float32)
        loss = sum(executor.run(b).item() for b in micro_batches(*batch_of(self.spec, 0), BATCH, 0))
        optimizer.gradients.finish(over, sequence_parallel=self.strategy.sequence_parallel)
        return loss, optimizer.gradients.flat.clone()


def _errors(model: Transformer, what: str, named: Any, want: dict[str, Tensor]) -> dict[str, float]:
    """How far a rank's pieces of all weights, or of their gradients, are off."""
    return {
        f"{what} {piece.name}": relative_error(piece.view(named[piece.parameter]), piece.cut(want[piece.name]))
        for piece in model.pieces
    }


def worst(errors: dict[str, float]) -> tuple[float, str]:
    """The largest, and of what it is; what is no number is larger than all."""
    name = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else float("inf"))
    return errors[name], name


_BITS: dict[tuple[ModelSpec, Strategy], tuple[float, Tensor]] = {}


def same_bits(rank: int, plain: Strategy, case: TensorParallel, want: Answer) -> bool:
    """Whether a case gives the bits of the plain strategy."""
    if (first := _BITS.get((case.spec, plain))) is None:
        first = _BITS[case.spec, plain] = TensorParallel(case.spec, plain).bits(want)
    loss, gradients = case.bits(want)
    return loss == first[0] and torch.equal(gradients, first[1])


def peers_differ(rank: int, case: TensorParallel, _: Answer) -> bool:
    """Whether the shards of rank 0 and 1 are different numbers (equal ones would train, and be
    wrong)."""
    model = Transformer(case.spec, case.strategy, ModelCut(tp_rank=rank))
    mine = torch.cat(
        [p.detach().flatten() for name, p in model.named.items() if name.endswith(("column.weight", "row.weight"))]
    )
    both = [torch.empty_like(mine) for _ in range(case.size)]
    dist.all_gather(both, mine)
    return not any(torch.equal(both[0], other) for other in both[1:])


def relative_error(ours: Tensor, theirs: Tensor, whole: Tensor | None = None) -> float:
    """Relative to the largest entry of the tensor (of ``whole``, if ``theirs`` is a part of it);
    entries that are zero but for rounding (a key bias's gradient) absolutely."""
    scale = max((theirs if whole is None else whole).abs().max().item(), 1e-6) if theirs.numel() else 1.0
    ours = ours.to(theirs.device)
    return (ours - theirs).abs().max().item() / scale if theirs.numel() else 0.0
