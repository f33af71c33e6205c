"""A rank's share of a model as one object: its modules, and the units that store their
parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding, Unit
from plait.core.parallel.strategy import Strategy
from plait.core.step.segments import Site
from plait.core.step.stages import Stage
from plait.train.model.basics import Down, Norm, Up, WeightModule
from plait.train.model.embedding import Embedding
from plait.train.model.expert_layer import ALL_EXPERTS, ExpertGroup, ExpertLayer
from plait.train.model.formulas import Rope
from plait.train.model.pieces import Piece, initialise, pieces
from plait.train.model.sequence import ALONE, SequenceGroup
from plait.train.model.sublayers import Attention, Mlp, ParallelBlock, Sublayer
from plait.train.model.units import ShardSpec, UnitStore, make_units

WHOLE = Sharding()


class Share(Protocol):
    """A rank's share of a model: parameters by name, the pieces they hold, and their units."""

    spec: ModelSpec
    named: dict[str, nn.Parameter]
    pieces: list[Piece]
    units: dict[Unit, UnitStore]


class StageModels:
    """Several stages of one rank as one share."""

    def __init__(self, models: Sequence[Transformer]) -> None:
        self.stages = models
        self.spec = models[0].spec
        self.named = {name: parameter for model in models for name, parameter in model.named.items()}
        self.pieces = [piece for model in models for piece in model.pieces]
        self.units = {unit: store for model in models for unit, store in model.units.items()}


@dataclass(frozen=True, kw_only=True)
class ModelCut:
    """The part of a model that a rank has. stage: None for all layers. tp_rank: its tensor-parallel
    rank. sequence: the groups with which it shares sequences. sharding, shard_rank: how the
    parameters are sharded over ranks with this same share, and this rank's index among them.
    experts: the groups with which it shares out experts; expert_sharding, expert_rank: of these as
    for other parameters."""

    stage: Stage | None = None
    tp_rank: int = 0
    sequence: SequenceGroup = ALONE
    sharding: Sharding = WHOLE
    shard_rank: int = 0
    experts: ExpertGroup = ALL_EXPERTS
    expert_sharding: Sharding = WHOLE
    expert_rank: int = 0


class Transformer(nn.Module):
    """One rank's share of a model, or the whole of it; initial values are the same at all parallel
    degrees."""

    def __init__(
        self,
        spec: ModelSpec,
        strategy: Strategy,
        cut: ModelCut = ModelCut(),
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.strategy = spec, strategy
        tp_rank = self.tp_rank = cut.tp_rank
        to = device or torch.device("cpu")
        self.rope = Rope(spec, dtype, to) if spec.family == "llama" else None
        self.stage = cut.stage or Stage(0, 1, 0, spec.num_layers)
        self.embedding = Embedding(spec, strategy, tp_rank)
        attention = {at: Attention(spec, at, strategy, tp_rank, cut.sequence) for at in self.stage.layers}
        routed = [at for at in self.stage.layers if spec.experts and spec.experts.at(at)]
        mlps = {at: Mlp(spec, at) for at in self.stage.layers if at not in routed}
        layers = {at: ExpertLayer(spec, at, strategy, tp_rank, cut.experts) for at in routed}
        self.sublayers: dict[tuple[Site, int], Sublayer | ParallelBlock] = {}
        self.sublayers |= {("attn", at): attention[at] for at in routed}
        self.sublayers |= {("moe", at): layer for at, layer in layers.items()}
        for at in mlps:
            self.sublayers |= {("attn", at): attention[at], ("mlp", at): mlps[at]}
            self.sublayers["block", at] = ParallelBlock(attention[at], mlps[at])
        changes = [change for change in spec.resampling if change[0] in self.stage.layers]
        self.downs = {level: Down() for _, direction, level in changes if direction == "down"}
        self.ups = {level: Up() for _, direction, level in changes if direction == "up"}
        self.attn, self.mlp, self.moe = _modules(attention), _modules(mlps), _modules(layers)
        self.down, self.up = _modules(self.downs), _modules(self.ups)
        self.norm = Norm(spec)
        self.head = self.embedding.words if spec.tied_embeddings and self.stage.embeds else WeightModule()
        self.pieces: list[Piece] = pieces(spec, strategy, tp_rank, self.stage, cut.experts.held)
        spec_of_shards = ShardSpec(cut.sharding, cut.shard_rank, dtype, to)
        spec_of_experts = ShardSpec(cut.expert_sharding, cut.expert_rank, dtype, to)
        self.units = make_units(self.pieces, self.embedding.rows, self.stage.index, spec_of_shards, spec_of_experts)
        self.named = {name: parameter for store in self.units.values() for name, parameter in store.parameters.items()}
        self._fill(seed)

    def _fill(self, seed: int) -> None:
        """Initialise every parameter from its pieces; rows that no piece covers (vocabulary
        padding) are zero."""
        for store in self.units.values():
            store.fill(lambda piece: initialise(self.spec, piece, seed))
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
            case ["layers", layer, "moe", "experts", part]:
                return getattr(self.moe[layer].experts, part), tail
            case ["layers", layer, site, part]:
                return getattr(getattr(self, site)[layer], part), tail
            case _:
                return getattr(self, head), tail


def _modules(named: Mapping[int, nn.Module]) -> nn.ModuleDict:
    """Return the modules as a ``ModuleDict``, in which torch finds their parameters."""
    return nn.ModuleDict({str(at): module for at, module in named.items()})
