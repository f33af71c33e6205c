"""Optimizers over this rank's shards: fp32 (or fp64) masters if the model computes in lower
precision, clipping by the true norm.

| ``train.optimizer`` | matrices of layers | all other parameters | states |
|---|---|---|---|
| ``adamw`` | AdamW | AdamW | ``exp_avg``, ``exp_avg_sq`` |
| ``muon`` | Muon (``engine.muon``) | AdamW | ``momentum``; ``exp_avg``, ``exp_avg_sq`` |
| ``sgd`` | SGD | SGD | ``momentum`` |

``LearningRate`` is the learning-rate schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from plait.core.job.settings import TrainSection
from plait.core.parallel.sharding import STATES, Rule, Unit, rule_of, rules_of
from plait.core.record.ring import RecordKind
from plait.core.step.traffic import UnitOp
from plait.train.comm.background import BackgroundHandle
from plait.train.comm.wire import NullWire
from plait.train.engine.gradients import Gradients
from plait.train.engine.muon import MatrixGroup, Member, Muon
from plait.train.machine.device import RankDevice
from plait.train.model.transformer import Share
from plait.train.model.units import UnitStore
from plait.train.record.recorder import Recorder

STATE_NAMES = {"exp_avg": "first moment of", "exp_avg_sq": "second moment of", "momentum": "momentum of"}
"""Names of optimizer states in messages, to be followed by a parameter's name."""
Kept = dict[Unit, Tensor]


class ShardRun(NamedTuple):
    """A contiguous run of a unit's optimizer shard. updates: the number of its updates, for AdamW's
    bias correction."""

    unit: Unit
    at: slice
    updates: Tensor


class _Batch(NamedTuple):
    """Tensors that one call of the optimizer updates: of several runs, or of a part of one run.
    states: by kind. updates: number of updates of each."""

    masters: list[Tensor]
    gradients: list[Tensor]
    states: list[list[Tensor]]
    updates: list[Tensor]


WIDENED = 1 << 20
"""Numbers whose states are converted to the type of masters at a time, if states are kept in lower
precision."""


def runs_of(store: UnitStore, train: TrainSection) -> Iterator[tuple[float, ShardRun]]:
    """Yield the unit's shard on this rank in runs of equal weight decay, each with that decay.
    Padding belongs to the run before it."""
    numbers = store.numel // store.sharding.optim
    decays = [(one.start, train.decay_of(one.piece.name, len(one.piece.shape))) for one in store.held("optim")]
    starts = [(next(same)[0], decay) for decay, same in groupby(decays, key=lambda one: one[1])] or [(0, 0.0)]
    ends = [*(start for start, _ in starts[1:]), numbers]
    for number, ((start, decay), end) in enumerate(zip(starts, ends, strict=True)):
        count = torch.zeros((), dtype=torch.float32, device=store.kept.device)
        yield decay, ShardRun(store.unit, slice(start if number else 0, end), count)


