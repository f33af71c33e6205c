"""Sizes of what a micro-batch keeps, in rows: against the walk, and what other frameworks keep otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait.core.model.experts import Experts
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.attention_ops import SharedAttention
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, Points
from plait.core.step.memory.activation_columns import SizeLoad, Structure, deferred
from plait.core.step.memory.activations import WalkedBatch, activations
from plait.core.step.memory.closed_activations import size_rows
from plait.core.step.memory.live import (
    BACKWARD,
    FORWARD,
    HELD,
    HELD_LAYER,
    KEPT,
    KEPT_LAYER,
    PLAIN_BACKWARD,
    PLAIN_FORWARD,
    PLAIN_HELD_LAYER,
    PLAIN_KEPT_LAYER,
    TYPES,
    WEIGHT,
)
from plait.core.step.memory.memory_options import PLAIT, MemoryOptions
from plait.core.step.segments import Phase
from plait.core.step.stages import Stage

GPT = ModelSpec(family="gpt", num_layers=9, hidden=32, num_heads=8, vocab=48, max_sequence=64, ffn_hidden=96)
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
    points = Points.of([{"micro": 3, "overlap": SYNC, "schedule": schedule, **row} for row in several])
    found, row_of = size_rows(
        model, points, sequence=32, itemsize=itemsize, options=options, among=[] if at_least else None
    )
    return found[row_of]


def one(model: ModelSpec, options: MemoryOptions = PLAIT, split: bool = False, /, **row: int) -> np.ndarray:
    return rows(model, row, options=options, split=split)[0]


def types(at: int) -> slice:
    return slice(at, at + len(TYPES))


STAGES = {"whole": (0, 1), "embeds": (0, 3), "middle": (1, 3), "heads": (2, 3)}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("row", [
    {}, {"tp": 2}, FLAT, AGAIN, FLAT | AGAIN, {"recompute": SELECTIVE}, {"tp": 2, "p1": 3},
    {"cp": 2}, {"cp": 2, "ring": 2}, {"cp": 4, "ring": 2, **AGAIN},
], ids=str)  # fmt: skip
def test_rows_are_what_the_walk_counts_of_any_layers(row: dict[str, int], split: bool) -> None:
    """Of five layers at every kind of stage: what ends keep and work with, and what each layer adds."""
    found = one(LLAMA, PLAIT, split, **row)
    strategy = Strategy(
        tp=row.get("tp", 1), cp=row.get("cp", 1), ring=row.get("ring", 1), p1=row.get("p1", 1), overlap="sync",
        sequence_parallel=bool(row.get("sequence_parallel")), recompute=RECOMPUTES[row.get("recompute", 0)],  # type: ignore[arg-type]
    )  # fmt: skip
    for kind, name in enumerate(TYPES):
        index, count = STAGES[name]
        first = 0 if name in ("whole", "embeds") else 2
        phases: tuple[Phase, ...] = ("F", "I", "W") if split else ("F", "B")
        micro = WalkedBatch(batch=3, sequence=32, itemsize=2, gpu=True, phases=phases)
        walked = activations(LLAMA, strategy, Stage(index, count, first, 5), micro)
        kept, held = 5 * found[KEPT_LAYER], 5 * found[HELD_LAYER]
        assert found[KEPT + kind] + kept == walked.kept
        assert found[FORWARD + kind] + kept == walked.forward_peak
        assert found[BACKWARD + kind] + max(kept, held) == walked.backward_peak
        if split:
            assert found[HELD + kind] + held == walked.held
            assert found[WEIGHT + kind] + held == walked.weight_peak


def test_points_share_rows_as_far_as_they_are_alike() -> None:
    both = rows(LLAMA, {"tp": 2, "dp": 2}, FLAT, {"tp": 2, "dp": 8, "num_micro": 9}, FLAT | AGAIN)
    assert np.array_equal(both[0], both[2])
    for at, row in ((1, FLAT), (3, FLAT | AGAIN)):
        assert np.array_equal(both[at], rows(LLAMA, row)[0])


def test_no_stage_is_a_whole_model_where_there_are_several() -> None:
    assert one(GPT, pp=2)[FORWARD] == 0 < one(GPT)[FORWARD]
    assert np.array_equal(one(GPT, pp=2)[FORWARD + 1 : FORWARD + 4], one(GPT)[FORWARD + 1 : FORWARD + 4])


def test_layers_that_are_not_recomputed_have_sizes_of_their_own() -> None:
    none, full, mixed = one(LLAMA), one(LLAMA, **AGAIN), one(LLAMA, recompute=FULL, recompute_layers=2)
    own = slice(0, PLAIN_FORWARD)
    assert np.array_equal(mixed[own], full[own])
    assert np.array_equal(mixed[types(PLAIN_FORWARD)], none[types(FORWARD)])
    assert np.array_equal(mixed[types(PLAIN_BACKWARD)], none[types(BACKWARD)])
    assert (mixed[PLAIN_KEPT_LAYER], mixed[PLAIN_HELD_LAYER]) == (none[KEPT_LAYER], none[HELD_LAYER])
    assert not full[PLAIN_FORWARD:].any()
    assert not one(LLAMA, recompute_layers=2)[PLAIN_FORWARD:].any()
    assert one(LLAMA, recompute=FULL, recompute_layers=0)[PLAIN_KEPT_LAYER] == none[KEPT_LAYER]


def test_at_least_is_what_lasts() -> None:
    """At the end of a forward and at the beginning of a backward; slices keep together what a whole keeps."""
    for split in (False, True):
        found = rows(LLAMA, {"tp": 2, "p1": 3}, at_least=True, split=split)[0]
        whole = one(LLAMA, PLAIT, split, tp=2)
        for peak, lasting in ((FORWARD, KEPT), (BACKWARD, KEPT), (WEIGHT, HELD)):
            assert np.array_equal(found[types(peak)], whole[types(lasting)])
        assert (found[KEPT_LAYER], found[HELD_LAYER]) == (whole[KEPT_LAYER], whole[HELD_LAYER])


# ---- other frameworks ----

TOKENS, STREAM = 96, 96 * 32
"""Of a rank that has them all; numbers of its stream."""


def differs(found: np.ndarray, base: np.ndarray, **more: float) -> None:
    """By so much, in all types of stages; nowhere else."""
    places = {"kept": KEPT_LAYER, "held": HELD_LAYER, "forward": types(FORWARD), "backward": types(BACKWARD)}
    told = base.copy()
    for name, size in more.items():
        told[places[name]] += size
    assert found == pytest.approx(told)


def test_masks_that_a_layer_keeps() -> None:
    told = MemoryOptions(stream_bytes=3.0)
    differs(one(LLAMA, told), one(LLAMA), kept=3 * STREAM)
    differs(one(LLAMA, told, **FLAT), one(LLAMA, **FLAT), kept=3 * STREAM / 2)
    differs(one(LLAMA, told, cp=2), one(LLAMA, cp=2), kept=3 * STREAM / 2)
    differs(one(LLAMA, told, **AGAIN), one(LLAMA, **AGAIN))


def test_a_gate_whose_activation_is_not_kept() -> None:
    told = MemoryOptions(fused_gate=True)
    differs(one(LLAMA, told, tp=2), one(LLAMA, tp=2), kept=-TOKENS * 2 * 96 / 2)
    differs(one(GPT, told), one(GPT))
    split = one(LLAMA, told, True, tp=2)
    differs(split, one(LLAMA, PLAIT, True, tp=2), kept=-TOKENS * 96, held=-TOKENS * 96)


def test_queries_and_keys_that_are_kept_rotated_only() -> None:
    told = MemoryOptions(rotary_in_place=True)
    differs(one(LLAMA, told, tp=2), one(LLAMA, tp=2), kept=-TOKENS * 2 * 12 * 4 / 2)
    differs(one(LLAMA, told, cp=2, ring=2), one(LLAMA, cp=2, ring=2), kept=-TOKENS / 2 * 2 * 12 * 4)
    differs(one(LLAMA, told, cp=2, ring=1), one(LLAMA, cp=2, ring=1))  # exchanged ones are others
    differs(one(GPT, told), one(GPT))


def test_what_was_gathered_is_gathered_again() -> None:
    told = MemoryOptions(regathers=True)
    gathered = STREAM * 2
    differs(one(LLAMA, told, **FLAT), one(LLAMA, **FLAT), kept=-2 * gathered, backward=gathered)
    differs(one(LLAMA, told, tp=2), one(LLAMA, tp=2))
    differs(one(LLAMA, told, **FLAT, **AGAIN), one(LLAMA, **FLAT, **AGAIN), backward=gathered)


SCORES = 96 * 32 * 8
"""Attention weights of eight heads."""


def test_scores_that_are_kept_or_made_again() -> None:
    told = MemoryOptions(fused_attention=False, score_bytes=4.0)
    differs(one(LLAMA, told, tp=2), one(LLAMA, tp=2), kept=2 * SCORES, backward=0.8 * 2 * SCORES)
    differs(one(LLAMA, told, **AGAIN), one(LLAMA, **AGAIN), forward=1.8 * 4 * SCORES, backward=1.8 * 4 * SCORES)
    some = {"recompute": SELECTIVE}
    differs(one(LLAMA, told, **some), one(LLAMA, **some), kept=4 * SCORES, backward=0.8 * 4 * SCORES)
    core = replace(told, recompute_attention=True)
    differs(one(LLAMA, core, **some), one(LLAMA), forward=1.8 * 4 * SCORES, backward=1.8 * 4 * SCORES)
    differs(one(LLAMA, core), one(LLAMA), kept=4 * SCORES, backward=0.8 * 4 * SCORES)


def test_full_recomputation_of_whole_layers_keeps_their_input_and_repeats_one() -> None:
    told = MemoryOptions(whole_layers=True, kept_bytes=3.0)
    found, none = one(LLAMA, told, pp=3, **AGAIN), one(LLAMA, pp=3)
    layer = none[KEPT_LAYER]
    assert found[KEPT_LAYER] == 3 * STREAM
    assert found[FORWARD + 2] == none[FORWARD + 2] + layer
    assert found[BACKWARD + 2] == none[BACKWARD + 2] + layer
    flat = one(LLAMA, told, pp=3, **FLAT, **AGAIN)
    assert flat[KEPT_LAYER] == 3 * STREAM / 2
    differs(one(LLAMA, replace(told, logit_bytes=6.0), pp=3), one(LLAMA, MemoryOptions(logit_bytes=6.0), pp=3))


@pytest.mark.parametrize(("whole", "times"), [(False, 1), (True, 2)])
def test_a_stage_with_the_head_is_fullest_at_the_loss_or_in_a_layer(whole: bool, times: int) -> None:
    """Of a vocabulary of 49, of which each of two ranks has 25."""
    told, base = MemoryOptions(logit_bytes=10.0, logits_whole=whole), one(LLAMA, tp=2)
    found = one(LLAMA, told, tp=2)
    for kind, without in ((0, 1), (3, 2)):
        at_loss = base[KEPT + kind] + TOKENS * 25 * (10 * times - 2)
        assert found[FORWARD + kind] == max(base[FORWARD + without], at_loss)
        assert found[BACKWARD + kind] == max(base[BACKWARD + 2], at_loss)
    for kind in (1, 2):
        assert (found[FORWARD + kind], found[BACKWARD + kind]) == (base[FORWARD + kind], base[BACKWARD + kind])
    huge = one(replace(LLAMA, vocab=4800), told, tp=2)
    assert huge[FORWARD] > found[FORWARD]


# ---- experts ----


def test_routed_rows_are_kept_unless_they_are_computed_again() -> None:
    """A third of the layers has four experts, of which a token goes to two: rows of all tokens come in, those
    of a rank's share go out; logits and probabilities in fp32."""
    model = replace(LLAMA, experts=Experts(count=4, per_token=2, ffn_hidden=48, first_dense=6))
    dense = replace(LLAMA, ffn_hidden=round(96 * 2 / 3 + 2 * 48 / 3))
    assert dense.ffn_hidden == 96
    share, row = 1 / 3, 2 * 32 * 2
    for flat in (False, True):
        where = FLAT if flat else {"tp": 2}
        here = TOKENS / 2 if flat else TOKENS
        kept = share * (row * (TOKENS + here) + 4 * here * 8)
        working = share * row * 2 * here
        differs(one(model, **where), one(dense, **where), kept=kept, forward=working, backward=working)
        again = working + kept
        differs(one(model, **where, **AGAIN), one(dense, **where, **AGAIN), forward=again, backward=again)
        mixed, plain = (one(each, **where, recompute=FULL, recompute_layers=1) for each in (model, dense))
        assert mixed[PLAIN_KEPT_LAYER] - plain[PLAIN_KEPT_LAYER] == pytest.approx(kept)
        for at in (PLAIN_FORWARD, PLAIN_BACKWARD):
            assert mixed[types(at)] - plain[types(at)] == pytest.approx(np.full(4, working))
    split = one(model, cp=2)[KEPT_LAYER] - one(dense, cp=2)[KEPT_LAYER]
    assert split == pytest.approx(share * (row * TOKENS + 4 * TOKENS / 2 * 8))


