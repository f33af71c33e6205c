"""Tables of what micro-batches keep: as much in slices as whole, and walked once for all that is asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Recompute
from plait.core.step.attention_ops import SharedAttention
from plait.core.step.columns.points import RECOMPUTES
from plait.core.step.memory import activation_columns
from plait.core.step.memory.activation_columns import Degrees, SizeLoad, Structure, stage_tables
from plait.core.step.memory.live import HELD, HELD_LAYER, KEPT, KEPT_LAYER, TYPES

LLAMA = ModelSpec(
    family="llama", num_layers=24, hidden=512, num_heads=8, num_kv_heads=4, ffn_hidden=1408, vocab=1000,
    max_sequence=4096,
)  # fmt: skip


@pytest.mark.parametrize("attention", [None, SharedAttention(2, 1), SharedAttention(1, 3), SharedAttention(2, 2)])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_slices_keep_together_what_a_whole_keeps(
    recompute: Recompute, split: bool, attention: SharedAttention | None
) -> None:
    cp, ring = (attention.ulysses * attention.ring, attention.ring) if attention else (1, 1)
    asked = [
        (
            Structure(recompute, tp > 1, parallel, p1, split, attention),
            [(tp, cp, ring, 4)],
            SizeLoad(1536, 2, True, True),
        )
        for tp, parallel in ((1, False), (2, False), (2, True))
        for p1 in (1, 2, 4)
    ]
    lasting = [*range(KEPT, KEPT + len(TYPES)), *range(HELD, HELD + len(TYPES)), KEPT_LAYER, HELD_LAYER]
    kept = [table[0, lasting].tolist() for table in stage_tables(LLAMA, asked)]
    for at in range(0, len(kept), 3):
        assert sum(kept[at]) > 0
        assert kept[at] == kept[at + 1] == kept[at + 2]


def test_what_may_be_asked_next_is_walked_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what has the same structure; sizes are what they are when walked alone. What was asked of one
    structure is walked for others, too, and stages that are the whole model beside what is known of these."""
    model, other = replace(LLAMA, vocab=LLAMA.vocab + 1), replace(LLAMA, vocab=LLAMA.vocab + 2)
    load, later = SizeLoad(1280, 2, True, False), [(4, 1, 1, 2), (2, 1, 1, 8), (1, 1, 1, 1), (2, 2, 1, 1)]
    structure, sliced = (Structure("none", True, True, p1, False) for p1 in (1, 2))
    walked, own = list[tuple[bool, list[Degrees]]](), activation_columns._walked_table

    def told(model: ModelSpec, structure: Structure, degrees: list[Degrees], load: SizeLoad) -> np.ndarray:
        walked.append((load.whole, list(degrees)))
        return own(model, structure, degrees, load)

    monkeypatch.setattr(activation_columns, "_walked_table", told)
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
