"""Build the chain of segments of a micro-batch when it begins: one object for each segment of each
slice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, starmap
from typing import Any
from weakref import proxy

import torch
from torch import Tensor

from plait.core.parallel.strategy import slice_sizes
from plait.core.step.segments import Site
from plait.train.engine.experts import ExpertSegment
from plait.train.engine.inflight import BoundaryTensors, InFlight, MicroBatch
from plait.train.engine.segment import Segment, StageContext, StreamSegment
from plait.train.engine.sublayers import SublayerSegment
from plait.train.engine.vocabulary import DownSegment, Embed, Enter, Head, Leave, UpSegment
from plait.train.model.basics import SliceContext
from plait.train.model.documents import Documents, bounds_of, ends_of
from plait.train.model.dropout import DropoutKey
from plait.train.model.embedding import RowExchange

SEGMENT_CLASSES: Mapping[Site, type[Segment]] = {
    "embed": Embed,
    "enter": Enter,
    "attn": SublayerSegment,
    "mlp": SublayerSegment,
    "moe": ExpertSegment,
    "block": SublayerSegment,
    "down": DownSegment,
    "up": UpSegment,
    "head": Head,
    "leave": Leave,
}


@dataclass(frozen=True)
class _Slice:
    """Inputs of one slice of a micro-batch, on the device. samples: its sequences in the
    micro-batch. contexts: indexed by the number of halvings of the sequence. exchange: only if the
    stage embeds. scale: of the micro-batch's loss. weights: of the targets, [S, b], if they
    differ."""

    number: int
    samples: slice
    tokens: Tensor  # [S, b]
    targets: Tensor  # [S, b]
    contexts: list[SliceContext]
    exchange: RowExchange | None
    scale: float | Tensor
    weights: Tensor | None
    token_share: float


def begin(
    shared: StageContext,
    batch: MicroBatch,
    device_tensors: Sequence[Tensor],
    dropout: DropoutKey | None,
    entering: Mapping[str, Tensor],
    scale: float | Tensor,
) -> InFlight:
    """Return a micro-batch's in-flight state with the segments of all slices. device_tensors: the
    tensors of ``pack``, on the device. entering: tensors received from other stages. scale: the
    batch's loss scale, or a device tensor that holds it."""
    state = InFlight(BoundaryTensors(batch.tokens.shape[0], dict(entering)))
    for cut in _slices(shared, batch, device_tensors, dropout, scale):
        before: Segment | None = None
        for site, layer in shared.graph.segments:
            before = _segment(shared, site, layer, cut, state, before)
            state.segments[site, layer, cut.number] = before
    return state


def pack(shared: StageContext, batch: MicroBatch) -> list[Tensor]:
    """Return the tensors to upload for a micro-batch's slices, in host memory.

    Positions first; for each slice tokens, targets and samples; the targets' weights and the
    documents, if the batch has them. If the stage embeds: the rows to send, and for each token the
    index of its row among all received rows.
    """
    model, graph = shared.model, shared.graph
    local, first = _shard(shared, batch)
    positions = torch.arange(first, first + local) if batch.positions is None else batch.positions
    packed = [positions]
    for cut in _cuts(batch, graph.p1):
        tokens, targets, samples = (batch.tokens[cut], batch.targets[cut], batch.samples[cut])
        packed += [tokens.t().contiguous(), targets.t().contiguous(), samples]
        if batch.weights is not None:
            packed.append(batch.weights[cut].t().contiguous())
        if batch.starts is not None:
            packed += [batch.starts[cut].contiguous(), bounds_of(ends_of(batch.starts[cut]))]
        if graph.embeds:
            rows = model.embedding.exchange(tokens.t().contiguous())
            packed += [rows.send, rows.arrival[first : first + local]]
    return packed


def _cuts(batch: MicroBatch, p1: int) -> list[slice]:
    """Return the sequences of each slice."""
    ends = list(accumulate(slice_sizes(batch.tokens.shape[0], p1), initial=0))
    assert all(first < last for first, last in pairwise(ends)), f"p1 = {p1} slices of {batch.tokens.shape[0]}"
    return list(starmap(slice, pairwise(ends)))


def exchanges(shared: StageContext, tensors: Sequence[Tensor]) -> list[RowExchange]:
    """Return the row exchanges of all slices in the tensors of ``pack``; empty if the stage does
    not embed."""
    if not shared.graph.embeds:
        return []
    each = (len(tensors) - 1) // shared.graph.p1
    return [RowExchange(*tensors[at - 2 : at]) for at in range(1 + each, len(tensors) + 1, each)]


