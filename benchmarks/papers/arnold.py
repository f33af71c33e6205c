"""Arnold's figures: spreads by the paper's own program and by Plait, predicted steps by placement; the queue
is ``arnold_queue``.

Settings are those of ``benchmarks/placement.py``: table 1's clusters, occupied as said there, since the
paper prints no occupancy. A step by placement is what ``plait plan`` with ``place.topology`` simulates, with
the losses of ``specs/placement/network.toml``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product
from statistics import mean

from benchmarks.baselines.fits import best_fit, gpu_packing, random_fit
from benchmarks.baselines.program import mip
from benchmarks.papers import lab
from benchmarks.papers.arnold_queue import queue
from benchmarks.papers.found import Found, Row, Series, job_file
from benchmarks.papers.planned import Settings, planning, settings
from benchmarks.placement import ALPHAS, PUBLISHED, SETTINGS, Setting, program, score
from plait.api.placing import plan_of, volumes_of
from plait.core.base.text import counted
from plait.core.cluster.network import Network
from plait.core.job.communication import CommunicationMatrix
from plait.place.ecmp import RailFabric, conflict_factor
from plait.place.placing import place
from plait.place.problem import MinipodSpread, Problem, spread_of
from plait.plan.simulate import PlacedOn, simulate_plan

PAPER = "arnold"
SEEDS, LIMIT = 5, 30.0
PAPERS_OWN = ("(i)", "(ii)", "(iii)")
IDLE = tuple(f"{name} idle" for name in PAPERS_OWN)
BENCHMARK, OWN = "python -m benchmarks.placement", "python -m benchmarks.papers arnold"
FLOWS = 4
"""Connections of a NIC, each of which a switch's hash sends over one uplink."""


@cache
def spreads(name: str) -> Mapping[float, Sequence[tuple[float, float, float]]]:
    """By alpha, for every seed: score of the best baseline, of the paper's program, of Plait."""
    setting = SETTINGS[name]
    found: dict[float, list[tuple[float, float, float]]] = {alpha: [] for alpha in ALPHAS}
    for seed in range(min(SEEDS, setting.seeds)):
        problem = Problem.plain(setting.rows, setting.columns, setting.free(seed), limit=LIMIT)
        others = [spread_of(problem, made(problem).cells) for made in PUBLISHED.values()]
        for alpha in ALPHAS:
            solved = program(problem, alpha, LIMIT)["score"]
            if solved:
                ours = place(replace(problem, alpha=alpha)).score
                found[alpha].append((min(score(alpha, one) for one in others), solved, ours))
    return found


def _packed(name: str, seed: int) -> float:
    """Score at alpha 1 of the better of the baselines that pack."""
    setting = SETTINGS[name]
    problem = Problem.plain(setting.rows, setting.columns, setting.free(seed), limit=LIMIT)
    return min(score(1.0, spread_of(problem, made(problem).cells)) for made in (best_fit, gpu_packing))


def weighted_spread() -> Found:
    """Figure 7: the best baseline's weighted spread over the program's, and over Plait's."""
    rows: list[Row] = []
    series: list[Series] = []
    every: dict[str, list[float]] = {}
    ends: dict[str, float] = {}
    packed: dict[str, float] = {}
    for name in (*IDLE, *PAPERS_OWN):
        found = spreads(name)
        for who, at in (("the program", 1), ("Plait", 2)):
            points = [
                (alpha, round(mean(one[0] / one[at] for one in found[alpha]), 4)) for alpha in ALPHAS if found[alpha]
            ]
            series.append(Series(name=f"{name}, {who}", points=points))
            rows.append(
                Row(
                    name=f"{name}, {who}",
                    value=round(mean(value for _, value in points), 3),
                    command=BENCHMARK,
                    note=f"up to {max(one[0] / one[at] for own in found.values() for one in own):.2f}x",
                )
            )
        ends[name] = round(mean(one[0] / one[1] for one in found[1.0]), 3)
        packed[name] = round(mean(_packed(name, seed) / one[1] for seed, one in enumerate(found[1.0])), 3)
        every[name] = [one[0] / one[1] for own in found.values() for one in own]
    occupied = [value for name in PAPERS_OWN for value in every[name]]
    by_setting = [mean(every[name]) for name in PAPERS_OWN]
    rows.append(Row(name="the program, all settings, most", value=round(max(occupied), 2), command=BENCHMARK))
    rows.append(Row(name="the program, all settings, mean", value=round(mean(by_setting), 3), command=BENCHMARK))
    return Found(rows=rows, series=series, claims={
        16: {"the most": round(max(occupied), 3), "the mean": round(mean(by_setting), 3)},
        17: {f"{name}, alpha 1": value for name, value in packed.items()},
    }, facts={"lowest": min(ends.values())})  # fmt: skip


