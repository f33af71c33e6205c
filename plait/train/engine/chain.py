"""The chain of segments of a micro-batch, made when it comes in: one object for each segment of each
slice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, starmap

import torch
from torch import Tensor

from plait.core.parallel.strategy import slice_sizes
from plait.core.step.segments import Site
from plait.train.engine.ends import DownSegment, Enter, Leave, UpSegment
from plait.train.engine.inflight import BoundaryTensors, InFlight, MicroBatch
from plait.train.engine.segment import Before, Segment, StageContext
from plait.train.engine.sublayers import SublayerSegment
from plait.train.engine.vocabulary import Embed, Head
from plait.train.model.basics import SliceContext
from plait.train.model.documents import Documents, bounds_of, ends_of
from plait.train.model.dropout import DropoutKey
from plait.train.model.embedding import RowExchange

KINDS: Mapping[Site, type[Segment]] = {
    "embed": Embed,
    "enter": Enter,
    "attn": SublayerSegment,
    "mlp": SublayerSegment,
    "block": SublayerSegment,
    "down": DownSegment,
    "up": UpSegment,
    "head": Head,
    "leave": Leave,
}


@dataclass(frozen=True)
class _Slice:
    """One slice of a micro-batch, on the device. samples: which of its sequences. contexts: by how often the
    sequence has been halved. exchange: only where the stage embeds. scale: of the micro-batch's loss.
    weights: of the targets, [S, b], if they differ."""

    number: int
    samples: slice
    tokens: Tensor  # [S, b]
    targets: Tensor  # [S, b]
    contexts: list[SliceContext]
    exchange: RowExchange | None
    scale: float | Tensor
    weights: Tensor | None


def begin(
    shared: StageContext,
    batch: MicroBatch,
    there: Sequence[Tensor],
    dropout: DropoutKey | None,
    entering: Mapping[str, Tensor],
    scale: float | Tensor,
) -> InFlight:
    """A micro-batch's chains. there: what ``pack`` made, on the device. entering: what other stages sent.
    scale: the batch's, or where it stands on the device."""
    state = InFlight(BoundaryTensors(batch.tokens.shape[0], dict(entering)))
    for cut in _slices(shared, batch, there, dropout, scale):
        before: Segment | None = None
        for site, layer in shared.graph.segments:
            before = _segment(shared, site, layer, cut, state, before)
            state.segments[site, layer, cut.number] = before
    return state


def pack(shared: StageContext, batch: MicroBatch) -> list[Tensor]:
    """What a micro-batch's slices need on the device, in host memory: positions, and for each slice tokens,
    targets, samples; the targets' weights and documents, if the batch has them; where the stage embeds, the
    rows to send and the places where rows arrive."""
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
    """Which sequences each slice has."""
    ends = list(accumulate(slice_sizes(batch.tokens.shape[0], p1), initial=0))
    assert all(first < last for first, last in pairwise(ends)), f"p1 = {p1} slices of {batch.tokens.shape[0]}"
    return list(starmap(slice, pairwise(ends)))


def exchanges(shared: StageContext, tensors: Sequence[Tensor]) -> list[RowExchange]:
    """Of all slices, of what ``pack`` made; none where the stage does not embed."""
    if not shared.graph.embeds:
        return []
    each = (len(tensors) - 1) // shared.graph.p1
    return [RowExchange(*tensors[at - 2 : at]) for at in range(1 + each, len(tensors) + 1, each)]


def _shard(shared: StageContext, batch: MicroBatch) -> tuple[int, int]:
    """Of a sequence's tokens here, how many are this rank's, and the first of them."""
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
    """All slices, of what ``pack`` made."""
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
        context = SliceContext(samples, own, dropout, turns, shared.kernels)
        if batch.starts is not None:
            documents = _documents(batch.starts[cut], next(there), next(there), spread)
            own_places = documents.places[first : first + local]
            of_places = rope and rope.at(documents.places)
            context = replace(context, documents=documents, own_places=own_places, turns=of_places)
        yield _Slice(
            number,
            cut,
            tokens,
            targets,
            [_halved(context, level) for level in range(model.spec.levels + 1)],
            RowExchange(next(there), next(there)) if graph.embeds else None,
            scale,
            weights,
        )


def _halved(context: SliceContext, level: int) -> SliceContext:
    """Where the sequence has been halved ``level`` times."""
    positions, turns = context.positions, context.turns
    if turns is not None:
        cos, sin = (table[: len(table) >> level] for table in turns)
        turns = cos, sin
    return replace(context, positions=positions[: len(positions) >> level], turns=turns)


def _documents(starts: Tensor, there: Tensor, bounds: Tensor, spread: Tensor | None) -> Documents:
    """Of a slice. starts: in host memory; there: on the device. spread: of ``SliceContext``."""
    if spread is None:
        spread = torch.arange(there.shape[1], device=there.device)
    return Documents(ends_of(starts), there, spread[:, None] - there.t()[spread], bounds)


def _segment(
    shared: StageContext, site: Site, layer: int, cut: _Slice, state: InFlight, before: Segment | None
) -> Segment:
    """One segment of one slice, behind ``before``."""
    model, graph = shared.model, shared.graph
    level, (sequence, size) = graph.level(model.spec, site, layer), cut.tokens.shape
    context = cut.contexts[level]
    at_end = {"shared": shared, "crossing": state.crossing, "samples": cut.samples}
    if site == "embed":
        assert cut.exchange is not None
        return Embed(shared=shared, context=context, tokens=cut.tokens, exchange=cut.exchange)
    if site == "enter":
        return Enter(**at_end)
    assert isinstance(before, Before)
    match site:
        case "leave":
            return Leave(**at_end, before=before)
        case "down":
            crosses = ("up", layer) not in graph.places
            return DownSegment(**at_end, before=before, skip=f"skip{layer}", module=model.downs[layer], crosses=crosses)
        case "up":
            down = state.segments.get(("down", layer, cut.number))
            assert down is None or isinstance(down, DownSegment)
            return UpSegment(**at_end, before=before, skip=f"skip{layer}", module=model.ups[layer], down=down)
        case "head":
            return Head(
                shared=shared,
                before=before,
                norm=model.norm,
                shape=(sequence, size),
                targets=cut.targets,
                scale=cut.scale,
                weights=cut.weights,
            )
        case _:
            module = model.sublayers[site, layer]
            return SublayerSegment(
                shared=shared,
                context=context,
                before=before,
                norm=module.norm,
                shape=(sequence >> level, size),
                again=graph.again(site, layer),
                rejoins=graph.rejoins(site, layer),
                module=module,
            )
