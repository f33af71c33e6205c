"""The tables of ``plait train --dry-run``: what a job takes of every rank, without starting one."""

from __future__ import annotations

import json
from collections.abc import Sequence

from plait.cli import terminal
from plait.core.base.passed_over import PassedOver
from plait.core.base.text import in_bytes
from plait.plan.estimate import Estimate, PlaceEstimate
from plait.plan.fits import KINDS, Room

SHOWN = 6
"""Places; of more, the first, the last and the most loaded."""
HEADS = ("params", "grads", "optim", "buffers", "activ.")
AXES = {
    "tp": ("tensor parallelism", "tp"),
    "rows": ("embedding rows, at most", "rows"),
    "copies": ("copies over tp, at most", ""),
    "ulysses": ("attention heads (Ulysses)", "ulysses"),
    "ring": ("keys and values (ring)", "ring"),
    "params": ("sharded parameters", "dp"),
    "secondary": ("their second copy", "dp"),
    "grads": ("sharded gradients", "dp"),
    "optim": ("optimizer shards", "dp"),
    "replicas": ("gradients over replicas", "dp"),
    "pp": ("between stages", "pp"),
    "tied": ("tied embeddings", ""),
}
"""What is sent on an axis, and which one it is hidden with."""


def show(name: str, found: Estimate, there: Room | None, over: PassedOver | None) -> None:
    """Print the estimate of the job called ``name``. over: print JSON, with what was passed over."""
    if over is not None:
        values = found.to_dict() | {"fits": there.holds(found) if there else None}
        values["available"] = {"per_rank": there.each or there.shared // found.world_size} if there else None
        values["passed_over"] = over.rows()
        terminal.say(json.dumps(values))
        return
    terminal.text(name)
    terminal.text(_head(found))
    terminal.say("")
    _memory(found)
    most = found.most
    alive = f", {most.memory.alive} micro-batches alive" if most.memory.alive > 1 else ""
    terminal.text(f"most memory: place {most.index}, in the {most.memory.when}{alive}")
    if found.virtual_stages > 1:
        terminal.text(f"every place holds {found.virtual_stages} stages")
    terminal.text(_room(found, there))
    if any(place.sent for place in found.places):
        terminal.say("")
        _traffic(found)


def _head(found: Estimate) -> str:
    ranks = f"{found.world_size:,} rank{'s' * (found.world_size > 1)}"
    steps = f"{found.micro_batches} micro-batch{'es' * (found.micro_batches > 1)} a step"
    schedule = f", {found.schedule}" if len(found.places) > 1 or found.virtual_stages > 1 else ""
    return f"{found.parameters:,} parameters on {ranks}, {steps}{schedule}"


def _memory(found: Estimate) -> None:
    power = min(max((found.most.memory.total.bit_length() - 1) // 10, 1), 4)
    unit = {1: "KiB", 2: "MiB", 3: "GiB", 4: "TiB"}[power]
    rows, before = list[tuple[str, ...]](), -1
    for place in _shown(found):
        if place.index > before + 1:
            rows.append((f"{place.index - before - 1} more", *[""] * (len(HEADS) + 3)))
        before = place.index
        sizes = [*(getattr(place.memory, kind) for kind in KINDS), place.memory.total]
        cells = [f"{size / (1 << 10 * power):#.3g}".rstrip(".") if size else "0" for size in sizes]
        rows.append((_ranks(place), _layers(place), f"{place.dp}x{place.cp}x{place.tp}", *cells))
    terminal.title(f"Tensors of a rank, {unit}")
    terminal.table(("ranks", "layers", "dpxcpxtp", *HEADS, "total"), rows)


def _shown(found: Estimate) -> Sequence[PlaceEstimate]:
    places = found.places
    if len(places) <= SHOWN:
        return places
    return [places[at] for at in sorted({0, found.most.index, len(places) - 1})]


def _ranks(place: PlaceEstimate) -> str:
    first, last = place.ranks
    return str(first) if first == last else f"{first}-{last}"


def _layers(place: PlaceEstimate) -> str:
    """Of every stage: ``8``, or ``2+2`` of a place with two."""
    counts = list(place.layers.values())
    return "+".join(map(str, counts)) if len(counts) <= 4 else f"{len(counts)} x {max(counts)}"


def _room(found: Estimate, there: Room | None) -> str:
    if there is None:
        return "available: not known here, so nothing was checked"
    verdict = "fits" if there.holds(found) else "does not fit"
    if there.each:
        return f"available: {in_bytes(there.each)} on {there.what}: {verdict}"
    needed = f"tensors of all ranks take {in_bytes(found.bytes)}: {verdict}"
    return f"available: {in_bytes(there.shared)} on {there.what}; {needed}"


def _traffic(found: Estimate) -> None:
    rows = list[tuple[str, ...]]()
    for axis, (what, group) in AXES.items():
        most = max(place.sent.get(axis, 0) for place in found.places)
        if most:
            rows.append((what, in_bytes(most), found.hidden.get(group, "nothing")))
    terminal.title("Bytes a rank sends in a step, and what hides it")
    terminal.table(("what", "at most", "behind"), rows)
