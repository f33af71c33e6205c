"""AdamW over this rank's shards: fp32 (or fp64) masters where the model computes in less, clipping by the
true norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from plait.core.job.settings import TrainSection
from plait.core.parallel.sharding import Unit
from plait.train.engine.gradients import Gradients
from plait.train.model.transformer import Share
from plait.train.model.units import ShardBox


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up to ``peak``, then down to ``floor`` at ``steps``: by half a cosine, or linearly over the
    last ``decay`` steps after a stable phase (WSD: Hu 2024, arXiv 2404.06395)."""

    peak: float
    floor: float
    warmup: int
    steps: int
    decay: int | None = None

    @staticmethod
    def of(train: TrainSection) -> LearningRate:
        """As a job has it."""
        steps = train.lr_decay_steps or train.steps
        decay = (train.lr_wsd_decay_steps or max(1, steps // 10)) if train.lr_decay_style == "wsd" else None
        return LearningRate(
            peak=train.learning_rate,
            floor=train.min_learning_rate,
            warmup=train.warmup_steps,
            steps=steps,
            decay=decay,
        )

    def __call__(self, step: int) -> float:
        """The rate of update number ``step``, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.decay is not None:
            left = min(1.0, max(0.0, (self.steps - step) / self.decay))
            return self.floor + (self.peak - self.floor) * left
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


class Optimizer:
    """torch's fused AdamW on this rank's optimizer shards, flat, one a unit; matrices decay, norms and biases
    do not.

    By its functional form: ``torch.optim.AdamW`` imports the compiler, a second and a half of every rank's
    start.
    """

    def __init__(
        self,
        model: Share,
        gradients: Gradients,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self.model, self.gradients = model, gradients
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.owned = {unit: store.kept[store.part("optim", "params")].detach() for unit, store in model.units.items()}
        """This rank's to update, in the dtype of the model."""
        first = next(iter(self.owned.values()))
        self.separate = first.dtype != gradients.dtype
        """Whether masters are copies in higher precision."""
        self.masters = {unit: own.to(gradients.dtype) if self.separate else own for unit, own in self.owned.items()}
        self.exp_avg, self.exp_avg_sq = (
            {unit: torch.zeros_like(m) for unit, m in self.masters.items()} for _ in range(2)
        )
        self.updates = {unit: torch.zeros((), dtype=torch.float32, device=m.device) for unit, m in self.masters.items()}
        """How many each had, for AdamW's correction of its averages."""
        self.skipped = 0
        """Updates left out because they were not finite, since the run's first step."""
        self.skipped_in_a_row = 0

    def step(self, learning_rate: float, *, norm: float, clip: float) -> None:
        """One update; gradients are scaled down to ``clip`` where their ``norm`` exceeds it (0: never)."""
        if clip and norm > clip:
            self.gradients.flat.mul_(clip / norm)
        vectors = [unit for unit in self.masters if unit[0] == "vectors"]
        matrices = [unit for unit in self.masters if unit[0] != "vectors"]
        self._update(matrices, learning_rate, self.weight_decay)
        self._update(vectors, learning_rate, 0.0)
        self._publish()
        self.skipped_in_a_row = 0

    def skip(self) -> None:
        """Leave this update out: weights, averages and counts of updates stay."""
        self.skipped += 1
        self.skipped_in_a_row += 1

    def _update(self, units: Sequence[Unit], learning_rate: float, weight_decay: float) -> None:
        every = (self.masters, self.gradients.final, self.exp_avg, self.exp_avg_sq, self.updates)
        masters, gradients, averages, squares, updates = ([tensors[unit] for unit in units] for tensors in every)
        adamw(
            masters, gradients, averages, squares, [], updates,
            fused=True, amsgrad=False, maximize=False,
            lr=learning_rate, beta1=self.betas[0], beta2=self.betas[1], eps=self.eps, weight_decay=weight_decay,
        )  # fmt: skip

    def _publish(self) -> None:
        if self.separate:
            for unit, master in self.masters.items():
                self.owned[unit].copy_(master)

    @property
    def held(self) -> dict[str, list[ShardBox]]:
        """What the tensors of ``state`` hold, by their names."""
        return {store.key: store.held("optim") for store in self.model.units.values()}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything a resume needs, by kind and unit: the live tensors, so that loading fills them in
        place."""
        kinds = {"master": self.masters, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {
            kind: {self.model.units[unit].key: tensor for unit, tensor in tensors.items()}
            for kind, tensors in kinds.items()
        }

    def loaded(self, steps: int, skipped: int = 0) -> None:
        """Call after ``state`` was filled from a checkpoint made after so many steps, ``skipped`` of them
        without an update; other ranks' updates are not gathered."""
        self.skipped = skipped
        for count in self.updates.values():
            count.fill_(float(steps - skipped))
        self._publish()
