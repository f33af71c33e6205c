"""The peer: the same GPT written as plain modules and sharded by PyTorch's own ``parallelize_module``
(DTensor).

Written as PyTorch's tensor-parallel tutorial and torchtitan do, in its most favourable form: one fused
query/key/value weight (one backward all-reduce a sublayer, as in Megatron-LM), vocabulary-parallel embedding,
head and loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from plait.core.model.spec import ModelSpec


class _Attention(nn.Module):
    def __init__(self, spec: ModelSpec, local_heads: int) -> None:
        super().__init__()
        self.local_heads, self.size = local_heads, spec.head_size
        width = spec.num_heads * spec.head_size
        self.qkv = nn.Linear(
            spec.hidden, 3 * width
        )  # rows ordered rank by rank, so that a contiguous shard is whole heads
        self.out = nn.Linear(width, spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.local_heads, self.size).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(o.transpose(1, 2).reshape(b, s, -1))


class _Mlp(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.hidden, spec.ffn_hidden)
        self.down = nn.Linear(spec.ffn_hidden, spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """A layer."""

    def __init__(self, spec: ModelSpec, local_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(spec.hidden), nn.LayerNorm(spec.hidden)
        self.attention, self.mlp = _Attention(spec, local_heads), _Mlp(spec)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class DTensorGpt(nn.Module):
    """[B, S] tokens -> logits, sharded over the vocabulary."""

    def __init__(self, spec: ModelSpec, mesh: DeviceMesh) -> None:
        super().__init__()
        self.words = nn.Embedding(spec.vocab, spec.hidden)
        self.positions = nn.Embedding(spec.max_sequence, spec.hidden)
        self.blocks = nn.ModuleList(Block(spec, spec.num_heads // mesh.size()) for _ in range(spec.num_layers))
        self.norm = nn.LayerNorm(spec.hidden)
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False)
        parallelize_module(
            self,
            mesh,
            {
                "words": RowwiseParallel(input_layouts=Replicate()),
                "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            },
        )
        for block in self.blocks:
            parallelize_module(
                block,
                mesh,
                {
                    "attention": PrepareModuleInput(
                        input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=False
                    ),
                    "attention.qkv": ColwiseParallel(),
                    "attention.out": RowwiseParallel(),
                    "mlp": PrepareModuleInput(
                        input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=False
                    ),
                    "mlp.up": ColwiseParallel(),
                    "mlp.down": RowwiseParallel(),
                },
            )

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def dtensor_step(model: DTensorGpt, tokens: Tensor, targets: Tensor) -> None:
    """One forward and backward with the vocabulary-parallel loss."""
    model.zero_grad(set_to_none=False)
    with loss_parallel():
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
