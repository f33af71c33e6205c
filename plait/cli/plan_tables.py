"""The tables of ``plait plan``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plait.cli import terminal
from plait.core.base.text import in_bytes, in_seconds
from plait.core.cluster.hardware import Cluster
from plait.plan.answer import Answer, Candidate, Planner
from plait.plan.fits import KINDS
from plait.plan.reasons import PARTS, SHOWN, WORDS, differences

Side = tuple[str, Planner, Candidate]
"""A plan's file, what predicts it, and the prediction."""
Column = tuple[str, Callable[[Candidate], str]]


def show_answer(found: Answer, explain: bool) -> None:
    """The best strategies, a line each, and why the first is the first. Settings that all of them share stand
    above the table, not in it."""
    ranks = f"{found.ranks:,} rank{'s' * (found.ranks > 1)} of {found.cluster.name}"
    searched = f": {found.searched:,} strategies, the best of those that fit" if found.searched > 1 else ""
    terminal.text(f"{found.model.num_parameters:,} parameters on {ranks}{searched}")
    unit = _unit(found.candidates)
    shared, shown = list[str](), list[Column]()
    for head, told in SETTINGS:
        values = {told(one) for one in found.candidates}
        if len(values) > 1 or head == "pp dp cp tp":
            shown += [(head, told)] if explain or head in FIRST else []
        elif values != {"-"}:
            shared.append(f"{head} {values.pop()}")
    if shared:
        terminal.text(f"{'all of them' if len(found.candidates) > 1 else 'it has'}: {', '.join(shared)}")
    terminal.say("")
    shown += [(unit[1], lambda one: f"{one.most_memory / unit[0]:.0f}"), *RESULTS]
    shown += MORE if explain else []
    rows = [(str(number), *(told(one) for _, told in shown)) for number, one in enumerate(found.candidates, 1)]
    terminal.table(("", *(head for head, _ in shown)), rows)
    terminal.say("")
    terminal.text(_memory(unit[1], found.best))
    for line in found.why:
        terminal.text(line)


def _memory(unit: str, best: Candidate) -> str:
    """What the column of memory adds up: ``plait train`` speaks of tensors alone."""
    fullest = best.memory.fullest
    tensors, beside = in_bytes(fullest.place.memory.total), in_bytes(fullest.overhead)
    return f"{unit}: the fullest rank's tensors and what its process holds beside them; of 1, {tensors} and {beside}."


def show_best(best: Candidate) -> None:
    """Where its step goes, and what fills its ranks' memory."""
    terminal.say("")
    terminal.title("Where the step goes, on the mean rank")
    told = [(name, each) for name, each in best.parts.items() if each > 0]
    terminal.table(
        ("part", "seconds", "of the step"),
        [(PARTS[name], in_seconds(each), f"{each / best.seconds:.1%}") for name, each in told],
    )
    terminal.text(f"MFU {best.mfu:.1%} with all attention scores counted, {best.mfu_causal:.1%} with the causal half")
    terminal.say("")
    terminal.title("What fills a rank's memory")
    header, *places = best.memory.rows()
    terminal.table(header, places)
    terminal.say("")


def show_measured(found: Answer, measured: Mapping[int, float]) -> None:
    """Predicted beside measured."""
    terminal.title("Predicted and measured seconds of a step")
    fastest = min(measured.values())
    rows = [
        (
            str(at + 1),
            in_seconds(found.candidates[at].seconds),
            in_seconds(seconds),
            f"{found.candidates[at].seconds / seconds:.2f}",
            "chosen" if seconds == fastest else "",
        )
        for at, seconds in measured.items()
    ]
    terminal.table(("", "predicted", "measured", "ratio", ""), rows)


# ---- two plans ----


def show_comparison(one: Side, other: Side, as_json: bool) -> None:
    """What two plans have otherwise, and what that makes of a step."""
    if as_json:
        terminal.say(json.dumps(compared(one, other)))
        return
    (_, first, a), (_, second, b) = one, other
    settings = [(key, *values) for key, values in differences(a.point, b.point).items()]
    settings = [("cluster", first.cluster.name, second.cluster.name), *settings]
    settings.insert(1, ("ranks", f"{a.job.world_size:,}", f"{b.job.world_size:,}"))
    settings = [row for row in settings if row[1] != row[2]]
    terminal.title("What is different")
    if settings:
        terminal.table(("setting", "first", "second"), settings)
    else:
        terminal.text("Nothing: both have the same strategy, ranks and cluster.")
    terminal.say("")
    terminal.title("What a step takes")
    rows: list[tuple[str, ...]] = [
        ("a step", in_seconds(a.seconds), in_seconds(b.seconds), _ratio(a.seconds, b.seconds))
    ]
    band = [f"{in_seconds(side.low)} - {in_seconds(side.high)}" for side in (a, b)]
    rows.append(("p10-p90", *band, ""))
    for name, words in PARTS.items():
        pair = a.parts.get(name, 0.0), b.parts.get(name, 0.0)
        if pair[0] > SHOWN * a.seconds or pair[1] > SHOWN * b.seconds:
            rows.append((words, *map(in_seconds, pair), _ratio(*pair)))
    pair = a.tokens_per_second, b.tokens_per_second
    rows.append(("tokens/s", *(f"{each:,.0f}" for each in pair), _ratio(*pair)))
    rows.append(("MFU", f"{a.mfu:.1%}", f"{b.mfu:.1%}", _ratio(a.mfu, b.mfu)))
    terminal.table(("", "first", "second", "second/first"), rows)
    terminal.say("")
    terminal.title("What fills the fullest rank")
    sizes = zip(_sizes(a).items(), _sizes(b).values(), strict=True)
    told = [(kind, *map(in_bytes, pair), _ratio(*pair)) for (kind, x), y in sizes if any(pair := (x, y))]
    terminal.table(("", "first", "second", "second/first"), told)
    for name, side in zip(("first", "second"), (one, other), strict=True):
        verdict = "fits" if side[2].memory.fits else "does not fit"
        terminal.text(f"{name}: {side[0]}, which {verdict} into {in_bytes(side[2].memory.usable)}")


