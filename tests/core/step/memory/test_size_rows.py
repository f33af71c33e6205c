"""Sizes of what a micro-batch keeps, in rows: against the walk, and what other frameworks keep
otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Recompute, Strategy
from plait.core.step.attention_ops import SharedAttention
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, StrategyTable
from plait.core.step.memory import size_rows as module
from plait.core.step.memory.activations import TracedBatch, activations
from plait.core.step.memory.memory_options import PLAIT, MemoryOptions
from plait.core.step.memory.pipeline_memory import TYPES, SizeRow
from plait.core.step.memory.size_rows import Degrees, SizeLoad, Structure, deferred, size_rows, stage_tables
from plait.core.step.segments import Phase
from plait.core.step.stages import Stage

LLAMA = ModelSpec(
    family="llama", num_layers=9, hidden=32, num_heads=8, num_kv_heads=4, vocab=49, max_sequence=64, ffn_hidden=96
)
SYNC, FULL, SELECTIVE = OVERLAPS.index("sync"), RECOMPUTES.index("full"), RECOMPUTES.index("selective")
AGAIN = {"recompute": FULL}
FLAT = {"tp": 2, "sequence_parallel": 1}


def rows(model: ModelSpec, *several: dict[str, int], options: MemoryOptions = PLAIT, split: bool = False,
         at_least: bool = False, itemsize: int = 2) -> np.ndarray:  # fmt: skip
    """Of points with micro-batches of three sequences of 32 tokens."""
    schedule = SCHEDULES.index("zb-h1" if split else "1f1b")
    points = StrategyTable.of([{"micro": 3, "overlap": SYNC, "schedule": schedule, **row} for row in several])
    found, row_of = size_rows(
        model, points, sequence=32, itemsize=itemsize, options=options, among=[] if at_least else None
    )
    return found[row_of]


def one(model: ModelSpec, options: MemoryOptions = PLAIT, split: bool = False, /, **row: int) -> SizeRow:
    return SizeRow.of(rows(model, row, options=options, split=split)[0])


def equal(one: SizeRow, other: SizeRow) -> bool:
    return np.array_equal(np.concatenate(one), np.concatenate(other))


STAGES = {"whole": (0, 1), "embeds": (0, 3), "middle": (1, 3), "heads": (2, 3)}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("row", [
    {}, {"tp": 2}, FLAT, AGAIN, FLAT | AGAIN, {"recompute": SELECTIVE}, {"tp": 2, "p1": 3},
    {"cp": 2}, {"cp": 2, "ring": 2}, {"cp": 4, "ring": 2, **AGAIN},
], ids=str)  # fmt: skip
def test_rows_are_what_the_walk_counts_of_any_layers(row: dict[str, int], split: bool) -> None:
    """Of five layers at every kind of stage: what ends keep and work with, and what each layer
    adds."""
    found = one(LLAMA, PLAIT, split, **row)
    strategy = Strategy(
        tp=row.get("tp", 1), cp=row.get("cp", 1), ring=row.get("ring", 1), p1=row.get("p1", 1), overlap="sync",
        sequence_parallel=bool(row.get("sequence_parallel")), recompute=RECOMPUTES[row.get("recompute", 0)],  # type: ignore[arg-type]
    )  # fmt: skip
    for kind, name in enumerate(TYPES):
        index, count = STAGES[name]
        first = 0 if name in ("whole", "embeds") else 2
        phases: tuple[Phase, ...] = ("F", "I", "W") if split else ("F", "B")
        micro = TracedBatch(batch=3, sequence=32, itemsize=2, gpu=True, phases=phases)
        walked = activations(LLAMA, strategy, Stage(index, count, first, 5), micro)
        kept, held = 5 * found.kept_layer[0], 5 * found.held_layer[0]
        assert found.kept[kind] + kept == walked.kept
        assert found.forward[kind] + kept == walked.forward_peak
        assert found.backward[kind] + max(kept, held) == walked.backward_peak
        if split:
            assert found.held[kind] + held == walked.held
            assert found.weight[kind] + held == walked.weight_peak


def test_points_share_rows_as_far_as_they_are_alike() -> None:
    both = rows(LLAMA, {"tp": 2, "dp": 2}, FLAT, {"tp": 2, "dp": 8, "num_micro": 9}, FLAT | AGAIN)
    assert np.array_equal(both[0], both[2])
    for at, row in ((1, FLAT), (3, FLAT | AGAIN)):
        assert np.array_equal(both[at], rows(LLAMA, row)[0])


def test_at_least_is_what_lasts() -> None:
    """At the end of a forward and at the beginning of a backward; slices keep together what a whole
    keeps."""
    for split in (False, True):
        found = SizeRow.of(rows(LLAMA, {"tp": 2, "p1": 3}, at_least=True, split=split)[0])
        whole = one(LLAMA, PLAIT, split, tp=2)
        lasting = whole._replace(forward=whole.kept, backward=whole.kept, weight=whole.held)
        assert equal(found, lasting)


@pytest.mark.parametrize(
    ("p1", "tp", "flat", "attention"),
    [(2, 2, True, None), (4, 4, True, None), (4, 1, False, (2, 1)), (2, 1, False, (2, 2)), (4, 2, False, (1, 2))],
)
def test_what_domino_defers_does_not_depend_on_more_layers(
    p1: int, tp: int, flat: bool, attention: tuple[int, int] | None
) -> None:
    """Of slices of a sequence each, for a whole one on one rank."""
    shared = SharedAttention(*attention) if attention else None
    cp, ring = (attention[0] * attention[1], attention[1]) if attention else (1, 1)
    structure = Structure("full", tp > 1, flat, p1, False, shared)
    (told,) = deferred(LLAMA, [(structure, tp, SizeLoad(32, 2, True, False))])
    strategy = Strategy(tp=tp, cp=cp, ring=ring, sequence_parallel=flat, recompute="full", p1=p1)
    micro = TracedBatch(batch=p1, sequence=32, itemsize=2, gpu=True)
    at_once, later = (
        activations(LLAMA, replace(strategy, overlap=overlap), Stage(1, 3, 1, 4), micro)
        for overlap in ("sync", "domino")
    )
    grown = later.forward_peak - at_once.forward_peak, later.backward_peak - at_once.backward_peak
    assert told == (grown[0] * cp / p1, grown[1] * cp / p1)
    assert told[1] > 0
    # And in rows: micro-batches of three sequences have three times as much.
    row = {"tp": tp, "cp": cp, "ring": ring, "sequence_parallel": int(flat), "p1": p1, "micro": p1 * 2, **AGAIN}
    longer, base = one(LLAMA, overlap=OVERLAPS.index("domino"), **row), one(LLAMA, **row)
    middle = base.backward[2] + told[1] * 2 * p1 / cp
    assert longer.backward[2] == middle
    assert longer.forward[2] == base.forward[2] + told[0] * 2 * p1 / cp
    assert longer.backward[1] == max(base.backward[1] + told[1] * 2 * p1 / cp, middle)
    assert longer.backward[3] == max(base.backward[3], middle)


# ---- tables of structures ----


@pytest.mark.parametrize("attention", [None, SharedAttention(2, 1), SharedAttention(1, 3), SharedAttention(2, 2)])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_slices_keep_together_what_a_whole_keeps(
    recompute: Recompute, split: bool, attention: SharedAttention | None
) -> None:
    long = replace(LLAMA, max_sequence=1536)
    cp, ring = (attention.ulysses * attention.ring, attention.ring) if attention else (1, 1)
    asked = [
        (
            Structure(recompute, tp > 1, parallel, p1, split, attention),
            [(tp, cp, ring, 4)],
            SizeLoad(1536, 2, True, True),
        )
        for tp, parallel in ((1, False), (2, False), (2, True))
        for p1 in (1, 4)
    ]
    tables = [SizeRow.of(table[0]) for table in stage_tables(long, asked)]
    kept = [np.concatenate([one.kept, one.held, one.kept_layer, one.held_layer]).tolist() for one in tables]
    for at in range(0, len(kept), 2):
        assert sum(kept[at]) > 0
        assert kept[at] == kept[at + 1]


def test_what_may_be_asked_next_is_walked_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what has the same structure; sizes are what they are when walked alone. What was asked
    of one structure is walked for others, too, and stages that are the whole model beside what is
    known of these."""
    model, other = (replace(LLAMA, max_sequence=1280, vocab=1000 + more) for more in (1, 2))
    load, later = SizeLoad(1280, 2, True, False), [(4, 1, 1, 2), (2, 1, 1, 8), (1, 1, 1, 1), (2, 2, 1, 1)]
    structure, sliced = (Structure("none", True, True, p1, False) for p1 in (1, 2))
    walked, own = list[tuple[bool, list[Degrees]]](), module._walked_table

    def told(model: ModelSpec, structure: Structure, degrees: list[Degrees], load: SizeLoad) -> np.ndarray:
        walked.append((load.whole, list(degrees)))
        return own(model, structure, degrees, load)

    monkeypatch.setattr(module, "_walked_table", told)
    stage_tables(model, [(structure, [(2, 1, 1, 1)], load)], later)
    assert walked == [(False, [(2, 1, 1, 1), *later[:2]])]
    (found,) = stage_tables(model, [(structure, later[:2], load)], later)
    assert len(walked) == 1
    stage_tables(model, [(sliced, [(8, 1, 1, 4)], load)])
    assert walked[1:] == [(False, [(8, 1, 1, 4), *later[:2]])]
    (whole,) = stage_tables(model, [(structure, later[:2], replace(load, whole=True))])
    assert sorted(walked[2:]) == [(False, [(8, 1, 1, 4)]), (True, [*later[:2], (2, 1, 1, 1), (8, 1, 1, 4)])]
    for at, one in enumerate(later[:2]):
        for some, table in ((load, found), (replace(load, whole=True), whole)):
            (alone,) = stage_tables(other, [(structure, [one], some)])
            assert np.array_equal(alone[0], table[at])
