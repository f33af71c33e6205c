"""GPT and Llama as plain modules: parameters and the mathematics between collectives, no wire and no order.

Activations are [S, B, H] (sequence first), so that a sequence shard is a contiguous range of rows. A sublayer
is::

    h' = join(h, y)      residual stream plus the previous sublayer's reduced output (bias, dropout)
    n  = norm(h')
    z  = n @ column^T + bias        this rank's heads, or its share of the feed-forward features
    o  = core(z)                    attention, or activation
    y  = o @ row^T                  partial sums over ranks, to be reduced

The linears are called by the executor (their input and weight gradients are scheduled apart); ``join``,
``norm`` and ``core`` are differentiated by autograd, ``join`` by ``join_gradient``, which needs no
activations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.core.model import ModelSpec
from plait.core.sharding import Sharding, Unit
from plait.core.stages import Stage
from plait.core.strategy import Strategy
from plait.train.model.dropout import DropoutKey, DropoutSite
from plait.train.model.pieces import Piece, initialise, pieces
from plait.train.model.sequence import ALONE, SequenceGroup, ring_attention, to_heads, to_tokens
from plait.train.model.units import UnitStore, make_units

WHOLE = Sharding()


JoinGradient = tuple[Tensor | None, list[tuple[nn.Parameter, Tensor, Tensor | None]]]
"""Gradients of a join: of what was added to the residual stream; of parameters, of some rows of them or
(None) of all."""


@dataclass(frozen=True)
class SliceContext:
    """What the mathematics of one slice depends on besides activations.

    samples: [B] global sample numbers. positions: [S_local] of the residual stream (a shard when
    sequence-parallel). spread: [S] of the tokens that attention gets from this rank, if they are not 0, 1,
    ...
    """

    samples: Tensor
    positions: Tensor
    dropout: DropoutKey | None
    spread: Tensor | None = None


class Sublayer(nn.Module):
    """Attention or MLP: norm, a column-parallel weight, a core, a row-parallel weight."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        self.norm = Norm(spec)
        self.column = Weight()
        self.row = Weight()

    site: DropoutSite
    cheap = False
    """Whether the core costs little to run again."""

    @property
    def branches(self) -> list[Sublayer]:
        """What stands side by side between norm and join."""
        return [self]

    def join(self, h: Tensor | None, y: Tensor, context: SliceContext) -> Tensor:
        """Residual stream after this sublayer, [S, B, H]; ``y`` comes as [parts, S, B, H / parts], reduced.

        Column parts are read where the collectives left them: the sum writes the contiguous result, so there
        is no concatenation.
        """
        assert h is not None
        parts, width = y.shape[0], y.shape[3]
        y = y.permute(1, 2, 0, 3) if parts > 1 else y.view(*h.shape)
        h = h.view(*h.shape[:2], parts, width) if parts > 1 else h
        if self.row.bias is not None:
            y = y + (self.row.bias.view(parts, width) if parts > 1 else self.row.bias)
        if context.dropout is not None and self.spec.dropout:
            like = h.view(*h.shape[:2], -1)
            mask = context.dropout.hidden(
                self.spec.dropout, self.layer, self.site, context.samples, context.positions, like
            )
            y = y * mask.view(y.shape)
        return (h + y).view(*h.shape[:2], -1)

    def join_gradient(self, gradient: Tensor, context: SliceContext) -> JoinGradient:
        """Gradient of ``y`` from that of the sum."""
        if context.dropout is not None and self.spec.dropout:
            mask = context.dropout.hidden(
                self.spec.dropout, self.layer, self.site, context.samples, context.positions, gradient
            )
            gradient = gradient * mask
        return gradient, [(self.row.bias, gradient.sum((0, 1)), None)] if self.row.bias is not None else []

    def core(self, z: Tensor, context: SliceContext, kept: list[Tensor] | None = None) -> Tensor:
        """[S, B, first weight's rows] -> [S, B, second weight's columns].

        kept: given to a core that will run again; the first time it may leave there what it does not want to
        ask other ranks for twice.
        """
        raise NotImplementedError


