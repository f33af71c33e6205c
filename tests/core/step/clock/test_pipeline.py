"""A step in virtual time: exact where theory is, within bounds elsewhere, and the lists that ranks run."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.job.plan import Plan
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import Layout
from plait.core.parallel.sharding import Sharding
from plait.core.record.records import axis_of
from plait.core.record.timeline import Span, Timeline
from plait.core.step.clock.dry_run import PipelineCosts, dry_run
from plait.core.step.clock.pipeline import AXES, Simulation, StepClock
from plait.core.step.clock.prices import ClusterPrices
from plait.core.step.memory.estimate import estimate
from plait.core.step.orders.overlap import segment_order
from plait.core.step.schedules import whole_steps
from plait.core.step.seconds.segment_costs import segment_costs
from plait.core.step.segments import SegmentGraph
from plait.plan.make import make_plan
from plait.plan.simulate import simulate_plan
from tests.plan.machines import SPEC, Given, cluster, pipelined, plan_of
from tests.support.drawn import Chance, drawn_plan
from tests.support.exposure import exposure_of
from tests.support.lists import makespan, timed

U = ModelSpec(family="utransformer", levels=1, num_layers=6, hidden=64, num_heads=4, vocab=100, max_sequence=32)
ALONE = {"slow_computation": 1.0, "slow_communication": 1.0, "step": 0.0, "jitter": 0.0}
"""Nothing disturbs anything."""
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")


def step(plan: Plan, **given: object) -> StepClock:
    return Simulation(plan, Given(plan, **given), None).run()  # type: ignore[arg-type]


def seconds(plan: Plan, places: int, f: float = 1, i: float = 1, w: float = 1, hop: float = 0) -> float:
    ways = {"forward": (f,) * places, "input_gradient": (i,) * places, "weight_gradient": (w,) * places}
    return step(plan, **ways, hop=hop).seconds


def lanes(timeline: Timeline) -> dict[tuple[int, int], list[Span]]:
    found: dict[tuple[int, int], list[Span]] = {}
    for span in timeline.spans:
        found.setdefault((span.step, span.rank), []).append(span)
    return found


def with_costs(plan: Plan) -> Plan:
    """As if measured."""
    costs = segment_costs(plan.model, plan.strategy, batch=4, sequence=32)
    return replace(plan, costs=replace(costs, latency=1e-5))


# ---- identities ----


@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 2), (2, 7), (4, 4), (4, 9), (8, 16)])
def test_1f1b_of_equal_stages(ranks: int, count: int) -> None:
    assert seconds(pipelined("1f1b", ranks, count), ranks, 2, 3, 1) == pytest.approx((count + ranks - 1) * 6)


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 11), (8, 16)])
def test_1f1b_with_one_slow_stage_at_the_end(ranks: int, count: int) -> None:
    """m (f + b) of the slowest, and (f + b) of each other stage."""
    way = (*[1.0] * (ranks - 1), 1.7)
    plan = pipelined("1f1b", ranks, count)
    found = step(plan, forward=way, input_gradient=way, weight_gradient=way).seconds
    assert found == pytest.approx(count * 3 * 1.7 + (ranks - 1) * 3)


@pytest.mark.parametrize(("ranks", "count"), [(4, 8), (4, 12), (8, 16), (8, 32), (16, 32)])
def test_plain_1f1b_hides_no_transfer_but_eager_does(ranks: int, count: int) -> None:
    """Extra 2 c (p - 1) m / p + 2 c (p - 2) for p that divides m; with twice as many forwards ahead only that
    of the way there and back is left."""
    hop, alone = 0.1, (count + ranks - 1) * 3.0
    extra = 2 * hop * (ranks - 1) * count / ranks + 2 * hop * (ranks - 2)
    assert seconds(pipelined("1f1b", ranks, count), ranks, hop=hop) == pytest.approx(alone + extra)
    assert seconds(pipelined("eager-1f1b", ranks, count), ranks, hop=hop) == pytest.approx(
        alone + 2 * hop * (ranks - 1)
    )


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 12), (8, 16)])
def test_zb_h1_fills_the_bubble_with_weight_gradients(ranks: int, count: int) -> None:
    assert seconds(pipelined("zb-h1", ranks, count), ranks) == pytest.approx(3 * count + ranks - 1)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_as_the_dry_run_has_it_where_nothing_is_under_way_beside(data: st.DataObject) -> None:
    name, ranks = data.draw(st.sampled_from(SCHEDULES)), data.draw(st.integers(2, 4))
    plan = pipelined(name, ranks, data.draw(st.integers(2, 3)) * ranks)
    times = st.lists(st.floats(0.1, 3), min_size=ranks, max_size=ranks)
    f, i, w = (tuple(data.draw(times)) for _ in range(3))
    places = [plan.schedule.rank_of[stage] for stage in range(len(plan.stages))]
    forward, inputs, weights = (tuple(way[place] for place in places) for way in (f, i, w))
    costs = PipelineCosts(forward, inputs, weights)
    found = step(plan, forward=f, input_gradient=i, weight_gradient=w)
    assert found.seconds == pytest.approx(dry_run(plan.schedule, costs).makespan)


def test_one_rank_is_the_sum_of_its_ops() -> None:
    """Or what its host takes to launch these, where that takes longer."""
    plan = plan_of(whole_steps(3), Layout.of())
    machine = cluster(host_layer=0.0, host_collective=0.0)
    costs = ClusterPrices(plan, machine).costs(0)
    found = simulate_plan(plan, machine)
    sites = {"attn": 4, "mlp": 4, "embed": 1, "head": 1}
    ops = sum(value * sites.get(key.split(".")[0], 0) for key, value in costs.compute.items() if key[-1] not in "MA")
    assert found.exposed["compute"] == pytest.approx(3 * ops)
    assert {axis for axis, value in found.exposed.items() if value} == {"compute", "optimizer", "beside"}
    assert found.exposed["beside"] == pytest.approx(machine.efficiency.step.value)
    late = simulate_plan(plan, cluster(host_layer=0.01)).exposed
    assert 3 * 8 * 0.01 < late["compute"] < 3 * (8 * 0.01 + ops)  # of four layers, forward and backward
    assert {axis for axis, value in late.items() if value} == {"compute", "optimizer", "beside"}


def test_unlimited_links_that_disturb_nothing_leave_computation_alone() -> None:
    machine = cluster(rates=1e18, latency=0.0, **ALONE)
    for shard in (Sharding(), Sharding(optim=2), Sharding(params=2, grads=2, optim=2)):
        plan = pipelined("1f1b", 2, 4, dp=2, tp=2, shardings=(shard, shard))
        found = simulate_plan(plan, machine).exposed
        assert {axis for axis in ("tp", "cp", "dp", "pp") if found[axis] > 1e-9} == set()


# ---- the inside ----


def test_a_whole_model_is_its_list_once_for_every_micro_batch() -> None:
    plan = with_costs(plan_of(whole_steps(3), Layout.of(tp=2), tp=2, p1=2))
    assert plan.costs is not None
    graph = SegmentGraph.of(SPEC, plan.strategy, plan.stages[0])
    actions = segment_order(graph, "domino", plan.costs, 4)
    once = timed(graph, actions, plan.costs, 4)
    timeline = simulate_plan(plan).timeline((5, 6))
    assert timeline.plan_hash == plan.key
    assert set(lanes(timeline)) == {(step, rank) for step in (5, 6) for rank in (0, 1)}
    for spans in lanes(timeline).values():
        kinds = {"run": "compute", "start": "comm", "wait": "wait"}
        want = Counter((kinds[verb], str(op)) for verb, op in actions for _ in range(3))
        assert Counter((span.kind, span.name) for span in spans) == want
        assert max(span.end for span in spans) == pytest.approx(3 * makespan(once))
        third = [span for span in spans if span.seq == 2]
        assert min(span.start for span in third) == pytest.approx(2 * makespan(once))
        assert exposure_of(spans).exposed == pytest.approx(
            3 * sum(p.end - p.start for p in once if p.action.verb == "wait")
        )


def test_spans_of_a_rank_do_not_overlap_on_its_processor_nor_on_a_stream() -> None:
    fsdp = Sharding(params=2, grads=2, optim=2)
    plans = [
        pipelined("1f1b", 2, 4, tp=2),
        pipelined("zb-h1", 2, 4),
        pipelined("interleaved", 2, 4),
        pipelined("1f1b", 2, 4, dp=2, tp=2, shardings=(fsdp, fsdp), p1=2),
    ]
    seen = [0, 0, 0]
    for plan in plans:
        for spans in lanes(simulate_plan(plan, cluster()).timeline()).values():
            units = {span.name for span in spans if span.site in ("attn", "mlp", "vectors") and "." not in span.name}
            streams = (
                [span for span in spans if span.lane == "processor"],
                [span for span in spans if span.kind == "comm" and span.name in units],
                [span for span in spans if span.kind == "comm" and "." in span.name],
            )
            for number, own in enumerate(streams):
                busy = sorted((span.start, span.end) for span in own)
                assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(busy))
                seen[number] += len(busy) > 1
    assert all(seen), "every stream has spans to compare in some plan"


@pytest.mark.parametrize("model", [SPEC, U], ids=["gpt", "u"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved"])
def test_idle_and_busy_time_of_a_pipeline_add_up(name: str, model: ModelSpec) -> None:
    """What a rank does not compute between its first and its last op, it stands idle for a transfer."""
    plan = with_costs(pipelined(name, 2, 4, model))
    for (_, rank), spans in lanes(simulate_plan(plan).timeline()).items():
        own = [span for span in spans if span.lane == "processor"]
        assert sum(span.seconds for span in own) == pytest.approx(max(span.end for span in own))
        names = Counter(span.name for span in spans if span.kind in ("idle", "transfer"))
        assert names == Counter(str(op) for op in plan.schedule.ranks[rank] if not op.computes)


def test_without_a_cluster_transfers_take_what_their_reshard_plans_say() -> None:
    plan = pipelined("1f1b", 2, 4, tp=2)
    want = plan.reshards[False][0, 1]["h"].predicted * 1e-9
    moves = [span for span in simulate_plan(plan).timeline().spans if span.name == "0SEND_F2"]
    assert [(span.rank, span.seconds) for span in moves] == [(0, pytest.approx(want)), (1, pytest.approx(want))]


def test_a_split_backward_takes_as_long_as_its_halves() -> None:
    spans = [span for span in simulate_plan(pipelined("zb-h1", 2, 4)).timeline().spans if span.rank == span.layer == 0]
    assert Counter(span.name for span in spans if span.kind == "compute")["attn0.W0"] == 4  # a micro-batch each


def test_without_overlap_there_is_no_network_and_without_costs_there_are_shapes() -> None:
    plan = with_costs(plan_of(whole_steps(1), Layout.of(tp=2), tp=2, overlap="no-communication"))
    spans = simulate_plan(plan).timeline().spans
    assert {span.kind for span in spans} == {"compute", "wait"}
    assert all(span.seconds == 0 for span in spans if span.kind == "wait")
    assert sum(span.seconds for span in simulate_plan(replace(plan, costs=None)).timeline().spans) > 0


def test_what_optimizers_changed_is_published_in_every_step_but_the_first() -> None:
    plan = plan_of(whole_steps(1), Layout.of(dp=2), shardings=(Sharding(optim=2),))
    first, second = (
        Counter(span.kind for span in spans if span.name.startswith("publish"))
        for _, spans in sorted(lanes(simulate_plan(plan).timeline((0, 1), ranks=(1,))).items())
    )
    units = 2 * SPEC.num_layers + 3  # and both embeddings, vectors
    assert (first, second) == (Counter(), Counter({"comm": units}))


# ---- what communication costs ----


def two_tiers() -> Plan:
    """Sharded over nodes of 8, tensor-parallel inside."""
    big = ModelSpec(
        family="llama", num_layers=8, hidden=1024, num_heads=16, vocab=1024, max_sequence=512, ffn_hidden=2816
    )
    shard = Sharding(params=4, grads=4, optim=4)
    return plan_of(
        whole_steps(2), Layout.of(dp=4, tp=4), big, shardings=(shard,), tp=4, overlap="async", precision="bf16-mixed"
    )


def test_overlap_hides_and_contention_costs() -> None:
    plan = two_tiers()
    apart = replace(plan, strategy=replace(plan.strategy, shard_overlap="none"))
    assert simulate_plan(apart, cluster()).exposed["dp"] > simulate_plan(plan, cluster()).exposed["dp"]
    disturbed = simulate_plan(plan, cluster(slow_computation=1.5, slow_communication=1.5)).seconds
    assert disturbed > simulate_plan(plan, cluster(**ALONE)).seconds


def test_a_node_that_is_late_delays_the_step_and_the_draw_is_the_seed() -> None:
    plan = pipelined("1f1b", 4, 8, tp=4)
    machine = cluster(jitter=0.1)
    several = [simulate_plan(plan, machine, jitter_seed=seed).seconds for seed in range(20)]
    assert several[3] == simulate_plan(plan, machine, jitter_seed=3).seconds
    assert len(set(several)) == 20
    assert min(several) < simulate_plan(plan, machine).seconds < max(several)
    assert simulate_plan(plan, cluster(jitter=0.0)).seconds < simulate_plan(plan, machine).seconds


def test_nodes_are_late_as_often_as_early() -> None:
    """A node's time is drawn around the time that the cluster says."""
    plan, machine = plan_of(whole_steps(1), Layout.of()), cluster(**ALONE | {"jitter": 0.5})
    drawn = [simulate_plan(plan, machine, jitter_seed=seed).seconds for seed in range(300)]
    assert mean(drawn) == pytest.approx(simulate_plan(plan, machine).seconds, rel=0.1)


