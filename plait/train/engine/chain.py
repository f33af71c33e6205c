"""The chain of segments of a micro-batch, made when it comes in: one object for each segment of each
slice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from plait.core.segments import Site
from plait.core.strategy import slice_sizes
from plait.train.engine.ends import Down, Enter, Leave, Up
from plait.train.engine.inflight import Crossing, InFlight, MicroBatch
from plait.train.engine.segment import Before, Segment, Shared
from plait.train.engine.sublayers import Sublayer
from plait.train.engine.vocabulary import Embed, Head
from plait.train.machine.device import Device
from plait.train.model.basics import SliceContext
from plait.train.model.dropout import DropoutKey
from plait.train.model.embedding import RowExchange

KINDS: Mapping[Site, type[Segment]] = {
    "embed": Embed,
    "enter": Enter,
    "attn": Sublayer,
    "mlp": Sublayer,
    "block": Sublayer,
    "down": Down,
    "up": Up,
    "head": Head,
    "leave": Leave,
}


@dataclass(frozen=True)
class _Slice:
    """One slice of a micro-batch, on the device. samples: which of its sequences. contexts: by how often the
    sequence has been halved. exchange: only where the stage embeds."""

    number: int
    samples: slice
    tokens: Tensor  # [S, b]
    targets: Tensor  # [S, b]
    contexts: list[SliceContext]
    exchange: RowExchange | None


def begin(
    shared: Shared, batch: MicroBatch, device: Device, dropout: DropoutKey | None, entering: Mapping[str, Tensor]
) -> InFlight:
    """A micro-batch's chains. entering: what other stages sent."""
    state = InFlight(Crossing(batch.tokens.shape[0], dict(entering)))
    for cut in _slices(shared, batch, device, dropout):
        before: Segment | None = None
        for site, layer in shared.graph.segments:
            before = _segment(shared, site, layer, cut, batch.scale, state, before)
            state.segments[site, layer, cut.number] = before
    return state


def _slices(shared: Shared, batch: MicroBatch, device: Device, dropout: DropoutKey | None) -> Iterator[_Slice]:
    """All slices, what they need brought to the device at once."""
    model, graph, wire = shared.model, shared.graph, shared.wire
    sequence = batch.tokens.shape[1]
    local = sequence // wire.size if graph.sequence_parallel else sequence
    first = wire.rank * local if graph.sequence_parallel else 0
    positions = torch.arange(first, first + local) if batch.positions is None else batch.positions
    sizes = slice_sizes(batch.tokens.shape[0], graph.p1)
    assert min(sizes) > 0, f"p1 = {graph.p1} slices of a micro-batch of {batch.tokens.shape[0]}"
    ends = list(accumulate(sizes, initial=0))
    packed = [positions]
    cuts = zip(*(t.split(sizes) for t in (batch.tokens, batch.targets, batch.samples)), strict=True)
    for tokens, targets, samples in cuts:
        packed += [tokens.t().contiguous(), targets.t().contiguous(), samples]
        if graph.embeds:
            rows = model.embedding.exchange(tokens.t().contiguous())
            packed += [rows.send, rows.arrival[first : first + local]]
    there = iter(device.upload(packed))
    positions = next(there)
    spread, own = (None, positions) if batch.positions is None else (positions, positions[first : first + local])
    for number in range(len(sizes)):
        tokens, targets, samples = (next(there) for _ in range(3))
        yield _Slice(
            number,
            slice(ends[number], ends[number + 1]),
            tokens,
            targets,
            [
                SliceContext(samples, own[: local >> level], dropout, spread, shared.kernels)
                for level in range(model.spec.levels + 1)
            ],
            RowExchange(next(there), next(there)) if graph.embeds else None,
        )


def _segment(
    shared: Shared, site: Site, layer: int, cut: _Slice, scale: float, state: InFlight, before: Segment | None
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
            return Down(**at_end, before=before, skip=f"skip{layer}", module=model.downs[layer], crosses=crosses)
        case "up":
            down = state.segments.get(("down", layer, cut.number))
            assert down is None or isinstance(down, Down)
            return Up(**at_end, before=before, skip=f"skip{layer}", module=model.ups[layer], down=down)
        case "head":
            return Head(
                shared=shared,
                before=before,
                norm=model.norm,
                shape=(sequence, size),
                targets=cut.targets,
                scale=scale,
            )
        case _:
            module = model.sublayers[site, layer]
            return Sublayer(
                shared=shared,
                context=context,
                before=before,
                norm=module.norm,
                shape=(sequence >> level, size),
                again=graph.again(site, layer),
                module=module,
            )
