"""What metrics say of memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.core.parallel.layout import Layout
from plait.core.runs.memory_peaks import MOST, PROCESS, TENSORS, format_peaks, peaks_of


@given(st.integers(1, 4), st.integers(1, 8), st.data())
def test_what_is_told_is_read_again_and_later_lines_only_add(pp: int, dp: int, data: st.DataObject) -> None:
    layout = Layout.of(pp=pp, dp=dp)
    sizes = st.lists(st.integers(1, 2**40), min_size=pp * dp, max_size=pp * dp)
    first, second = data.draw(sizes), data.draw(sizes)
    found = peaks_of(
        [
            {"step": 1, TENSORS: format_peaks(first, [mesh.ranks for mesh in layout.meshes])},
            {"loss": 1.0},
            {TENSORS: format_peaks(second, [mesh.ranks for mesh in layout.meshes])},
        ]
    )
    assert found == {
        f"stage {stage}": {rank: max(first[rank], second[rank]) for rank in mesh.ranks}
        for stage, mesh in enumerate(layout.meshes)
    }


def test_of_many_ranks_the_fullest_of_every_stage() -> None:
    layout = Layout.of(pp=2, dp=MOST)
    peaks = [1000 + (rank * 37) % 101 for rank in range(2 * MOST)]
    found = peaks_of([{TENSORS: format_peaks(peaks, [mesh.ranks for mesh in layout.meshes])}])
    assert {stage: len(ranks) for stage, ranks in found.items()} == {"stage 0": 1, "stage 1": 1}
    assert max(found["stage 1"].values()) == max(peaks[MOST:])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.sampled_from([TENSORS, "step", "loss"]), JSON, max_size=3), max_size=4))
def test_other_peoples_lines_are_left_out(lines: list[dict[str, object]]) -> None:
    peaks_of(lines)


def test_what_is_no_size_or_no_rank_is_left_out() -> None:
    sizes = {
        "stage 0, rank 0": 5, "stage 0, rank 1": 0, "stage 0, rank 2": -1, "stage 0, rank 3": True,
        "stage 0, rank 4": 1.5, "stage 0, rank 5": "7", "stage 0": 9, "stage 0, rank x": 9,
        "stage 0, rank 1234567890": 9, "stage 1, rank 123456789": 9,
    }  # fmt: skip
    assert peaks_of([{TENSORS: sizes}, {TENSORS: [1]}, {TENSORS: {"stage 0, rank 0": 3}}]) == {
        "stage 0": {0: 5}, "stage 1": {123456789: 9}
    }  # fmt: skip
    assert peaks_of([{PROCESS: {"stage 0, rank 0": 3}}]) == {}
    assert peaks_of([{PROCESS: {"stage 0, rank 0": 3}}], PROCESS) == {"stage 0": {0: 3}}


def test_as_many_ranks_as_are_told_one_by_one() -> None:
    for dp, told_of in ((MOST // 2, MOST), (MOST // 2 + 1, 2)):
        layout = Layout.of(pp=2, dp=dp)
        assert len(format_peaks([7] * layout.world_size, [mesh.ranks for mesh in layout.meshes])) == told_of
