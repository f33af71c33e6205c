"""The learning rate of every step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.core.job.settings import TrainSection


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up to ``peak``, then as ``style`` says (``train.lr_decay_style``), to ``floor`` at
    ``steps``. decay: steps of the last phase of ``wsd`` (Hu 2024, arXiv 2404.06395)."""

    peak: float
    floor: float
    warmup: int
    steps: int
    style: str = "cosine"
    decay: int = 1

    @staticmethod
    def of(train: TrainSection) -> LearningRate:
        """As a job has it."""
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
        """The rate of update number ``step``, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.style == "inverse-square-root":  # continues the warm-up, as Megatron-LM has it
            return max(self.floor, self.peak * math.sqrt(max(1, self.warmup) / max(1, self.warmup, step + 1)))
        return self.floor + (self.peak - self.floor) * self._left(step)

    def _left(self, step: int) -> float:
        """Share of the way from the floor to the peak."""
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
