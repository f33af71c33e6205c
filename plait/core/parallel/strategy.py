"""Strategy: how one job is split and which communication overlaps computation, with the rules of
validity.

The planner and the runtime check a strategy with the same function, before any process starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, get_args

from plait.core.base.errors import JobError
from plait.core.base.numbers import divisors, multiples
from plait.core.model.spec import ModelSpec
from plait.core.model.weights import Sublayer, Weight, normed, widths

_widths, _normed = cache(widths), cache(normed)  # called for every segment of every candidate

Overlap = Literal["sync", "async", "domino", "no-communication", "fixed"]
SLICED: tuple[Overlap, ...] = ("domino", "fixed")
"""Overlaps in which slices hide each other's collectives."""
Recompute = Literal["none", "selective", "full", "layer"]
ShardOverlap = Literal["none", "forward", "backward", "both"]
WORDS: Mapping[str, tuple[str, ...]] = {
    "recompute": get_args(Recompute),
    "overlap": get_args(Overlap),
    "shard_overlap": get_args(ShardOverlap),
}
"""Settings whose values are words, with these words."""
LATER_FIELDS = ("streams", "ep", "whole_experts", "awaits_experts")
"""Fields that the first plans did not have."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Degrees, slices, and which communication overlaps computation.

    tp: tensor-parallel degree. overlap: overlap of tensor parallelism's collectives. ``sync``: none
    (plain tensor parallelism). ``async``: a backward collective overlaps the weight gradients of
    its own sublayer (Megatron-LM). ``domino``: the collectives of one slice overlap the computation
    of the others (arXiv
    2409.15241), in an order that is searched. ``fixed``: the same in the paper's own order.
    ``no-communication``: collectives are left out. The results are then wrong, and the speed is
    that of full overlap: for measurements only.

    p1: slices of the batch. p2: column slices of every second weight, each reduced as soon as it is
    computed.

    cp: context-parallel degree. Each sequence is split over cp ranks. Weights are replicated over
    them, as they are over dp. ring: number of these ranks in a ring, along which keys and values
    travel; groups of cp / ring ranks exchange heads (Ulysses).

    sequence_parallel: the residual stream is sharded over tp along the sequence, with all-gathers
    and reduce-scatters instead of all-reduces (Korthikanti 2022, arXiv 2205.05198).

    ep: expert-parallel degree. Neighbouring ranks share out the experts of every layer.
    whole_experts: tensor parallelism does not cut experts; its ranks share out tokens instead, and
    count as neighbours among which experts are shared out. awaits_experts: exchanges of tokens
    with their experts overlap nothing.

    recompute: activations that the backward recomputes. ``selective``: normalised inputs and
    activations, which cost neither a matrix product nor a collective. ``full``: everything but the
    residual stream before every attention and MLP; no tensor-parallel reduction runs again.
    ``layer``: everything but the stream before every layer (2 b S H bytes of it in bf16, InternEvo,
    arXiv 2401.09149); attention's second weight and its reduction run again. For a parallel block
    ``layer`` is the same as ``full``. recompute_layers: number of first layers of every stage that
    recompute (None: all layers).

    shard_overlap: communication of sharded data parallelism that overlaps computation. ``forward``:
    the gather of the next layer, and of the parameters that optimizers changed. ``backward``: the
    gather of the next module, and the reduction of gradients. ``both``; ``none``.

    compile: operations between matrix products are compiled (torch.compile) instead of run op by
    op.

    cuda_graphs: stretches of computation are captured once and replayed, if the device can.

    streams: compute streams over which the slices' layers are spread, so that a GPU may run several
    kernels at once; at most as many as slices.
    """

    tp: int = 1
    overlap: Overlap = "domino"
    p1: int = 1
    p2: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    ring: int = 1
    ep: int = 1
    whole_experts: bool = False
    awaits_experts: bool = False
    recompute: Recompute = "none"
    recompute_layers: int | None = None
    shard_overlap: ShardOverlap = "both"
    compile: bool = False
    cuda_graphs: bool = False
    streams: int = 1

    def __post_init__(self) -> None:
        if self.recompute_layers is not None and self.recompute_layers < 0:
            raise JobError(
                f"{self.recompute_layers} is negative", key="strategy.recompute.layers", fix="Use at least 0"
            )
        for name in ("tp", "p1", "p2", "cp", "ring", "ep", "streams"):
            if getattr(self, name) < 1:
                raise JobError(
                    f"{getattr(self, name)} is not a positive number", key=f"strategy.{name}", fix="Use at least 1"
                )

    def check(self, model: ModelSpec, *, batch: int, sequence: int) -> None:
        """Raise JobError, naming the key, if this strategy cannot run ``model`` on micro-batches of
        ``batch`` sequences of ``sequence`` tokens."""
        tp = self.tp
        others = [{"strategy.tp": one} for one in divisors(model.num_heads, tp)]
        if model.num_heads % tp:
            raise JobError(
                f"tp = {tp} does not divide num_heads = {model.num_heads}", key="strategy.tp", changes=others
            )
        if model.num_kv_heads % tp and tp % model.num_kv_heads:
            raise JobError(
                f"tp = {tp} and num_kv_heads = {model.num_kv_heads}: neither divides the other",
                key="strategy.tp",
                changes=others,
            )
        if model.ffn_hidden % tp:
            raise JobError(
                f"tp = {tp} does not divide ffn_hidden = {model.ffn_hidden}", key="strategy.tp", changes=others
            )
        if self.p1 > batch:
            problem = f"{self.p1} slices of a micro-batch of {batch} sequences, the smallest share of a replica"
            raise JobError(
                problem,
                key="strategy.slices.batch",
                changes=[{"strategy.slices": {"batch": batch, "columns": self.p2}}],
            )
        if model.hidden % self.p2:
            sliced = [
                {"strategy.slices": {"batch": self.p1, "columns": one}} for one in divisors(model.hidden, self.p2)
            ]
            problem = f"{self.p2} column slices do not divide hidden = {model.hidden}"
            raise JobError(problem, key="strategy.slices.columns", changes=sliced)
        if self.streams > self.p1:
            problem = f"{self.streams} compute streams for {self.p1} slice{'s' * (self.p1 > 1)} of the batch"
            sliced = {"strategy.slices": {"batch": self.streams, "columns": self.p2}}
            raise JobError(problem, key="strategy.streams",
                           changes=[{"strategy.streams": self.p1}, *([sliced] * (self.streams <= batch))])  # fmt: skip
        if self.streams > 1 and self.cuda_graphs:
            raise JobError("captured stretches run on one stream", key="strategy.streams",
                           changes=[{"strategy.streams": 1}, {"strategy.cuda_graphs": False}])  # fmt: skip
        self._check_sequence(model, sequence)
        if self.sequence_parallel and sequence // self.cp % tp:
            raise JobError(
                f"tp = {tp} does not divide a rank's {sequence // self.cp} tokens",
                key="strategy.sequence_parallel",
                changes=[{"strategy.sequence_parallel": False}, *_lengths(tp * self.cp, sequence, model)],
            )
        if model.levels >= sequence.bit_length() or sequence % (1 << model.levels):
            raise JobError(f"{sequence} cannot be halved {model.levels} times", key="data.sequence_length",
                           changes=_lengths(1 << model.levels, sequence, model))  # fmt: skip
        if self.sequence_parallel and model.levels:
            raise JobError(
                "a utransformer merges neighbouring tokens, which sequence parallelism would put on different ranks",
                key="strategy.sequence_parallel",
                changes=[{"strategy.sequence_parallel": False}],
            )
        if sequence > model.max_sequence:
            raise JobError(
                f"{sequence} exceeds the model's max_sequence = {model.max_sequence}",
                key="data.sequence_length",
                changes=[{"data.sequence_length": model.max_sequence}],
            )

    def _check_sequence(self, model: ModelSpec, sequence: int) -> None:
        if self.cp % self.ring:
            problem, key = f"{self.ring} ranks a ring do not divide cp = {self.cp}", "strategy.cp_comm_type"
            raise JobError(problem, key=key, changes=[{key: "ulysses"}, {key: "ring"}])
        if self.cp == 1:
            return
        if model.levels:
            raise JobError(
                "a utransformer merges neighbouring tokens, which cp would put on different ranks",
                key="strategy.cp",
                changes=[{"strategy.cp": 1}],
            )
        heads, kv_heads, ulysses = (
            model.num_heads // self.tp,
            max(1, model.num_kv_heads // self.tp),
            self.cp // self.ring,
        )
        if heads % ulysses or (kv_heads % ulysses and ulysses % kv_heads):
            raise JobError(
                f"{ulysses} ranks cannot share out {heads} heads ({kv_heads} of keys and values) "
                "of a tensor-parallel rank",
                key="strategy.cp",
                changes=[
                    *({"strategy.cp": one} for one in divisors(heads, self.cp)),
                    {"strategy.cp_comm_type": "ring"},
                ],
            )
        parts = math.lcm(self.cp, 2 * self.ring if self.ring > 1 else 1)
        if sequence % parts:
            raise JobError(
                f"cp = {self.cp} with rings of {self.ring} cuts sequences into {parts} parts, not {sequence} tokens",
                key="strategy.cp",
                changes=_lengths(parts, sequence, model) or [{"strategy.cp": math.gcd(self.cp, max(1, sequence // 2))}],
            )
        if self.ring > 1 and model.attention_dropout:
            raise JobError(
                "ring attention cannot drop attention weights",
                key="model.attention_dropout",
                changes=[{"model.attention_dropout": 0.0}, {"strategy.cp_comm_type": "ulysses"}],
            )

    def hides_shards(self, *, forward: bool) -> bool:
        """Return True if the communication of sharded data parallelism overlaps computation, in the
        forward or in the backward."""
        return self.shard_overlap in ("both", "forward" if forward else "backward")

    @property
    def expert_tp(self) -> int:
        """Number of tensor-parallel ranks that cut an expert."""
        return 1 if self.whole_experts else self.tp

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that route tokens of one sequence."""
        return self.cp * (self.tp if self.whole_experts else 1)

    def kv_replicas(self, model: ModelSpec) -> int:
        """Return the number of tensor-parallel ranks that hold a copy of each key/value head (1
        unless tp exceeds the number of key/value heads)."""
        return max(1, self.tp // model.num_kv_heads)

    def padded_vocab(self, model: ModelSpec) -> int:
        """Return the vocabulary rounded up to a multiple of tp; padded rows never receive
        probability or gradient."""
        return -(-model.vocab // self.tp) * self.tp

    def widths(self, model: ModelSpec, site: Sublayer) -> tuple[float, float]:
        """Return the elements of a token on one rank: after a sublayer's first weight, and before
        its second."""
        return _widths(site, model.letters, self.tp, self.tp / self.kv_replicas(model))

    def normed(self, model: ModelSpec) -> tuple[float, float]:
        """Return the elements of a token that norms within attention's core normalise on one rank,
        and the number of groups."""
        return _normed(model.letters, self.tp, self.tp / self.kv_replicas(model))

    def cut_size(self, model: ModelSpec, weight: Weight) -> int:
        """Return the size on one rank of a tensor's dimension that is cut, padding included."""
        size = model.letters.size(weight.shape[weight.dim])
        match weight.cut:
            case "words":
                return self.padded_vocab(model) // self.tp
            case "kv":
                return size * self.kv_replicas(model) // self.tp
            case "even":
                return size // self.tp
            case "expert":
                return size // self.expert_tp
            case _:
                return size

    def share(self, model: ModelSpec, weight: Weight) -> int:
        """Return the number of a tensor's elements on one rank, rows of padding included."""
        shape = [model.letters.size(letter) for letter in weight.shape]
        shape[weight.dim] = self.cut_size(model, weight)
        return math.prod(shape)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; ``decode`` reads them back. Fields of ``LATER_FIELDS`` are
        left out at their defaults, as in older files."""
        return {
            key: value
            for key, value in asdict(self).items()
            if key not in LATER_FIELDS or value != getattr(Strategy, key)
        }


def slice_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of ``parts`` contiguous slices of ``total``, as equal as possible, larger
    ones first.

    >>> slice_sizes(8, 3)
    (3, 3, 2)
    """
    base, extra = divmod(total, parts)
    return tuple(base + (i < extra) for i in range(parts))


def _lengths(of: int, sequence: int, model: ModelSpec) -> list[dict[str, int]]:
    """Return changes of the job file to sequence lengths near ``sequence`` that are multiples of
    ``of``."""
    return [{"data.sequence_length": one} for one in multiples(of, sequence, model.max_sequence)]
