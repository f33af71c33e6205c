"""The communication matrix: which nodes share which groups, by the layout's own groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import PlacementError
from plait.core.cluster.hardware import HERE
from plait.core.job.communication import CommunicationMatrix, Volume, rows_of
from plait.core.job.spec import Job
from plait.core.parallel.layout import Layout
from plait.plan.make import make_plan


def by_enumeration(layout: Layout, each: int, axis: str) -> set[tuple[int, ...]]:
    """Nodes of every group along an axis, rank by rank."""
    if axis == "pp":
        groups = [layout.group_of(rank, "pp") for rank in range(layout.world_size)]
    else:
        groups = [mesh.group_of(rank, "replicas") for mesh in layout.meshes for rank in mesh.ranks]
    return {tuple(sorted({rank // each for rank in group})) for group in groups}


@given(
    pp=st.integers(1, 4), dp=st.integers(1, 6), cp=st.sampled_from([1, 2]), tp=st.sampled_from([1, 2, 4, 8]),
    each=st.sampled_from([1, 2, 4, 8]),
)  # fmt: skip
def test_groups_are_those_of_the_layout(pp: int, dp: int, cp: int, tp: int, each: int) -> None:
    layout = Layout.of(pp=pp, dp=dp, cp=cp, tp=tp)
    try:
        matrix = CommunicationMatrix.of_layout(layout, ranks_per_node=each)
    except PlacementError:
        stage = dp * cp * tp
        assert stage % min(each, layout.world_size)
        return
    block, each = matrix.nodes_per_cell, matrix.ranks_per_node
    assert matrix.nodes * each == layout.world_size

    def cells(nodes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted({node // block for node in nodes}))

    if matrix.shape == (1, len(matrix.heights)) and len(matrix.heights) < pp:
        assert {node for nodes in by_enumeration(layout, each, "dp") for node in nodes} == set(range(matrix.nodes))
    else:
        assert {cells(nodes) for nodes in by_enumeration(layout, each, "dp")} == set(matrix.columns)
        assert {cells(nodes) for nodes in by_enumeration(layout, each, "pp")} == set(matrix.rows)


def test_the_papers_example() -> None:
    """Figure 12: 96 GPUs, DP 6, PP 2; and table 1 (i): DP 12, TP 4."""
    for dp, tp in ((6, 8), (12, 4)):
        matrix = CommunicationMatrix.of_layout(Layout.of(pp=2, dp=dp, tp=tp), ranks_per_node=8)
        assert matrix.shape == (6, 2)
        assert matrix.nodes == 12


def test_several_stages_in_a_node() -> None:
    matrix = CommunicationMatrix.of_layout(
        Layout.of(pp=8, dp=2, tp=1), ranks_per_node=8, volumes=[Volume(weights=at, dp=1, pp=2) for at in range(8)]
    )
    assert matrix.heights == (1, 1)
    assert matrix.edges == ((0, 1),)
    assert [volume.weights for volume in matrix.volumes] == [3, 7]


def test_groups_wider_than_a_node_stay_together() -> None:
    matrix = CommunicationMatrix.of_layout(Layout.of(pp=2, dp=3, cp=2, tp=8), ranks_per_node=8)
    assert (matrix.nodes_per_cell, matrix.heights, matrix.nodes) == (2, (3, 3), 12)
    matrix = CommunicationMatrix.of_layout(Layout.of(pp=1, dp=4, tp=6), ranks_per_node=8)
    assert (matrix.nodes_per_cell, matrix.heights) == (3, (1,))


def test_unequal_meshes_meet_where_their_shares_of_a_batch_do() -> None:
    matrix = CommunicationMatrix.of_layout(Layout(((4, 8), (2, 8))), ranks_per_node=8)
    assert matrix.heights == (4, 2)
    assert matrix.shape is None
    assert matrix.rows == ((0, 4), (1, 4), (2, 5), (3, 5))
    assert rows_of((3, 1)) == ((0, 3), (1, 3), (2, 3))


def test_what_is_no_matrix_is_refused_by_name() -> None:
    with pytest.raises(PlacementError, match="Stage 0 has 12 ranks"):
        CommunicationMatrix.of_layout(Layout.of(pp=2, dp=3, tp=4), ranks_per_node=8)
    with pytest.raises(PlacementError, match="Stage 1 has 4 ranks"):
        CommunicationMatrix.of_layout(Layout(((2, 4), (1, 4))), ranks_per_node=8)


def test_ratios_of_volumes() -> None:
    volumes = (Volume(weights=8, dp=6, pp=2), Volume(weights=4, dp=2, pp=2))
    matrix = CommunicationMatrix.of_layout(
        Layout.of(pp=2, dp=2, tp=8), ranks_per_node=8, volumes=volumes, micro_batch=3
    )
    assert matrix.ratios == (3 * 6 / (4 + 2), 2)
    assert CommunicationMatrix.of_layout(Layout.of(pp=2, dp=2, tp=8), ranks_per_node=8).ratios is None


@pytest.mark.parametrize(
    ("tp", "ep", "cells"), [(8, 1, 1), (8, 4, 4), (1, 8, 1), (1, 16, 2), (2, 8, 2), (8, 16, 16), (16, 4, 4)]
)
def test_so_many_neighbours_of_a_column_share_out_experts(tp: int, ep: int, cells: int) -> None:
    layout = Layout.of(pp=2, dp=16 if tp > 2 else 64, tp=tp)
    matrix = CommunicationMatrix.of_layout(layout, ranks_per_node=8, ep=ep)
    assert matrix.expert_cells == cells


def test_what_experts_send_stays_in_a_column() -> None:
    volumes = (Volume(weights=8, dp=6, pp=2, ep=4),) * 2
    matrix = CommunicationMatrix(heights=(2, 2), ranks_per_node=8, volumes=volumes, micro_batch=3)
    assert matrix.ratios == (3 * 8 / 12, 5)


def test_blocks_of_nodes_have_to_be_equal() -> None:
    with pytest.raises(PlacementError, match=r"span up to 2 nodes, and a stage has 2: .* Use the same cp x tp"):
        CommunicationMatrix.of_layout(Layout(((3, 8), (1, 16))), ranks_per_node=8)


def test_places_of_a_plan_hand_to_each_other_what_crosses_stages() -> None:
    """Of a V shape both ways, told once; of one pp rank nothing."""
    for schedule, edges in (
        ({"schedule": "zb-v", "virtual_stages": 2, "pp": 3}, ((0, 1), (1, 2))),
        ({"schedule": "interleaved", "virtual_stages": 2, "pp": 3}, ((0, 1), (0, 2), (1, 2))),
        ({"pp": 1}, ()),
    ):
        job = Job.from_dict({
            "model": {"preset": "gpt3-125m"}, "strategy": {"dp": 2, **schedule},
            "train": {"global_batch_size": 48, "micro_batch_size": 0},
        })  # fmt: skip
        plan = make_plan(job, HERE, vocab=257)
        matrix = CommunicationMatrix.of(plan, ranks_per_node=1)
        assert matrix.edges == edges
        assert matrix.micro_batch == plan.largest_share(0)
        assert matrix.heights == (2,) * int(schedule["pp"])


def test_no_ratios_where_nothing_is_sent_along_an_axis() -> None:
    for volume, ratios in (
        (Volume(weights=8, dp=6, pp=0), None), (Volume(weights=8, dp=0, pp=2), None),
        (Volume(weights=8, dp=0, pp=0), None), (Volume(weights=8, dp=0, pp=2, ep=4), (8 / 6, 2)),
    ):  # fmt: skip
        assert CommunicationMatrix(heights=(2,), ranks_per_node=8, volumes=(volume,)).ratios == ratios


def test_the_mean_gpu_is_one_of_all_cells() -> None:
    volumes = (Volume(weights=8, dp=6, pp=2), Volume(weights=2, dp=3, pp=5, ep=3))
    matrix = CommunicationMatrix(heights=(1, 2), ranks_per_node=8, volumes=volumes)
    assert matrix.mean == Volume(weights=4, dp=4, pp=4, ep=2)
    assert CommunicationMatrix(heights=(1, 2), ranks_per_node=8).mean == Volume()


def test_who_shares_out_experts_is_as_the_job_says() -> None:
    job = Job.from_dict({
        "model": {"family": "llama", "num_layers": 2, "hidden": 32, "num_heads": 4, "max_sequence": 64,
                  "ffn_hidden": 64,
                  "experts": {"count": 8, "per_token": 2}},
        "strategy": {"dp": 8, "ep": 4}, "train": {"global_batch_size": 8, "micro_batch_size": 0},
        "data": {"sequence_length": 64},
    })  # fmt: skip
    plan = make_plan(job, HERE, vocab=257)
    assert CommunicationMatrix.of(plan, ranks_per_node=1).expert_cells == 4
    assert CommunicationMatrix.of(replace(plan, job=None), ranks_per_node=1).expert_cells == 1


def test_experts_lie_as_far_apart_as_in_the_widest_pp_rank() -> None:
    for degrees in (((4, 8), (8, 4)), ((8, 4), (4, 8))):
        assert CommunicationMatrix.of_layout(Layout(degrees), ranks_per_node=8, ep=4).expert_cells == 4


def test_of_pp_ranks_in_one_node_the_most_of_each_counts() -> None:
    volumes = [Volume(weights=8, dp=1, pp=2, ep=7), Volume(weights=4, dp=6, pp=3, ep=5)] * 4
    matrix = CommunicationMatrix.of_layout(Layout.of(pp=8, dp=1, tp=4), ranks_per_node=8, volumes=volumes)
    assert matrix.volumes == (Volume(weights=8, dp=6, pp=3, ep=7),) * 4