def _naive(problem: Problem, most: int) -> tuple[int, float]:
    """Maps of cells to minipods that were scored, and seconds: all in order, at most so many."""
    assert problem.shape is not None
    rows, columns = problem.shape
    free, best, tried = problem.capacity, float("inf"), 0
    began = time.perf_counter()
    for cells in product(range(len(free)), repeat=rows * columns):
        tried += 1
        if all(cells.count(pod) <= free[pod] for pod in range(len(free))):
            widest = (max(len(set(cells[at::rows])) for at in range(rows)),
                      max(len(set(cells[at * rows : (at + 1) * rows])) for at in range(columns)))  # fmt: skip
            best = min(best, 0.7 * widest[0] + 0.3 * widest[1])
        if tried == most:
            break
    return tried, time.perf_counter() - began


def latency() -> Found:
    """Figure 8: naive enumeration, the program, Plait."""
    rows: list[Row] = []
    series: dict[str, list[tuple[float | str, float]]] = {"naive enumeration": [], "the program": [], "Plait": []}
    slow: dict[str, bool] = {}
    for name, minipods, nodes, heights in (("(i)", 3, 18, (4, 5, 6, 7)), ("(ii)", 5, 438, (3, 4, 5))):
        for rows_of in heights:
            count, problem = (
                2 * rows_of,
                Problem.plain(rows_of, 2, [nodes // minipods] * minipods, limit=LIMIT, alpha=0.3),
            )
            tried, took = _naive(problem, 300_000)
            whole = minipods**count
            seconds = took * whole / tried
            timed = {
                "the program": _seconds(partial(mip, replace(problem, unit="pp"))),
                "Plait": _seconds(partial(place, problem)),
            }
            at = f"{name}, {count} nodes"
            series["naive enumeration"].append((at, round(seconds, 3)))
            for who, value in timed.items():
                series[who].append((at, round(value, 4)))
            note = f"{whole:,} maps" + ("" if tried == whole else f", by the rate of {tried:,}")
            rows.append(Row(name=f"enumeration, {at}", value=round(seconds, 2), note=note))
            rows.append(Row(name=f"the program, {at}", value=round(timed["the program"], 3)))
            if (name, count) in (("(i)", 14), ("(ii)", 10)):
                longer = seconds / timed["the program"]
                slow[f"{at}: {seconds:.0f} s, {longer:,.0f} times as long as the program"] = (
                    seconds > 5 and longer > 100
                )
    large = replace(SETTINGS["(iii)"], rows=64)
    problem = Problem.plain(64, 8, large.free(0), limit=LIMIT, alpha=0.3)
    rows.append(
        Row(name="Plait, 512 nodes of 1,019", value=round(_seconds(partial(place, problem)), 3), command=BENCHMARK)
    )
    return Found(rows=rows, series=[Series(name=name, points=own) for name, own in series.items()], claims={21: slow})


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


CLUSTERS = {"208 GPUs": Setting(40, 2000, 13, 2, 0.9), "9,600 GPUs": Setting(40, 2400, 75, 16, 0.42)}
"""26 and 1,200 nodes of clusters of minipods of 50 and 60, nine tenths and four tenths busy; shapes are
assumed."""
DENSE, EXPERTS, LARGE = PAPER, "arnold-experts", "arnold-large"
"""Job files."""
NETWORK = Network.read()
MINIPODS = {
    "neither": (*(0, 1) * 3, *(1, 0) * 3), "DP-aligned": (*(0,) * 6, *(1,) * 6),
    "PP-aligned": (*(0,) * 3, *(1,) * 3) * 2,
}  # fmt: skip
"""Of twelve nodes, stage by stage: six replicas of two stages in two minipods."""


@cache
def _drawn_and_placed(name: str, seed: int) -> dict[str, tuple[tuple[int, ...], MinipodSpread]]:
    """Minipods of nodes by rank, and spreads: as they come free (random, even), and Plait's at alpha 0.3."""
    setting = CLUSTERS[name]
    problem = Problem.plain(setting.rows, setting.columns, setting.free(seed), limit=LIMIT, alpha=0.3)
    number: dict[str, int] = {}
    hosts = tuple(number.setdefault(pod, len(number)) for pod in place(problem).minipods)
    found = {"drawn": random_fit(problem, by_column=True).cells, "placed": hosts}
    return {who: (pods, spread_of(problem, pods)) for who, pods in found.items()}


def cluster_spread() -> Found:
    """Section 6.2: spreads of DP and PP groups, drawn over placed."""
    rows: list[Row] = []
    for name in CLUSTERS:
        found = [_drawn_and_placed(name, seed) for seed in range(SEEDS)]
        for kind, of in (("DP", "columns"), ("PP", "rows")):
            drawn, placed = (mean(getattr(one[who][1], of) for one in found) for who in ("drawn", "placed"))
            note = f"{drawn:.1f} minipods to {placed:.1f}"
            rows.append(Row(name=f"{name}, {kind} groups", value=round(drawn / placed, 2), note=note))
    return Found(rows=rows)


@cache
def _step(job: str, pods: tuple[int, ...], asked: Settings = ()) -> float:
    """Seconds of a step whose nodes lie in these minipods, as ``plait plan`` predicts it."""
    planner = planning(job, asked).planner
    return simulate_plan(
        planner.draft(planner.job), planner.cluster, placed=PlacedOn(pods=pods, network=NETWORK)
    ).seconds


def _simulated(asked: Settings = ()) -> dict[str, float]:
    """Gains of the dense model's alignments over neither, in a simulated step."""
    taken = {name: _step(DENSE, pods, asked) for name, pods in MINIPODS.items()}
    return {name: taken["neither"] / seconds - 1 for name, seconds in taken.items() if name != "neither"}


def _unhidden(job: str, asked: Settings = ()) -> dict[str, float]:
    """Seconds that each alignment saves if nothing hides what is sent, by which ``plait place`` compares."""
    plan, rate, _, each = plan_of(job_file(job), list(asked))
    sent = CommunicationMatrix.of(plan, ranks_per_node=each, volumes=volumes_of(plan)).mean
    network = Network.read(rate=rate)
    dp, pp = sent.dp + sent.ep, sent.pp
    return {
        "DP-aligned": network.collective(dp, 2) - network.collective(dp, 1),
        "PP-aligned": network.p2p(pp, 2) - network.p2p(pp, 1),
    }


def _deep(layers: int) -> Settings:
    """The dense model with so many layers: two stages, whose parts have two layers each."""
    return settings(model__num_layers=layers, strategy__virtual_stages=layers // 4)


def alignment() -> Found:
    """Figure 5: 96 GPUs over two minipods; and by layers."""
    whole, simulated = _step(DENSE, MINIPODS["neither"]), _simulated()
    rows: list[Row] = []
    saved = {name: _unhidden(job) for name, job in (("24B dense", DENSE), ("experts", EXPERTS))}
    for name, each in saved.items():
        for kind, seconds in each.items():
            what = f"{name}, {kind}: seconds saved if nothing is hidden"
            rows.append(Row(name=what, value=f"{seconds:.3f} s", command=OWN))
    alphas = {name: each["DP-aligned"] / sum(each.values()) for name, each in saved.items()}
    rows += [Row(name=f"alpha of the {name}", value=f"{alpha:.2f}") for name, alpha in alphas.items()]
    rows += [Row(name=f"24B dense, {kind}: simulated step", value=round(gain, 5), command=OWN)
             for kind, gain in simulated.items()]  # fmt: skip
    gains = {layers: max(_simulated(_deep(layers)).values()) for layers in (24, 48, 72, 96)}
    single = settings(strategy__schedule="1f1b", strategy__virtual_stages=1)
    plain, dense = (
        each["DP-aligned"] / sum(each.values()) for each in (_unhidden(EXPERTS, single), _unhidden(DENSE, single))
    )
    points = [(layers, round(gain, 5)) for layers, gain in gains.items()]
    grows = {f"{a[0]} to {b[0]} layers": b[1] > a[1] for a, b in pairwise(points)}
    return Found(rows=rows, series=[Series(name="the better alignment, simulated", points=points)], claims={
        18: {"PP-aligned over neither": round(1 + simulated["PP-aligned"], 5)},
        19: {"alpha": round(alphas["experts"], 3)}, 23: grows,
    }, facts={"gain": round(max(simulated.values()), 5), "alpha": round(alphas["experts"], 2),
              "plain": round(plain, 2), "dense": round(dense, 2),
              "most": round(saved["24B dense"]["PP-aligned"] / whole, 4)})  # fmt: skip


ACTIVE = settings(
    model__num_layers=64,
    model__hidden=7168,
    model__num_heads=128,
    model__num_kv_heads=8,
    model__head_size=128,
    model__ffn_hidden=18432,
    model__vocab=129280,
    strategy__virtual_stages=2,
)
"""In place of the job of 405B: what a token passes of a mixture, DeepSeek-V3's (nine of its experts are as
wide as its dense layers), in 64 layers, two a stage."""


def throughput() -> Found:
    """Figure 9: simulated throughput of Plait's placement over nodes as they come free; of the large job also
    with the computation of a mixture, and with stages of one layer."""
    rows: list[Row] = []
    gains: dict[str, float] = {}
    medium = settings(strategy__dp=13, train__global_batch_size=832)
    cases: tuple[tuple[str, str, str, Settings], ...] = (
        ("208 GPUs", "208 GPUs", DENSE, medium),
        ("9,600 GPUs", "9,600 GPUs", LARGE, ()),
        ("9,600 GPUs, as a mixture computes", "9,600 GPUs", LARGE, ACTIVE),
        ("the same, stages of one layer", "9,600 GPUs", LARGE, (*ACTIVE, "strategy.virtual_stages=4")),
    )
    for name, cluster, job, asked in cases:
        found = [_drawn_and_placed(cluster, seed) for seed in range(SEEDS)]
        gain = mean(_step(job, one["drawn"][0], asked) / _step(job, one["placed"][0], asked) for one in found)
        gains[name] = round(gain, 5)
        rows.append(Row(name=name, value=round(gain - 1, 5), command=OWN))
    medium_gain, large, active, single = (round(gain - 1, 5) for gain in gains.values())
    return Found(
        rows=rows, claims={20: {name: gains[name] for name in CLUSTERS}},
        facts={"medium": medium_gain, "large": large, "active": active, "single": single},
    )  # fmt: skip


def interference() -> Found:
    """Figure 11: how much longer transfers take where flows of jobs meet on links above leaf switches, of
    leaves whose 32 NICs spread what they send over ``FLOWS`` connections."""
    rows: list[Row] = []
    points: list[tuple[float | str, float]] = []
    for minipods in (1, 2, 4, 8):
        active = round(32 * (1 - 1 / minipods))  # of 32 NICs of a leaf, those whose peers lie in other minipods
        factor = conflict_factor(RailFabric(uplinks=32, active=active), FLOWS) if active else 1.0
        points.append((minipods, round(factor, 4)))
        rows.append(Row(name=counted(minipods, "minipod"), value=round(factor, 3)))
    grows = {f"{a[0]} to {b[0]} minipods": b[1] > a[1] for a, b in pairwise(points)}
    return Found(rows=rows, series=[Series(name="times as long", points=points)], claims={24: grows})


def pairs() -> Found:
    """Figure 1b: pairs of GPUs that send each other nothing; and bytes of a step between nodes of the dense
    job."""
    rows: list[Row] = []
    for name, job in (("96 GPUs", DENSE), ("9,600 GPUs", LARGE)):
        degrees = planning(job, ()).planner.job.strategy
        pp, dp, tp = (int(getattr(degrees, axis)) for axis in ("pp", "dp", "tp"))
        world = pp * dp * tp
        partners = (tp - 1) + (dp - 1) + 2 * (pp - 1) / pp  # of a rank: its groups, and stages before and after
        rows.append(Row(name=name, value=round(1 - partners / (world - 1), 4), note=f"pp {pp}, dp {dp}, tp {tp}"))
    plan, _, _, each = plan_of(job_file(DENSE), [])
    matrix = CommunicationMatrix.of(plan, ranks_per_node=each, volumes=volumes_of(plan))
    stages, replicas = len(plan.layout.degrees), plan.layout.degrees[0][0]
    sent = matrix.mean
    series = [
        Series(name=f"node {one}", points=[
            (other, _between(one, other, replicas, sent.dp, sent.pp)) for other in range(stages * replicas)
        ]) for one in range(stages * replicas)
    ]  # fmt: skip
    return Found(rows=rows, series=series)


def _between(one: int, other: int, replicas: int, dp: float, pp: float) -> float:
    """GB of a GPU's step from one node to another: a ring's neighbour in the DP group, a stage's in the PP
    group."""
    same_stage = one // replicas == other // replicas
    if same_stage and (one + 1) % replicas == other % replicas:
        return round(dp / 1e9, 3)
    return round(pp / 1e9, 3) if not same_stage and one % replicas == other % replicas else 0.0


def interference_on_lab(*, again: bool) -> Found:
    """Figure 11 on a lab: all-to-all of a job beside one and two others, each in a minipod or over three."""
    found = lab.measured("interference", again=again)
    rows: list[Row] = []
    for case in found["cases"]:
        for minipods, one in case["jobs"].items():
            for others, ratio, (low, high) in zip(("one", "two"), one["beside"], one["spread"], strict=True):
                name = f"jobs in {minipods}, a core {case['core']}, beside {others}"
                note = f"{low:.2f} to {high:.2f} in {case['rounds']} rounds"
                rows.append(Row(name=name, value=round(ratio, 3), command=lab.shown("interference"), note=note))
    return Found(rows=rows, facts={"machine": found["machine"]})


EMULATED: dict[str, Callable[..., Found]] = {"interference-lab": interference_on_lab}
FIGURES: dict[str, Callable[[], Found]] = {
    "weighted-spread": weighted_spread, "latency": latency, "cluster-spread": cluster_spread, "alignment": alignment,
    "throughput": throughput, "queue": queue, "interference": interference, "pairs": pairs,
}  # fmt: skip
