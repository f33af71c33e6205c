"""Optimizers over this rank's shards: fp32 (or fp64) masters where the model computes in less, clipping by
the true norm.

| ``train.optimizer`` | matrices of layers | everything else | states |
|---|---|---|---|
| ``adamw`` | AdamW | AdamW | ``exp_avg``, ``exp_avg_sq`` |
| ``muon`` | Muon (``engine.muon``) | AdamW | ``momentum``; ``exp_avg``, ``exp_avg_sq`` |
| ``sgd`` | SGD | SGD | ``momentum`` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from plait.core.job.settings import TrainSection
from plait.core.parallel.optimizers import STATES, Rule, rule_of, rules_of
from plait.core.parallel.sharding import Unit
from plait.core.record.ring import RecordKind
from plait.core.step.units import UnitOp
from plait.train.comm.background import BackgroundHandle
from plait.train.comm.wire import NullWire
from plait.train.engine.gradients import Gradients
from plait.train.engine.muon import MatrixGroup, Member, Muon
from plait.train.machine.device import RankDevice
from plait.train.model.transformer import Share
from plait.train.model.units import UnitStore
from plait.train.record.recorder import Recorder

SAID = {"exp_avg": "first moment of", "exp_avg_sq": "second moment of", "momentum": "momentum of"}
"""What people are told of a state."""
Kept = dict[Unit, Tensor]


class ShardRun(NamedTuple):
    """A run of numbers of a unit's optimizer shard. updates: how many it had, for AdamW's correction of its
    averages."""

    unit: Unit
    at: slice
    updates: Tensor


class _Batch(NamedTuple):
    """What is updated at once: tensors of runs, or of parts of one. states: by kind. updates: how many each
    had."""

    masters: list[Tensor]
    gradients: list[Tensor]
    states: list[list[Tensor]]
    updates: list[Tensor]


WIDENED = 1 << 20
"""Numbers whose states are in the type of masters at a time, where they are kept in less."""


def runs_of(store: UnitStore, train: TrainSection) -> Iterator[tuple[float, ShardRun]]:
    """The unit's shard on this rank, all of it, cut where the weight decay is another, with that; padding
    goes with what is before it."""
    numbers = store.numel // store.sharding.optim
    decays = [(one.start, train.decay_of(one.piece.name, len(one.piece.shape))) for one in store.held("optim")]
    starts = [(next(same)[0], decay) for decay, same in groupby(decays, key=lambda one: one[1])] or [(0, 0.0)]
    ends = [*(start for start, _ in starts[1:]), numbers]
    for number, ((start, decay), end) in enumerate(zip(starts, ends, strict=True)):
        count = torch.zeros((), dtype=torch.float32, device=store.kept.device)
        yield decay, ShardRun(store.unit, slice(start if number else 0, end), count)


class Optimizer:
    """Updates this rank's optimizer shards, flat, one a unit. train: which optimizer, and its settings.
    group: with whom it shares matrices that it needs whole; nobody if not given.

    AdamW and SGD are torch's, by their functional form: their classes import the compiler, a second and a
    half of every rank's start."""

    def __init__(
        self, model: Share, gradients: Gradients, train: TrainSection | None = None, group: MatrixGroup | None = None
    ) -> None:
        self.model, self.gradients, self.train = model, gradients, train or TrainSection()
        self.owned: Kept = {
            unit: store.kept[store.part("optim", "params")].detach() for unit, store in model.units.items()
        }
        """This rank's to update, in the dtype of the model."""
        first = next(iter(self.owned.values()))
        self.separate = first.dtype != gradients.dtype
        """Whether masters are copies in higher precision."""
        self.masters: Kept = {
            unit: own.to(gradients.dtype) if self.separate else own for unit, own in self.owned.items()
        }
        self._remembers = torch.bfloat16 if self.train.optimizer_dtype == "bf16" else gradients.dtype
        kinds = [kind for rule in rules_of(self.train.optimizer) for kind in STATES[rule]]
        self.states: dict[str, Kept] = {kind: {} for kind in kinds}
        """Moments and momentum, by kind and unit; kinds in one order on all ranks."""
        self.runs: dict[tuple[Rule, float], list[ShardRun]] = {}
        """What is updated, by rule and weight decay."""
        for unit, master in self.masters.items():
            rule = rule_of(self.train.optimizer, unit)
            for kind in STATES[rule]:
                self.states[kind][unit] = torch.zeros_like(master, dtype=self._remembers)
            for decay, run in runs_of(model.units[unit], self.train):
                self.runs.setdefault((rule, decay), []).append(run)
        self.skipped = 0
        """Updates left out because they were not finite, since the run's first step."""
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
        """One update; gradients are scaled down to ``clip`` where their ``norm`` exceeds it (0: never)."""
        busy = Busy(recorder)
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
        """Leave this update out: weights, averages and counts of updates stay."""
        self.skipped += 1
        self.skipped_in_a_row += 1

    # ---- rules ----

    def _elementwise(self, learning_rate: float) -> None:
        """Of every number by itself."""
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
        """Add gradients to Muon's momentum; what is left in their place is what it orthogonalises."""
        settings, whole = self.train.muon, self._remembers == self.gradients.dtype
        for unit, momentum in self.states["momentum"].items():
            size = max(1, momentum.numel()) if whole else WIDENED
            for kept, gradient in zip(momentum.split(size), self.gradients.final[unit].split(size), strict=True):
                wide = kept.to(gradient.dtype)  # itself, if it is not kept in less
                wide.lerp_(gradient, 1 - settings.momentum)
                if settings.nesterov:
                    gradient.lerp_(wide, settings.momentum)
                else:
                    gradient.copy_(wide)
                if wide is not kept:
                    kept.copy_(wide)

    def _batch(self, runs: Sequence[ShardRun], kinds: Sequence[str]) -> _Batch:
        """Of these runs, whole."""
        every: list[Mapping[Unit, Tensor]] = [self.masters, self.gradients.final, *(self.states[one] for one in kinds)]
        masters, gradients, *states = ([by_unit[run.unit][run.at] for run in runs] for by_unit in every)
        return _Batch(masters, gradients, states, [run.updates for run in runs])

    def _widened(self, run: ShardRun, kinds: Sequence[str]) -> Iterator[tuple[_Batch, list[Tensor]]]:
        """Of a run, part by part, copies of its states in the type of masters; and the states."""
        whole = self._batch([run], kinds)
        every = (whole.masters, whole.gradients, *whole.states)
        for master, gradient, *states in zip(*(one.split(WIDENED) for (one,) in every), strict=True):
            wide = [[state.to(self.gradients.dtype)] for state in states]
            yield _Batch([master], [gradient], wide, [run.updates.clone()]), states

    def _publish(self) -> None:
        if self.separate:
            for unit, master in self.masters.items():
                self.owned[unit].copy_(master)

    # ---- going on ----

    @property
    def held(self) -> dict[str, Any]:
        """What the tensors of ``state`` hold, by their names."""
        return {store.key: store.held("optim") for store in self.model.units.values()}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything a resume needs, by kind and unit: the live tensors, so that loading fills them in
        place."""
        kinds = {"master": self.masters, **self.states}
        return {
            kind: {self.model.units[unit].key: tensor for unit, tensor in tensors.items()}
            for kind, tensors in kinds.items()
        }

    def loaded(self, steps: int, skipped: int = 0) -> None:
        """Call after ``state`` was filled from a checkpoint made after so many steps, ``skipped`` of them
        without an update; other ranks' updates are not gathered."""
        self.skipped = skipped
        for run in (run for runs in self.runs.values() for run in runs):
            run.updates.fill_(float(steps - skipped))
        self._publish()

    def close(self) -> None:
        """End what runs beside it."""
        if self.muon:
            self.muon.close()


class Busy:
    """The recorder's view of an optimizer: it computes, but for what it waits for."""

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder, self._number = recorder, 0
        self._begin()

    def _begin(self) -> None:
        if self.recorder:
            self._number = self.recorder.begin(RecordKind.OPTIMIZER, self.recorder.ring.name("optimizer"))

    def end(self) -> None:
        """It is done, for now."""
        if self.recorder:
            self.recorder.end(self._number)

    def wait(self, handle: BackgroundHandle | None, op: UnitOp) -> None:
        """Wait for what travels, if anything does."""
        if handle is None:
            return
        self.end()
        number = self.recorder.begin(RecordKind.WAIT, self.recorder.name_of(op)) if self.recorder else 0
        handle.wait()
        if self.recorder:
            self.recorder.end(number)
        self._begin()
