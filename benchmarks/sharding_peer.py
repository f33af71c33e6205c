"""The peer: the same GPT under PyTorch's FSDP2 (``fully_shard``), every block and the rest a unit, on a 1-D
or an HSDP mesh."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from dtensor_tp import Block
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from plait.core.model.spec import ModelSpec


class Gpt(nn.Module):
    """[B, S] tokens -> [B, S, V]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(spec.vocab, spec.hidden), nn.Embedding(spec.max_sequence, spec.hidden)
        self.blocks = nn.ModuleList(Block(spec, spec.num_heads) for _ in range(spec.num_layers))
        self.norm = nn.LayerNorm(spec.hidden)
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def fsdp_step(
    spec: ModelSpec, mesh: tuple[int, ...], tokens: Tensor, targets: Tensor, micro_batches: int
) -> Callable[[], object]:
    """A step of ``micro_batches``, AdamW included. mesh: (ranks,) for full sharding, (replicas, ranks) for
    HSDP."""
    names = ("shard",) if len(mesh) == 1 else ("replicate", "shard")
    over = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    model = Gpt(spec)
    for block in model.blocks:
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        assert isinstance(model, FSDPModule)
        parts = list(zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
        for at, (x, y) in enumerate(parts):
            # Without full sharding of gradients the sum over replicas waits for the last micro-batch, as ours
            # does.
            model.set_requires_all_reduce(at == len(parts) - 1)
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step