def test_a_peak_that_the_cluster_does_not_have() -> None:
    machine = cluster()
    poor = machine.model_copy(update={"device": machine.device.model_copy(update={"peak": {}})})
    with pytest.raises(JobError, match="has no peak for fp64"):
        simulate_plan(plan_of(whole_steps(1), Layout.of(), precision="fp64"), poor)


def loads(plan: Plan, timeline: Timeline) -> list[float]:
    """What each rank computes, and what each of its streams carries."""
    found: list[float] = []
    for spans in lanes(timeline).values():
        found.append(sum(span.seconds for span in spans if span.kind == "compute"))
        found.append(sum(span.seconds for span in spans if span.kind == "comm" and "." in span.name))
        found.append(sum(span.seconds for span in spans if span.kind == "comm" and "." not in span.name))
        found.append(sum(span.seconds for span in spans if span.kind == "transfer"))
    return found


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6))
def test_never_below_what_any_resource_has_to_do_and_the_parts_are_the_whole(seed: int) -> None:
    _, plan = drawn_plan(Chance(seed), 16, 64)
    found = simulate_plan(plan, cluster(slow_computation=1.2))
    for place in found.places:
        assert min(place.values()) >= -1e-12
        assert sum(place[axis] for axis in AXES) == pytest.approx(found.seconds, rel=1e-9)
    assert max(loads(plan, found.timeline((1,)))) <= found.seconds * (1 + 1e-9)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6))
