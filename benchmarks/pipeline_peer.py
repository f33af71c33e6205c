"""The peer: the same pipeline through ``torch.distributed.pipelining``, its 1F1B and the 1F1B order on its
action runtime."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from dtensor_tp import Block
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from plait.core.model.spec import ModelSpec
from plait.core.step.schedule import Schedule
from plait.core.step.schedules import Shape, generate


class GptStage(nn.Module):
    """A stage of the GPT that our variants train: [B, S] tokens or [B, S, H] -> [B, S, H] or logits."""

    def __init__(self, spec: ModelSpec, pp_rank: int, pp: int) -> None:
        super().__init__()
        each = spec.num_layers // pp
        first, last = pp_rank == 0, pp_rank == pp - 1
        self.words = nn.Embedding(spec.vocab, spec.hidden) if first else None
        self.positions = nn.Embedding(spec.max_sequence, spec.hidden) if first else None
        self.blocks = nn.ModuleList(Block(spec, spec.num_heads) for _ in range(each))
        self.norm = nn.LayerNorm(spec.hidden) if last else None
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.words is not None and self.positions is not None:
            x = self.words(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class UStage(nn.Module):
    """Half of the U-Transformer that our variants train, cut at the bottom: [B, S] tokens -> (bottom, one
    skip a level), and back up."""

    def __init__(self, spec: ModelSpec, pp_rank: int, pp: int) -> None:
        super().__init__()
        assert pp == 2, "torch's runtime moves tensors between adjacent stages only"
        half = spec.num_layers // 2
        self.spec, self.first, layers = spec, pp_rank == 0, range(pp_rank * half, (pp_rank + 1) * half)
        self.blocks = nn.ModuleDict({str(layer): Block(spec, spec.num_heads) for layer in layers})
        self.changes = {layer: (direction, level) for layer, direction, level in spec.resampling if layer in layers}
        width = 2 if self.first else 1
        self.resample = nn.ModuleDict(
            {str(layer): nn.Linear(width * spec.hidden, spec.hidden) for layer in self.changes}
        )
        self.words = nn.Embedding(spec.vocab, spec.hidden) if self.first else None
        self.positions = nn.Embedding(spec.max_sequence, spec.hidden) if self.first else None
        self.norm = None if self.first else nn.LayerNorm(spec.hidden)
        self.head = None if self.first else nn.Linear(spec.hidden, spec.vocab, bias=False)

    def forward(self, x: Tensor, *skips: Tensor) -> Any:
        kept = list(skips)
        if self.words is not None and self.positions is not None:
            x = self.words(x) + self.positions.weight[: x.shape[1]]
        for layer, block in self.blocks.items():
            direction, _ = self.changes.get(int(layer), ("", 0))
            if direction == "down":
                kept.append(x)
                earlier = torch.cat((torch.zeros_like(x[:, :1]), x[:, 1:-1:2]), dim=1)
                x = self.resample[layer](torch.cat((earlier, x[:, 0::2]), dim=-1))
            elif direction == "up":
                x = self.resample[layer](x).repeat_interleave(2, dim=1) + kept.pop()
            x = block(x)
        return (x, *kept) if self.norm is None or self.head is None else self.head(self.norm(x))


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shape: tuple[int, ...], seconds: float) -> Tensor:
        ctx.seconds, ctx.like = seconds, x
        time.sleep(seconds)
        return torch.empty(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(2 * ctx.seconds)
        same = gradients[0].shape == ctx.like.shape
        return (gradients[0] if same else torch.zeros_like(ctx.like)), torch.zeros(1), None, None


class StandInStage(nn.Module):
    """Every forward a wait, every backward one of twice that; what it passes on is as large as our variants'
    boundary."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(1))
        self.shape: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return _Wait.apply(x, self.weight, self.shape, self.seconds)  # type: ignore[return-value]


class _Runtime(_PipelineScheduleRuntime):
    """A schedule of ours on torch's action runtime."""

    def __init__(self, stage: PipelineStage, schedule: Schedule, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__([stage], schedule.num_micro_batches, loss_fn=loss, scale_grads=False)
        self.pipeline_order = {
            rank: [_Action.from_str(str(op)) for op in ops] for rank, ops in enumerate(schedule.ranks)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)  # type: ignore[arg-type]


def peer_step(
    kind: str,
    module: nn.Module,
    pp_rank: int,
    pp: int,
    count: int,
    boundary: tuple[int, int, int],
    inputs: Tensor,
    targets: Tensor,
) -> Callable[[], object]:
    """One step of ``count`` micro-batches; kind: ``1f1b`` or ``runtime``."""
    sequence, batch, hidden = boundary
    shapes = [(batch, sequence, hidden)]
    if isinstance(module, StandInStage):
        module.shape = shapes[0]
    if isinstance(module, UStage):
        levels = module.spec.levels
        shapes = [(batch, sequence >> level, hidden) for level in (levels, *range(levels))]
    between = [torch.zeros(shape) for shape in shapes]
    entering = [inputs[:batch]] if pp_rank == 0 else [tensor.clone().requires_grad_() for tensor in between]
    leaving = [tensor.clone().requires_grad_() for tensor in between]
    if pp_rank == pp - 1 and not isinstance(module, StandInStage):
        leaving = [module(*entering).detach()]
    stage = PipelineStage(
        module, pp_rank, pp, torch.device("cpu"), input_args=tuple(entering), output_args=tuple(leaving)
    )

    def loss(found: Tensor, wanted: Tensor) -> Tensor:
        if isinstance(module, StandInStage):
            return found.flatten()[0]
        return F.cross_entropy(found.flatten(0, 1), wanted.flatten())

    schedule: Schedule1F1B | _Runtime
    if kind == "1f1b":
        schedule = Schedule1F1B(stage, count, loss_fn=loss, scale_grads=False)
    else:
        schedule = _Runtime(stage, generate("1f1b", Shape(ranks=pp, micro_batches=count)), loss)

    def step() -> None:
        module.zero_grad()
        if pp_rank == 0:
            schedule.step(inputs, return_outputs=False)
        elif pp_rank == pp - 1:
            schedule.step(target=targets, losses=[], return_outputs=False)
        else:
            schedule.step(return_outputs=False)

    return step