def _shard(shared: StageContext, batch: MicroBatch) -> tuple[int, int]:
    """Return how many of a sequence's tokens this rank holds, and the index of the first."""
    sequence, wire = batch.tokens.shape[1], shared.wire
    local = sequence // wire.size if shared.graph.sequence_parallel else sequence
    return local, wire.rank * local if shared.graph.sequence_parallel else 0


def _slices(
    shared: StageContext,
    batch: MicroBatch,
    tensors: Sequence[Tensor],
    dropout: DropoutKey | None,
    scale: float | Tensor,
) -> Iterator[_Slice]:
    """Yield all slices, from the tensors of ``pack``."""
    model, graph = shared.model, shared.graph
    local, first = _shard(shared, batch)
    there = iter(tensors)
    positions = next(there)
    spread, own = (None, positions) if batch.positions is None else (positions, positions[first : first + local])
    rope = model.rope
    turns = rope and (rope.first(batch.tokens.shape[1]) if spread is None else rope.at(spread))
    for number, cut in enumerate(_cuts(batch, graph.p1)):
        tokens, targets, samples = (next(there) for _ in range(3))
        weights = None if batch.weights is None else next(there)
        context = SliceContext(samples, own, dropout, turns, shared.kernels, sequence_positions=spread)
        if batch.starts is not None:
            documents = _documents(batch.starts[cut], next(there), next(there), spread)
            own_positions = documents.positions[first : first + local]
            tables = rope and rope.at(documents.positions)
            context = replace(context, documents=documents, own_positions=own_positions, rotary=tables)
        yield _Slice(
            number,
            cut,
            tokens,
            targets,
            [_halved(context, level) for level in range(model.spec.levels + 1)],
            RowExchange(next(there), next(there)) if graph.embeds else None,
            scale,
            weights,
            batch.token_share,
        )


def _halved(context: SliceContext, level: int) -> SliceContext:
    """Return the context for a sequence that was halved ``level`` times."""
    positions, turns = context.positions, context.rotary
    if turns is not None:
        cos, sin = (table[: len(table) >> level] for table in turns)
        turns = cos, sin
    return replace(context, positions=positions[: len(positions) >> level], rotary=turns)


def _documents(starts: Tensor, device_starts: Tensor, bounds: Tensor, spread: Tensor | None) -> Documents:
    """Return the documents of a slice. starts: in host memory; device_starts: the same on the
    device. spread: positions of the slice's tokens, [S]; None: all in order."""
    if spread is None:
        spread = torch.arange(device_starts.shape[1], device=device_starts.device)
    return Documents(ends_of(starts), device_starts, spread[:, None] - device_starts.t()[spread], bounds)


def _segment(
    shared: StageContext, site: Site, layer: int, cut: _Slice, state: InFlight, before: Segment | None
) -> Segment:
    """Return one segment of one slice; ``before`` is the previous segment."""
    model, graph = shared.model, shared.graph
    level, (sequence, size) = graph.level(model.spec, site, layer), cut.tokens.shape
    context = cut.contexts[level]
    at_end = {"shared": shared, "crossing": state.crossing, "samples": cut.samples}
    if site == "embed":
        assert cut.exchange is not None
        return Embed(shared=shared, context=context, tokens=cut.tokens, exchange=cut.exchange)
    if site == "enter":
        return Enter(**at_end)
    assert isinstance(before, StreamSegment)
    match site:
        case "leave":
            return Leave(**at_end, previous=before)
        case "down":
            crosses = ("up", layer) not in graph.segment_index
            return DownSegment(
                **at_end, previous=before, skip=f"skip{layer}", module=model.downs[layer], crosses=crosses
            )
        case "up":
            down = state.segments.get(("down", layer, cut.number))
            assert down is None or isinstance(down, DownSegment)
            return UpSegment(**at_end, previous=before, skip=f"skip{layer}", module=model.ups[layer], down=down)
        case "head":
            return Head(
                shared=shared,
                previous=before,
                norm_module=model.norm,
                shape=(sequence, size),
                targets=cut.targets,
                scale=cut.scale,
                weights=cut.weights,
            )
        case _:
            module = model.sublayers[site, layer]
            common: dict[str, Any] = {
                "shared": shared,
                "context": context,
                "previous": before,
                "norm_module": module.norm,
                "shape": (sequence >> level, size),
                "recomputed_kinds": graph.recomputed_kinds(site, layer),
                "rejoins": graph.readds_stream(site, layer),
                "module": module,
            }
            if site == "moe":
                own = proxy(state)  # a reference would be a circle, and tensors would wait for its collection
                return ExpertSegment(**common, state=own, layer=layer, token_share=cut.token_share)
            return SublayerSegment(**common)
