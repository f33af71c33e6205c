"""Along which axis ops communicate, and with whom, for every kind of layout."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding
from plait.core.record.rollup import PROCESSOR
from plait.diagnose.measured.compare import table_of
from plait.diagnose.measured.reading import recorded
from plait.diagnose.measured.recording import Recording, grid_of, unknown_grid, with_axes
from plait.plan.search.simulate import simulate_plan
from tests.support.drawn import plan_of
from tests.support.recordings.made import spans_of

MODEL = {
    "family": "gpt", "num_layers": 4, "hidden": 16, "num_heads": 4, "ffn_hidden": 32, "vocab": 37, "max_sequence": 32,
}  # fmt: skip


def planned(**strategy: Any) -> Plan:
    train = {"global_batch_size": 12, "micro_batch_size": 6, "precision": "fp64"}
    job = Job.from_dict({"model": MODEL, "data": {"sequence_length": 32}, "train": train, "strategy": strategy})
    return plan_of(job)


def spans(**strategy: Any) -> pl.DataFrame:
    """Of one step of all ranks, as it is simulated."""
    plan = planned(**strategy)
    pp_rank_of = {op.stage: pp_rank for pp_rank, ops in enumerate(plan.schedule.ranks) for op in ops}
    table = table_of(simulate_plan(plan).timeline((1,), None))
    return with_axes(table, grid_of(plan.layout), plan.shardings, pp_rank_of)


def meetings(found: pl.DataFrame, axis: str) -> set[int]:
    """How many ranks take part in collectives of an axis."""
    own = found.filter(kind="comm", axis=axis)
    return set(own.group_by("meeting").agg(pl.n_unique("rank"))["rank"].to_list())


@pytest.mark.parametrize(
    "strategy",
    [{"pp": 2, "tp": [2, 1], "dp": [1, 2]}, {"pp": 2, "dp": [2, 3]}, {"pp": 2, "tp": [2, 1]}],
    ids=["as many ranks", "more replicas", "fewer ranks"],
)
def test_stages_of_other_degrees_meet_as_pp_ranks(strategy: dict[str, Any]) -> None:
    found = spans(**strategy)
    between = found.filter(axis="pp")
    assert set(between["group"].drop_nulls()) >= {"stage 0>1", "stage 1>0"}
    assert meetings(found, "tp") <= {2}


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("tp", [1, 2])
def test_attention_that_ranks_share_is_context_parallelism(kind: str, tp: int) -> None:
    found = spans(cp=2, cp_comm_type=kind, tp=tp)
    assert meetings(found, "cp") == {2}
    assert meetings(found, "tp") == ({2} if tp > 1 else set())
    cp = found.filter(axis="cp")
    groups = {tuple(sorted(ranks)) for _, ranks in cp.group_by("group").agg(pl.col("rank").unique()).iter_rows()}
    assert groups == ({(0, 1)} if tp == 1 else {(0, 2), (1, 3)})


@pytest.mark.parametrize("shard", ["ddp", "zero1", "fsdp"])
def test_what_an_optimizer_waits_for_is_exposed(shard: str) -> None:
    """The reductions that nothing hides any more, at a step's end."""
    found = spans(dp=2, shard=shard)
    ends = found.filter(pl.col("name").str.starts_with("settle "), pl.col("kind") == "wait")
    assert ends["rank"].to_list() == [0, 1] and set(ends["axis"]) == {"dp"}
    last = found.filter(pl.col("name").str.starts_with("reduce "))["end"].max()
    assert ends["end"].max() == pytest.approx(last)
    assert (ends["end"] > ends["start"]).all()


# ---- sums, which tell sites alone ----


def sums(rows: list[tuple[int, int, str, str, float]], own: pl.DataFrame | None = None, **strategy: Any) -> Recording:
    """Of (step, rank, kind, site, seconds), beside spans."""
    columns = {"step": pl.Int64, "rank": pl.Int32, "kind": pl.String, "site": pl.String, "sum": pl.Float64}
    table = pl.DataFrame(rows, schema=columns, orient="row").with_columns(direction=pl.lit(""), n=pl.lit(1))
    plan = planned(**strategy)
    empty = table_of(simulate_plan(plan).timeline((1,), None)).clear()
    return recorded(empty if own is None else own, table, plan)