class Optimizer:
    """Updates this rank's optimizer shards, one flat tensor per unit. train: the settings,
    including which optimizer. group: ranks that share the matrices that Muon needs whole; None:
    this rank alone.

    AdamW and SGD are torch's functional forms: torch's classes import the compiler, which takes a
    second and a half at every rank's start.
    """

    def __init__(
        self, model: Share, gradients: Gradients, train: TrainSection | None = None, group: MatrixGroup | None = None
    ) -> None:
        self.model, self.gradients, self.train = model, gradients, train or TrainSection()
        self.owned: Kept = {
            unit: store.kept[store.part("optim", "params")].detach() for unit, store in model.units.items()
        }
        """The parameters that this rank updates, in the model's dtype, by unit."""
        first = next(iter(self.owned.values()))
        self.separate = first.dtype != gradients.dtype
        """True if masters are copies in higher precision."""
        self.masters: Kept = {
            unit: own.to(gradients.dtype) if self.separate else own for unit, own in self.owned.items()
        }
        self._remembers = torch.bfloat16 if self.train.optimizer_dtype == "bf16" else gradients.dtype
        kinds = [kind for rule in rules_of(self.train.optimizer) for kind in STATES[rule]]
        self.states: dict[str, Kept] = {kind: {} for kind in kinds}
        """Moments and momentum, by kind and unit; the order of kinds is the same on all ranks."""
        self.runs: dict[tuple[Rule, float], list[ShardRun]] = {}
        """Runs to be updated, by rule and weight decay."""
        for unit, master in self.masters.items():
            rule = rule_of(self.train.optimizer, unit)
            for kind in STATES[rule]:
                self.states[kind][unit] = torch.zeros_like(master, dtype=self._remembers)
            for decay, run in runs_of(model.units[unit], self.train):
                self.runs.setdefault((rule, decay), []).append(run)
        self.skipped = 0
        """Updates skipped since the run's first step because they were not finite."""
        self.skipped_in_a_row = 0
        self.muon = self._muon(group) if self.train.optimizer == "muon" else None

    def _muon(self, group: MatrixGroup | None) -> Muon:
        store = next(iter(self.model.units.values()))
        alone = MatrixGroup(
            (Member(getattr(self.model, "tp_rank", 0), store.rank),), store.sharding, NullWire(),
            RankDevice(store.kept.device),
        )  # fmt: skip
        return Muon(self.model, group or alone, self.train.muon, self.gradients.dtype)

    def step(self, learning_rate: float, *, norm: float, clip: float, recorder: Recorder | None = None) -> None:
        """Update the parameters once. If ``norm`` exceeds ``clip``, gradients are scaled down to
        ``clip`` first (0: never)."""
        busy = OptimizerTimer(recorder)
        if clip and norm > clip:
            self.gradients.flat.mul_(clip / norm)
        if self.muon:
            self._look_ahead()
            self.muon.step(
                self.masters, self.gradients.final, learning_rate, lambda name: self.train.decay_of(name, 2), busy.wait,
                lambda: self._elementwise(learning_rate),
            )  # fmt: skip
        else:
            self._elementwise(learning_rate)
        self._publish()
        busy.end()
        self.skipped_in_a_row = 0

    def skip(self) -> None:
        """Skip this update: weights, moments and counts of updates stay."""
        self.skipped += 1
        self.skipped_in_a_row += 1

    # ---- rules ----

    def _elementwise(self, learning_rate: float) -> None:
        """Run the elementwise rules: AdamW and SGD."""
        rules: Mapping[Rule, Callable[[_Batch, float, float], None]] = {"adamw": self._adamw, "sgd": self._sgd}
        for (rule, decay), runs in self.runs.items():
            if rule not in rules:
                continue
            if self._remembers == self.gradients.dtype:
                rules[rule](self._batch(runs, STATES[rule]), learning_rate, decay)
                continue
            for run in runs:
                for batch, kept in self._widened(run, STATES[rule]):
                    rules[rule](batch, learning_rate, decay)
                    for state, (wide,) in zip(kept, batch.states, strict=True):
                        state.copy_(wide)
                run.updates.add_(rule == "adamw")

    def _adamw(self, batch: _Batch, learning_rate: float, decay: float) -> None:
        averages, squares = batch.states
        adamw(
            batch.masters, batch.gradients, averages, squares, [], batch.updates,
            fused=True, amsgrad=False, maximize=False, lr=learning_rate, beta1=self.train.adam_betas[0],
            beta2=self.train.adam_betas[1], eps=self.train.adam_eps, weight_decay=decay,
        )  # fmt: skip

    def _sgd(self, batch: _Batch, learning_rate: float, decay: float) -> None:
        settings = self.train.sgd
        sgd(
            batch.masters, batch.gradients, [*batch.states[0]], foreach=False, fused=False, weight_decay=decay,
            momentum=settings.momentum, lr=learning_rate, dampening=0.0, nesterov=settings.nesterov, maximize=False,
        )  # fmt: skip

    def _look_ahead(self) -> None:
        """Add gradients to Muon's momentum, and replace the gradients by the updates to be
        orthogonalised."""
        settings, whole = self.train.muon, self._remembers == self.gradients.dtype
        for unit, momentum in self.states["momentum"].items():
            size = max(1, momentum.numel()) if whole else WIDENED
            for kept, gradient in zip(momentum.split(size), self.gradients.final[unit].split(size), strict=True):
                wide = kept.to(gradient.dtype)  # ``kept`` itself, if momentum is in the gradient's type
                wide.lerp_(gradient, 1 - settings.momentum)
                if settings.nesterov:
                    gradient.lerp_(wide, settings.momentum)
                else:
                    gradient.copy_(wide)
                if wide is not kept:
                    kept.copy_(wide)

    def _batch(self, runs: Sequence[ShardRun], kinds: Sequence[str]) -> _Batch:
        """Return the tensors of whole runs."""
        every: list[Mapping[Unit, Tensor]] = [self.masters, self.gradients.final, *(self.states[one] for one in kinds)]
        masters, gradients, *states = ([by_unit[run.unit][run.at] for run in runs] for by_unit in every)
        return _Batch(masters, gradients, states, [run.updates for run in runs])

    def _widened(self, run: ShardRun, kinds: Sequence[str]) -> Iterator[tuple[_Batch, list[Tensor]]]:
        """Yield a run part by part as (batch with copies of the states in the type of masters, the
        states themselves)."""
        whole = self._batch([run], kinds)
        every = (whole.masters, whole.gradients, *whole.states)
        for master, gradient, *states in zip(*(one.split(WIDENED) for (one,) in every), strict=True):
            wide = [[state.to(self.gradients.dtype)] for state in states]
            yield _Batch([master], [gradient], wide, [run.updates.clone()]), states

    def _publish(self) -> None:
        if self.separate:
            for unit, master in self.masters.items():
                self.owned[unit].copy_(master)

    # ---- checkpoints ----

    @property
    def held(self) -> dict[str, Any]:
        """The pieces of logical tensors in each tensor of ``state``, by its name."""
        return {store.key: store.held("optim") for store in self.model.units.values()}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return everything that resuming needs, by kind and unit. These are the live tensors, so
        loading fills them in place."""
        kinds = {"master": self.masters, **self.states}
        return {
            kind: {self.model.units[unit].key: tensor for unit, tensor in tensors.items()}
            for kind, tensors in kinds.items()
        }

    def loaded(self, steps: int, skipped: int = 0) -> None:
        """Publish the parameters after ``state`` was filled from a checkpoint made after ``steps``
        steps, of which ``skipped`` had no update. Updates of other ranks are not gathered."""
        self.skipped = skipped
        for run in (run for runs in self.runs.values() for run in runs):
            run.updates.fill_(float(steps - skipped))
        self._publish()

    def close(self) -> None:
        """End the background thread of Muon, if any."""
        if self.muon:
            self.muon.close()


class OptimizerTimer:
    """Records an optimizer's step: computation, interrupted by waits."""

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder, self._number = recorder, 0
        self._begin()

    def _begin(self) -> None:
        if self.recorder:
            self._number = self.recorder.begin(RecordKind.OPTIMIZER, self.recorder.ring.name("optimizer"))

    def end(self) -> None:
        """End the current record of computation."""
        if self.recorder:
            self.recorder.end(self._number)

    def wait(self, handle: BackgroundHandle | None, op: UnitOp) -> None:
        """Wait for an exchange and record the wait; no-op if ``handle`` is None."""
        if handle is None:
            return
        self.end()
        number = self.recorder.begin(RecordKind.WAIT, self.recorder.name_of(op)) if self.recorder else 0
        handle.wait()
        if self.recorder:
            self.recorder.end(number)
        self._begin()


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Learning-rate schedule: linear warm-up to ``peak``, then decay by ``style``
    (``train.lr_decay_style``) to ``floor`` at step ``steps``. decay: steps of the last phase of
    ``wsd`` (Hu 2024, arXiv 2404.06395)."""

    peak: float
    floor: float
    warmup: int
    steps: int
    style: str = "cosine"
    decay: int = 1

    @staticmethod
    def of(train: TrainSection) -> LearningRate:
        """Return the schedule of a job's settings."""
        steps = train.lr_decay_steps or train.steps
        return LearningRate(
            peak=train.learning_rate,
            floor=train.min_learning_rate,
            warmup=train.warmup_steps,
            steps=steps,
            style=train.lr_decay_style,
            decay=train.lr_wsd_decay_steps or max(1, steps // 10),
        )

    def __call__(self, step: int) -> float:
        """Return the learning rate of update number ``step``, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.style == "inverse-square-root":  # continues the warm-up, as in Megatron-LM
            return max(self.floor, self.peak * math.sqrt(max(1, self.warmup) / max(1, self.warmup, step + 1)))
        return self.floor + (self.peak - self.floor) * self._left(step)

    def _left(self, step: int) -> float:
        """Return the decay factor at a step: 1 at the peak learning rate, 0 at the floor."""
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        match self.style:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - progress
            case "wsd":
                return min(1.0, max(0.0, (self.steps - step) / self.decay))
            case _:
                return 0.5 * (1 + math.cos(math.pi * progress))