def test_the_bytes_of_its_spans_are_those_of_the_estimate(seed: int) -> None:
    _, plan = drawn_plan(Chance(seed), 16, 64)
    spans = lanes(simulate_plan(plan).timeline((1,)))
    for place in estimate(plan).places:
        sent = Counter[str]()
        for span in spans[1, place.ranks[0]]:  # the largest share
            rows = span.site == "embed" and "." in span.name
            axis = "rows" if rows else "tp" if "." in span.name else "pp" if span.kind == "transfer" else "units"
            if axis == "tp" and axis_of(span.kind, span.name) == "cp":
                axis = "ring" if span.name.split(".")[1][0] in "TSH" else "ulysses"
            sent[axis] += span.bytes
        listed = ("tp", "rows", "ulysses", "ring", "pp")
        assert {axis: sent[axis] for axis in listed} == {axis: place.sent.get(axis, 0) for axis in listed}
        units = ("params", "grads", "optim", "replicas", "secondary")
        assert sent["units"] == sum(place.sent.get(axis, 0) for axis in units)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.floats(1.0, 50.0))
def test_faster_links_never_make_a_step_longer(seed: int, factor: float) -> None:
    """Exactly so where streams do not share links: lists are fixed, and every moment is a maximum of sums.
    Where they share, what moves earlier can meet other traffic: by less than 2 %."""
    _, plan = drawn_plan(Chance(seed), 16, 64)
    slow, fast = (simulate_plan(plan, cluster(rates=rate, **ALONE)).seconds for rate in (0.01, 0.01 * factor))
    assert fast <= slow * 1.02


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_draft_is_all_that_a_prediction_reads(name: str) -> None:
    model = {"family": "gpt", "num_layers": 4, "hidden": 64, "num_heads": 4, "vocab": 99, "max_sequence": 16}
    strategy = {"pp": 2, "schedule": name, "virtual_stages": 2 if name == "interleaved" else 1, "slices": {}}
    job = Job.from_dict({
        "model": model, "data": {"sequence_length": 16}, "train": {"global_batch_size": 8, "micro_batch_size": 2},
        "strategy": strategy,
    })  # fmt: skip
    whole, draft = (make_plan(job, cluster().hosts, vocab=1, draft=draft) for draft in (False, True))
    assert replace(whole, reshards={}) == draft
    assert simulate_plan(draft, cluster()).seconds == simulate_plan(whole, cluster()).seconds


def test_a_finalist_of_126_layers_takes_well_under_a_fifth_of_a_second() -> None:
    big = ModelSpec(
        family="llama", num_layers=128, hidden=16384, num_heads=128, num_kv_heads=8, ffn_hidden=53248,
        vocab=128256, max_sequence=8192,
    )  # fmt: skip
    plan = pipelined("1f1b", 16, 64, big, tp=8, overlap="async", precision="bf16-mixed")
    best = 1e9  # of the processor: others may be busy too
    for _ in range(3):
        start = time.process_time()
        found = simulate_plan(plan, cluster())
        best = min(best, time.process_time() - start)
    assert found.seconds > 0
    assert best < 0.2