class Attention(Sublayer):
    """Causal self-attention over this rank's heads; grouped-query where there are fewer key/value heads."""

    site = "attn"

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        strategy: Strategy,
        tp_rank: int,
        rope: Rope | None,
        sequence: SequenceGroup = ALONE,
    ) -> None:
        super().__init__(spec, layer)
        self.sequence = sequence
        self.num_heads = spec.num_heads // strategy.tp
        self.num_kv_heads = max(1, spec.num_kv_heads // strategy.tp)
        self.first_head = tp_rank * self.num_heads
        self.rope = rope

    def core(self, z: Tensor, context: SliceContext, kept: list[Tensor] | None = None) -> Tensor:
        """Rotary positions, attention (over the tokens of all ranks that share the sequence), heads side by
        side again."""
        s, b, _ = z.shape
        size = self.spec.head_size
        q, k, v = z.view(s, b, -1, size).split(
            [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=2
        )  # [S, B, N, D]
        if self.rope is not None:
            cos, sin = self.rope.tables(s, z, context.spread)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        heads, ring = self.sequence.ulysses, self.sequence.ring
        if heads.size > 1:
            q, k, v = to_heads(q, k, v, heads)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [B, N, S, D]
        o = ring_attention(q, k, v, ring, kept) if ring.size > 1 else self._attend(q, k, v, context)
        o = o.permute(2, 0, 1, 3)
        if heads.size > 1:
            o = to_tokens(o, heads)
        return o.reshape(s, b, -1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: SliceContext) -> Tensor:
        dropout, grouped = context.dropout, q.shape[1] != k.shape[1]
        if dropout is None or not self.spec.attention_dropout:
            if not grouped or q.is_cuda:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # The fused kernels draw their own random numbers; masks that do not depend on order need the weights
        # in the open.
        if grouped:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        s = q.shape[2]
        scores = (q @ k.transpose(2, 3)) / math.sqrt(q.shape[3])
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
        first = self.first_head + self.sequence.ulysses.rank * q.shape[1]
        heads = torch.arange(first, first + q.shape[1], device=q.device)
        mask = dropout.attention(self.spec.attention_dropout, self.layer, context.samples, heads, scores)
        return (scores.softmax(dim=-1) * mask) @ v


class Mlp(Sublayer):
    """GELU (tanh form, as GPT-2) or SwiGLU over this rank's features."""

    site = "mlp"
    cheap = True

    def core(self, z: Tensor, context: SliceContext, kept: list[Tensor] | None = None) -> Tensor:
        """Activation; with a gate, its rows come first."""
        if not self.spec.gated:
            return F.gelu(z, approximate="tanh")
        gate, up = z.chunk(2, dim=-1)
        return F.silu(gate) * up


class ParallelBlock:
    """Attention and MLP side by side, y = attention(norm(h)) + mlp(norm(h)): one norm, one bias, one gather
    and one reduction (Wang 2021; MegaScale, arXiv 2402.15627, section 3.1)."""

    def __init__(self, attention: Attention, mlp: Mlp) -> None:
        self.branches: list[Sublayer] = [attention, mlp]
        self.norm = attention.norm
        self.join, self.join_gradient = mlp.join, mlp.join_gradient


class RowExchange(NamedTuple):
    """send: rows of this rank's shard, padded so that all ranks send equally many. arrival: where, among all
    rows sent by rank 0, 1, ..., each token's row arrives; shaped like the tokens."""

    send: Tensor
    arrival: Tensor


class Embedding(nn.Module):
    """Vocabulary-parallel word embedding, learned positions where the family has them, embedding dropout."""

    def __init__(self, spec: ModelSpec, strategy: Strategy, tp_rank: int) -> None:
        super().__init__()
        self.spec = spec
        self.num_shards = strategy.tp
        self.rows = strategy.padded_vocab(spec) // strategy.tp
        self.first = tp_rank * self.rows
        self.words = Weight()
        self.positions = Weight() if spec.learned_positions else None

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(row in this rank's shard, whether the token is in it), both shaped like ``tokens``."""
        rows = tokens - self.first
        here = (rows >= 0) & (rows < self.rows)
        return rows.clamp(0, self.rows - 1), here

    def exchange(self, tokens: Tensor) -> RowExchange:
        """How the ranks exchange the rows that ``tokens`` (any shape, in host memory) name: every distinct
        row travels once.

        A rank owns a range of the vocabulary, so every rank knows without asking who sends which rows.
        """
        distinct, places = torch.unique(tokens, return_inverse=True)  # sorted, so each owner's rows lie side by side
        owners = distinct // self.rows
        counts = torch.bincount(owners, minlength=self.num_shards)
        most = int(counts.max())
        starts = counts.cumsum(0) - counts
        arrival = owners * most + torch.arange(len(distinct)) - starts[owners]
        mine = distinct[owners == self.first // self.rows] - self.first
        return RowExchange(torch.nn.functional.pad(mine, (0, most - len(mine))), arrival[places])

    def join(self, h: Tensor | None, y: Tensor, context: SliceContext) -> Tensor:
        """The residual stream's beginning: word embeddings [1, S, B, H] plus positions."""
        assert h is None
        y = y[0]
        if self.positions is not None:
            y = y + self.positions.weight[context.positions][:, None, :]
        if context.dropout is not None and self.spec.dropout:
            y = y * context.dropout.hidden(self.spec.dropout, 0, "embed", context.samples, context.positions, y)
        return y

    def join_gradient(self, gradient: Tensor, context: SliceContext) -> JoinGradient:
        """Gradient of ``y`` from that of the sum."""
        if context.dropout is not None and self.spec.dropout:
            gradient = gradient * context.dropout.hidden(
                self.spec.dropout, 0, "embed", context.samples, context.positions, gradient
            )
        if self.positions is None:
            return gradient, []
        return gradient, [(self.positions.weight, gradient.sum(1), context.positions)]


class Entrance:
    """Where another stage's residual stream comes in: the producer of a stage's first segment."""

    def join(self, h: Tensor | None, y: Tensor | None, context: SliceContext) -> Tensor:
        """The residual stream as it came."""
        assert h is not None and y is None
        return h

    def join_gradient(self, gradient: Tensor, context: SliceContext) -> JoinGradient:
        """There is no ``y``."""
        return None, []


class Weight(nn.Module):
    """A weight and perhaps a bias, filled in by ``Transformer``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None = None


class Down(Weight):
    """Half as long: two neighbours become one, which stands where the later of them stood, so that nobody
    sees what comes after."""

    def forward(self, h: Tensor, skip: Tensor | None = None) -> Tensor:
        """[S, B, H] -> [S / 2, B, H]: of tokens 2j-1 and 2j."""
        assert skip is None
        earlier = torch.cat((torch.zeros_like(h[:1]), h[1:-1:2]))
        return F.linear(torch.cat((earlier, h[0::2]), dim=-1), self.weight, self.bias)


class Up(Weight):
    """Twice as long: every token is that of the coarse one that ends with it or before it, plus what the down
    path had."""

    def forward(self, h: Tensor, skip: Tensor | None = None) -> Tensor:
        """[S / 2, B, H] and the skip connection [S, B, H] -> [S, B, H]."""
        assert skip is not None
        return F.linear(h, self.weight, self.bias).repeat_interleave(2, dim=0) + skip


class Norm(nn.Module):
    """LayerNorm (gpt) or RMSNorm (llama)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None = None

    def forward(self, h: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H]."""
        if self.spec.has_bias:
            return F.layer_norm(h, (self.spec.hidden,), self.weight, self.bias, self.spec.norm_eps)
        return F.rms_norm(h, (self.spec.hidden,), self.weight, self.spec.norm_eps)


class Rope:
    """Rotary position tables (Su 2021, arXiv 2104.09864), half-split as in Hugging Face's Llama, computed
    once.

    Positions belong to tokens, so slices over the batch share the tables and never wait for each other.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._cache: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def tables(self, sequence: int, like: Tensor, spread: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0 to ``sequence``, or ``spread``, [S, 1, 1, D], in the dtype and on the
        device of ``like``."""
        if spread is not None:
            cos, sin = self.tables(self.spec.max_sequence, like)
            return cos[spread], sin[spread]
        key = (sequence, like.dtype, like.device)
        if key not in self._cache:
            angles = torch.arange(sequence, dtype=torch.float64)[:, None] * self._frequencies()[None, :]
            both = torch.cat((angles, angles), dim=1)[:, None, None, :]
            self._cache[key] = both.cos().to(like), both.sin().to(like)
        return self._cache[key]

    def _frequencies(self) -> Tensor:
        spec, size = self.spec, self.spec.head_size
        frequencies = spec.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        if (scaling := spec.rope_scaling) is None:
            return frequencies
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_max_positions / wavelengths
        blend = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
        return frequencies * (blend + (1 - blend) / scaling.factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of the last dim of [S, B, N, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Share(Protocol):
    """What a rank holds of a model: parameters by name, and which part of which tensor they are."""

    spec: ModelSpec
    named: dict[str, nn.Parameter]
    pieces: list[Piece]
    units: dict[Unit, UnitStore]


class Stages:
    """Several stages of one rank as one share."""

    def __init__(self, models: Sequence[Transformer]) -> None:
        self.stages = models
        self.spec = models[0].spec
        self.named = {name: parameter for model in models for name, parameter in model.named.items()}
        self.pieces = [piece for model in models for piece in model.pieces]
        self.units = {unit: store for model in models for unit, store in model.units.items()}


class Transformer(nn.Module):
    """One tensor-parallel rank's share of a pipeline stage, or of the whole model; initialised the same
    whatever the degrees.

    sequence: with whom it shares sequences. sharding, shard_rank: how its parameters are cut over the ranks
    that hold this same share, and which of them this is.
    """

    def __init__(
        self,
        spec: ModelSpec,
        strategy: Strategy,
        *,
        tp_rank: int = 0,
        stage: Stage | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        sequence: SequenceGroup = ALONE,
        sharding: Sharding = WHOLE,
        shard_rank: int = 0,
    ) -> None:
        super().__init__()
        self.spec, self.strategy, self.tp_rank = spec, strategy, tp_rank
        rope = Rope(spec) if spec.family == "llama" else None
        self.stage = stage or Stage(0, 1, 0, spec.num_layers)
        self.embedding = Embedding(spec, strategy, tp_rank)
        self.entrance = Entrance()
        self.attn = nn.ModuleDict(
            {str(layer): Attention(spec, layer, strategy, tp_rank, rope, sequence) for layer in self.stage.layers}
        )
        self.mlp = nn.ModuleDict({str(layer): Mlp(spec, layer) for layer in self.stage.layers})
        self.blocks = {layer: ParallelBlock(self.attn[str(layer)], self.mlp[str(layer)]) for layer in self.stage.layers}  # type: ignore[arg-type]
        changes = [change for change in spec.resampling if change[0] in self.stage.layers]
        self.down = nn.ModuleDict({str(level): Down() for _, direction, level in changes if direction == "down"})
        self.up = nn.ModuleDict({str(level): Up() for _, direction, level in changes if direction == "up"})
        self.norm = Norm(spec)
        self.head = self.embedding.words if spec.tied_embeddings and self.stage.embeds else Weight()
        self.pieces: list[Piece] = pieces(spec, strategy, tp_rank, self.stage)
        self._fill(seed, sharding, shard_rank, dtype, device or torch.device("cpu"))

    def _fill(self, seed: int, sharding: Sharding, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make every parameter from its pieces; rows that no piece covers (vocabulary padding) are zero."""
        self.units = make_units(self.pieces, self.embedding.rows, self.stage.index, sharding, rank, dtype, device)
        for store in self.units.values():
            store.fill(lambda piece: initialise(self.spec, piece, seed))
        self.named = {name: parameter for store in self.units.values() for name, parameter in store.parameters.items()}
        for name, parameter in self.named.items():
            module, tail = self._owner(name)
            setattr(module, tail, parameter)

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        head, _, tail = name.rpartition(".")
        match head.split("."):
            case ["embedding"]:
                return self.embedding.words, tail
            case ["positions"]:
                assert self.embedding.positions is not None
                return self.embedding.positions, tail
            case ["down" | "up" as direction, level]:
                return getattr(self, direction)[level], tail
            case ["layers", layer, site, part]:
                return getattr(getattr(self, site)[layer], part), tail
            case _:
                return getattr(self, head), tail

    def sublayer(self, site: str, layer: int) -> Any:
        """The attention or MLP of a layer, or both, the down or up of a level."""
        if site == "block":
            return self.blocks[layer]
        return getattr(self, site)[str(layer)]
