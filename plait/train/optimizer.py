"""AdamW over this rank's shards: fp32 (or fp64) masters where the model computes in less, clipping by the true norm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.train.gradients import Gradients
from plait.train.model import Share
from plait.train.units import Held


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up to ``peak``, then half a cosine down to ``floor`` at ``steps``."""

    peak: float
    floor: float
    warmup: int
    steps: int

    def __call__(self, step: int) -> float:
        """The rate of update number ``step``, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


class Optimizer:
    """torch's AdamW on this rank's optimizer shards, flat, one a unit; matrices decay, norms and biases do not."""

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
        self.owned = {unit: store.kept[store.part("optim", "params")] for unit, store in model.units.items()}
        """This rank's to update, in the dtype of the model."""
        first = next(iter(self.owned.values()))
        self.separate = first.dtype != gradients.dtype
        """Whether masters are copies in higher precision."""
        self.masters = {unit: nn.Parameter(own.to(gradients.dtype) if self.separate else own) for unit, own in self.owned.items()}
        for unit, master in self.masters.items():
            master.grad = gradients.final[unit]
        matrices = [master for (kind, _), master in self.masters.items() if kind != "vectors"]
        vectors = [master for (kind, _), master in self.masters.items() if kind == "vectors"]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, eps=eps, fused=True)

    def step(self, learning_rate: float, *, norm: float, clip: float) -> None:
        """One update; gradients are scaled down to ``clip`` where their ``norm`` exceeds it (0: never)."""
        if clip and norm > clip:
            self.gradients.flat.mul_(clip / norm)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        if self.separate:
            for unit, master in self.masters.items():
                self.owned[unit].copy_(master)

    @property
    def held(self) -> dict[str, list[Held]]:
        """What the tensors of ``state`` hold, by their names."""
        return {store.key: store.held("optim") for store in self.model.units.values()}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything a resume needs, by kind and unit: the live tensors, so that loading fills them in place."""
        units = self.model.units
        tensors: dict[str, dict[str, Tensor]] = {"master": {units[u].key: m.detach() for u, m in self.masters.items()}}
        for kind in ("exp_avg", "exp_avg_sq"):
            tensors[kind] = {units[u].key: self._state_of(master)[kind] for u, master in self.masters.items()}
        return tensors

    def loaded(self, updates: int) -> None:
        """Call after ``state`` was filled from a checkpoint made after ``updates`` updates; other ranks' updates are not gathered."""
        for master in self.masters.values():
            self._state_of(master)["step"].fill_(float(updates))
        self._publish()

    def _state_of(self, master: nn.Parameter) -> dict[str, Tensor]:
        """AdamW's state of one parameter, made as AdamW itself would if it has not run yet."""
        state = self._adam.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
        return state