@pytest.mark.parametrize(
    ("strategy", "attention"),
    [({"cp": 2}, "cp"), ({"cp": 2, "tp": 2}, "tp"), ({"tp": 2}, "tp"), ({"dp": 2}, "tp")],
)
def test_sums_of_attention_are_of_context_parallelism_where_layers_are_not_shared(
    strategy: dict[str, Any], attention: str
) -> None:
    kinds = ("comm", "wait", "compute", "idle", "transfer", "data")
    sites = ("attn", "block", "mlp", "embedding", "positions", "vectors")
    rollup = sums([(1, 0, kind, site, 1.0) for kind in kinds for site in sites], **strategy).rollup
    axes = {(kind, site): axis for kind, site, axis in rollup.select("kind", "site", "axis").iter_rows()}
    for kind, site in axes:
        wanted = ""
        if kind in ("idle", "transfer"):
            wanted = "pp"
        elif kind in ("comm", "wait"):
            wanted = {"attn": attention, "block": attention, "mlp": "tp"}.get(site, "dp")
        assert axes[kind, site] == wanted, (kind, site)
    assert len(axes) == len(kinds) * len(sites)


def test_of_a_step_whose_spans_are_kept_sums_tell_only_the_processor() -> None:
    plan = planned(dp=2)
    own = table_of(simulate_plan(plan).timeline((1,), None)).filter(rank=0)
    rows = [(step, rank, kind, "x", 9.0) for step in (1, 2) for rank in (0, 1) for kind in ("compute", PROCESSOR)]
    rollup = sums(rows, own, dp=2).rollup
    told = rollup.filter(site="x").select("step", "rank", "kind").sort("step", "rank", "kind").rows()
    assert set(told) == {
        (1, 0, PROCESSOR), (1, 1, PROCESSOR), (1, 1, "compute"), (2, 0, PROCESSOR), (2, 0, "compute"),
        (2, 1, PROCESSOR), (2, 1, "compute"),
    }  # fmt: skip
    kept = rollup.filter(pl.col("site") != "x")
    assert set(kept.select("step", "rank").unique().rows()) == {(1, 0)}
    waits = own.filter(pl.col("kind") != "compute")
    only = sums([(1, 0, "compute", "x", 9.0)], waits, dp=2).rollup
    assert set(only["site"]) == {"x"}, "spans without computation are no whole step"
    assert set(sums([], waits, dp=2).rollup["step"]) == {1}


def test_ranks_that_share_sequences_gather_parameters_together() -> None:
    """Two replicas of two: neighbours are those that share a sequence."""
    told = spans_of(*({"rank": rank, "kind": "comm", "name": "gather mlp0", "lane": "dp"} for rank in range(4)))
    told = told.drop("axis", "group", "lane", "meeting")
    found = with_axes(told, grid_of(Layout.of(dp=2, cp=2)), [Sharding(params=2, grads=2, optim=2)])
    assert dict(found.select("rank", "group").iter_rows()) == {0: "0", 1: "0", 2: "2", 3: "2"}


@pytest.mark.parametrize(("params", "groups"), [(None, {"0"}), (1, {"0"}), (2, {"0", "2"}), (4, {"0"})])
def test_parameters_are_gathered_within_so_many_replicas(params: int | None, groups: set[str]) -> None:
    """Of four; where nobody knows where ranks stand, among all."""
    told = spans_of(*({"rank": rank, "kind": "comm", "name": "gather mlp0", "lane": "dp"} for rank in range(4)))
    told = told.drop("axis", "group", "lane", "meeting")
    grid = unknown_grid(range(4)) if params is None else grid_of(Layout.of(dp=4))
    found = with_axes(told, grid, () if params is None else [Sharding(params=params, grads=params, optim=params)])
    assert set(found["axis"]) == {"dp"} and set(found["group"]) == groups