def test_domino_keeps_longer_only_where_something_is_sent_and_computed_again() -> None:
    domino: dict[str, int] = {"overlap": OVERLAPS.index("domino")}
    for row in ({}, {"tp": 2}, AGAIN, {"recompute": SELECTIVE}):
        assert np.array_equal(one(LLAMA, **row, **domino), one(LLAMA, **row)), row
    for row in (FLAT | AGAIN, {"cp": 2, **AGAIN}, {"tp": 2, **AGAIN}):
        longer, base = one(LLAMA, **row, **domino), one(LLAMA, **row)
        assert longer[BACKWARD + 2] >= base[BACKWARD + 2]
        assert np.array_equal(one(LLAMA, MemoryOptions(defers=False), **row, **domino), base)
        assert np.array_equal(one(LLAMA, PLAIT, True, **row, **domino), one(LLAMA, PLAIT, True, **row))
    assert one(LLAMA, **FLAT, **AGAIN, **domino)[BACKWARD + 2] > one(LLAMA, **FLAT, **AGAIN)[BACKWARD + 2]


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
    micro = WalkedBatch(batch=p1, sequence=32, itemsize=2, gpu=True)
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
    middle = base[BACKWARD + 2] + told[1] * 2 * p1 / cp
    assert longer[BACKWARD + 2] == middle
    assert longer[FORWARD + 2] == base[FORWARD + 2] + told[0] * 2 * p1 / cp
    assert longer[BACKWARD + 1] == max(base[BACKWARD + 1] + told[1] * 2 * p1 / cp, middle)
    assert longer[BACKWARD + 3] == max(base[BACKWARD + 3], middle)
