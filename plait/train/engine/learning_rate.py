"""The learning rate of every step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.core.job.settings import TrainSection


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
