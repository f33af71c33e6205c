"""A plan's predicted timeline: the lists that ranks run, at the times that the schedule's dry run gives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from plait.core.cluster import HERE
from plait.core.dry_run import dry_run
from plait.core.layout import Layout
from plait.core.model import ModelSpec
from plait.core.overlap import segment_order
from plait.core.plan import Plan, Workload
from plait.core.schedule import Schedule, whole_steps
from plait.core.schedules import Shape, find_schedule
from plait.core.segment_costs import makespan, segment_costs, simulate
from plait.core.segments import SegmentGraph
from plait.core.strategy import Strategy
from plait.core.timeline import Span, Timeline, hidden
from plait.plan.make import Design, assemble_plan
from plait.plan.predict import predicted

SPEC = ModelSpec(family="gpt", num_layers=4, hidden=64, num_heads=4, vocab=100, max_sequence=32)
U = ModelSpec(family="utransformer", levels=1, num_layers=6, hidden=64, num_heads=4, vocab=100, max_sequence=32)


def plan_of(schedule: Schedule, layout: Layout, model: ModelSpec = SPEC, **strategy: Any) -> Plan:
    workload = Workload(micro_batch=4, num_micro_batches=schedule.num_micro_batches, sequence=32)
    made = assemble_plan(Design(model, workload, Strategy(**strategy), layout), schedule, HERE)
    costs = segment_costs(model, made.strategy, batch=4, sequence=32, latency=1e-5)
    return replace(made, costs=costs)


def pipelined(name: str, model: ModelSpec = SPEC, **strategy: Any) -> Plan:
    shape = Shape(ranks=2, micro_batches=4, chunks=2 if name == "interleaved" else 1)
    layout = Layout.of(pp=2, tp=strategy.get("tp", 1))
    return plan_of(find_schedule(name, shape)[0], layout, model, **strategy)


def lanes(timeline: Timeline) -> dict[tuple[int, int], list[Span]]:
    found: dict[tuple[int, int], list[Span]] = {}
    for span in timeline.spans:
        found.setdefault((span.step, span.rank), []).append(span)
    return found


def test_a_whole_model_is_its_list_once_for_every_micro_batch() -> None:
    plan = plan_of(whole_steps(3), Layout.of(tp=2), tp=2, p1=2)
    assert plan.costs is not None
    actions = segment_order(SegmentGraph.of(SPEC, plan.strategy, plan.stages[0]), "domino", plan.costs, 4)
    graph = SegmentGraph.of(SPEC, plan.strategy, plan.stages[0])
    once = simulate(graph, actions, plan.costs, 4)
    timeline = predicted(plan, steps=(5, 6))
    assert timeline.plan_hash == plan.hash
    assert set(lanes(timeline)) == {(step, rank) for step in (5, 6) for rank in (0, 1)}
    for spans in lanes(timeline).values():
        kinds = {"run": "compute", "start": "comm", "wait": "wait"}
        want = Counter((kinds[verb], str(op)) for verb, op in actions for _ in range(3))
        assert Counter((span.kind, span.name) for span in spans) == want
        assert max(span.end for span in spans) == pytest.approx(3 * makespan(once))
        third = [span for span in spans if span.seq == 2]
        assert min(span.start for span in third) == pytest.approx(2 * makespan(once))
        assert hidden(spans).exposed == pytest.approx(3 * sum(p.end - p.start for p in once if p.action.verb == "wait"))


def test_spans_of_a_rank_do_not_overlap_on_its_processor() -> None:
    for plan in (pipelined("1f1b", tp=2), pipelined("zb-h1"), pipelined("interleaved"), pipelined("zb-h1", U)):
        for spans in lanes(predicted(plan)).values():
            busy = sorted((span.start, span.end) for span in spans if span.lane == "processor")
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(busy))


@pytest.mark.parametrize("model", [SPEC, U], ids=["gpt", "u"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved"])
def test_idle_and_busy_time_of_a_pipeline_add_up(name: str, model: ModelSpec) -> None:
    """What a rank does not compute between its first and its last op, it stands idle for a transfer."""
    plan = pipelined(name, model)
    for (_, rank), spans in lanes(predicted(plan)).items():
        own = [span for span in spans if span.lane == "processor"]
        assert sum(span.seconds for span in own) == pytest.approx(max(span.end for span in own))
        names = Counter(span.name for span in spans if span.kind in ("idle", "transfer"))
        assert names == Counter(str(op) for op in plan.schedule.ranks[rank] if not op.computes)


def test_transfers_take_what_their_reshard_plans_say() -> None:
    plan = pipelined("1f1b", tp=2)
    want = plan.reshards[False][0, 1]["h"].predicted * 1e-9
    moves = [span for span in predicted(plan).spans if span.kind == "transfer" and span.name == "0SEND_F2"]
    assert [(span.rank, span.seconds) for span in moves] == [(0, pytest.approx(want)), (1, pytest.approx(want))]


def test_a_split_backward_takes_as_long_as_its_halves() -> None:
    run = dry_run(pipelined("zb-h1").schedule)
    kinds = {op.kind for ops in run.schedule.ranks for op in ops if op.computes}
    assert kinds == {"F", "I", "W"}
    spans = [span for span in predicted(pipelined("zb-h1")).spans if span.rank == 0 and span.kind == "compute"]
    assert Counter(span.name for span in spans)["attn0.W0"] == 4  # a micro-batch each


def test_without_overlap_there_is_no_network_and_without_costs_there_are_shapes() -> None:
    plan = plan_of(whole_steps(1), Layout.of(tp=2), tp=2, overlap="none")
    assert {span.kind for span in predicted(plan).spans} == {"compute", "wait"}
    assert all(span.seconds == 0 for span in predicted(plan).spans if span.kind == "wait")
    assert sum(span.seconds for span in predicted(replace(plan, costs=None)).spans) > 0