def compared(one: Side, other: Side) -> dict[str, Any]:
    """The same for programs."""
    return {
        "differences": {key: list(values) for key, values in differences(one[2].point, other[2].point).items()},
        "plans": [
            {"file": file, "cluster": planner.cluster.name, "ranks": side.job.world_size, **side.to_dict()}
            for file, planner, side in (one, other)
        ],
    }


def _sizes(side: Candidate) -> dict[str, int]:
    place = side.memory.fullest
    kinds = {kind: getattr(place.place.memory, kind) for kind in KINDS}
    return {**kinds, "beside tensors": place.overhead, "total": place.total}


def _ratio(first: float, second: float) -> str:
    return f"{second / first:.2f}" if first else "-"


# ---- columns ----


def _degrees(one: Candidate) -> str:
    shared = f" ep{one.point['ep']}" if one.point["ep"] > 1 else ""
    return " ".join(str(one.point[key]) for key in ("pp", "dp", "cp", "tp")) + shared


def _schedule(one: Candidate) -> str:
    point = one.point
    if point["pp"] == 1:
        return "-"
    name = WORDS["schedule"][point["schedule"]]
    return f"{name} x{point['virtual']}" if name == "interleaved" else name


def _shard(one: Candidate) -> str:
    point = one.point
    if point["dp"] * point["cp"] == 1:
        return "-"
    copies = f"+{point['secondary']}" if point["secondary"] else ""
    return f"{point['params']},{point['grads']},{point['optim']}{copies}"


def _recompute(one: Candidate) -> str:
    point = one.point
    kind = WORDS["recompute"][point["recompute"]]
    return f"{kind} {point['recompute_layers']}" if point["recompute_layers"] >= 0 and kind != "none" else kind


def _slices(one: Candidate) -> str:
    point = one.point
    return f"{point['p1']}x{point['p2']}" if point["tp"] > 1 else "-"


def _stream(one: Candidate) -> str:
    return "-" if one.point["tp"] == 1 else "yes" if one.point["sequence_parallel"] else "no"


def _rings(one: Candidate) -> str:
    point = one.point
    return f"{point['cp'] // point['ring']}x{point['ring']}" if point["cp"] > 1 else "-"


SETTINGS: Sequence[Column] = (
    ("pp dp cp tp", _degrees),
    ("micro", lambda one: str(one.point["micro"])),
    ("schedule", _schedule),
    ("p,g,o", _shard),
    ("recompute", _recompute),
    ("heads x ring", _rings),
    ("slices", _slices),
    ("sequence-parallel", _stream),
)
FIRST = ("pp dp cp tp", "micro", "schedule", "p,g,o", "recompute")
"""Which of them are shown unasked: as many as 80 columns hold."""
RESULTS: Sequence[Column] = (("step", lambda one: in_seconds(one.seconds)), ("MFU", lambda one: f"{one.mfu:.0%}"))
MORE: Sequence[Column] = (
    ("p10-p90", lambda one: f"{in_seconds(one.low)}-{in_seconds(one.high)}"),
    ("tokens/s", lambda one: f"{one.tokens_per_second:,.0f}"),
    ("micro-batches", lambda one: str(one.point["num_micro"])),
)


def _unit(candidates: Sequence[Candidate]) -> tuple[int, str]:
    most = max(one.most_memory for one in candidates)
    return (1 << 30, "GiB") if most >= 10 << 30 else (1 << 20, "MiB")


# ---- clusters ----


def list_clusters(as_json: bool) -> None:
    """Those that ship."""
    from plait.core.base.env import specs_folder

    names = sorted(file.stem for file in (specs_folder() / "clusters").glob("*.toml"))
    found = {name: Cluster.preset(name) for name in names}
    if as_json:
        terminal.say(json.dumps({name: cluster.model_dump(mode="json") for name, cluster in found.items()}))
        return
    rows = [
        (name, each.device.name, in_bytes(int(each.device.memory.value)), str(each.ranks_per_node), _links(each))
        for name, each in found.items()
    ]
    terminal.table(("preset", "device", "memory", "a node", "links, each way"), rows)


def _links(cluster: Cluster) -> str:
    return ", ".join(f"{tier.name} {tier.rate.value / 1e9:.4g} GB/s" for tier in cluster.tiers)
