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
from benchmarks.papers import lab
from benchmarks.papers.arnold_queue import queue
from benchmarks.papers.found import Found, Row, Series, job_file, spread
from benchmarks.papers.planned import Settings, planning, settings
from benchmarks.papers.verdicts import MEASURED, NOISE
from benchmarks.placement import ALPHAS, PUBLISHED, SETTINGS, Setting, program, score
from plait.api.placing import plan_of, volumes_of
from plait.core.cluster.network import Network
from plait.core.job.communication import CommunicationMatrix
from plait.place.placing import place
from plait.place.solve.problem import MinipodSpread, Problem, spread_of
from plait.place.solve.program import mip
from plait.plan.search.simulate import PlacedOn, simulate_plan

PAPER = "arnold"
SEEDS, LIMIT = 5, 30.0
PAPERS_OWN = ("(i)", "(ii)", "(iii)")
IDLE = tuple(f"{name} idle" for name in PAPERS_OWN)
BENCHMARK = "python -m benchmarks.placement"


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
    groups = (PAPERS_OWN, IDLE)
    first = [round(mean(every[group[0]]), 3) for group in groups]
    rows += [
        Row(name="the program in setting (i)", over=first, command=BENCHMARK),
        Row(name="the program, the most", command=BENCHMARK,
            over=[round(max(value for name in group for value in every[name]), 3) for group in groups]),
        Row(name="the program, the mean", command=BENCHMARK,
            over=[round(mean(mean(every[name]) for name in group), 3) for group in groups]),
        Row(name="the program at alpha 1", value=spread(list(ends.values())), reading=spread(list(packed.values())),
            command=BENCHMARK, note="by a reading: of the baselines that pack"),
    ]  # fmt: skip
    return Found(rows=rows, series=series, facts={"lowest": min(ends.values())})


def _naive(problem: Problem, most: int) -> tuple[int, float]:
    """Maps of cells to minipods that were scored, and seconds of processor: all in order, at most so many."""
    assert problem.shape is not None
    rows, columns = problem.shape
    free, best, tried = problem.capacity, float("inf"), 0
    began = time.process_time()
    for cells in product(range(len(free)), repeat=rows * columns):
        tried += 1
        if all(cells.count(pod) <= free[pod] for pod in range(len(free))):
            widest = (max(len(set(cells[at::rows])) for at in range(rows)),
                      max(len(set(cells[at * rows : (at + 1) * rows])) for at in range(columns)))  # fmt: skip
            best = min(best, 0.7 * widest[0] + 0.3 * widest[1])
        if tried == most:
            break
    return tried, time.process_time() - began


def latency() -> Found:
    """Figure 8: naive enumeration, the program, Plait."""
    rows: list[Row] = []
    series: dict[str, list[tuple[float | str, float]]] = {"naive enumeration": [], "the program": [], "Plait": []}
    longer: list[bool] = []
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
                "the program": _seconds(partial(mip, replace(problem, keep_together="pp"))),
                "Plait": _seconds(partial(place, problem)),
            }
            at = f"{name}, {count} nodes"
            series["naive enumeration"].append((at, round(seconds, 3)))
            for who, value in timed.items():
                series[who].append((at, round(value, 4)))
            note = f"{whole:,} maps" + ("" if tried == whole else f", by the rate of {tried:,}")
            longer.append(seconds > 100 * timed["the program"])
            rows.append(Row(name=f"enumeration, {at}", value=round(seconds, 2), note=note))
            rows.append(Row(name=f"the program, {at}", value=round(timed["the program"], 3)))
    large = replace(SETTINGS["(iii)"], rows=64)
    problem = Problem.plain(64, 8, large.free(0), limit=LIMIT, alpha=0.3)
    ours, theirs = _seconds(partial(place, problem)), _seconds(partial(mip, replace(problem, keep_together="pp")))
    rows += [
        Row(name="enumeration takes over 100 times as long, largest cases", value=longer[3] and longer[-1]),
        Row(name="the program places 512 nodes of 1,019 within 10 s", value=theirs < 10, command=BENCHMARK,
            note=f"{theirs:.2f} s"),
        Row(name="Plait, 512 nodes of 1,019", value=round(ours, 3), command=BENCHMARK),
    ]  # fmt: skip
    return Found(rows=rows, series=[Series(name=name, points=own) for name, own in series.items()])


def _seconds(call: Callable[[], object]) -> float:
    """Of processor."""
    began = time.process_time()
    call()
    return time.process_time() - began


CLUSTERS = {"208 GPUs": Setting(40, 2000, 13, 2, 0.9), "9,600 GPUs": Setting(40, 2400, 75, 16, 0.42)}
"""26 and 1,200 nodes of clusters of minipods of 50 and 60, nine tenths and four tenths busy; shapes are
assumed."""
DENSE, EXPERTS, LARGE = PAPER, "arnold-experts", "arnold-large"
"""Job files."""
OURS = "Plait"
NETWORK = Network.read()
MINIPODS = {
    "neither": (*(0, 1) * 3, *(1, 0) * 3), "DP-aligned": (*(0,) * 6, *(1,) * 6),
    "PP-aligned": (*(0,) * 3, *(1,) * 3) * 2,
}  # fmt: skip
"""Of twelve nodes, stage by stage: six replicas of two stages in two minipods."""


@cache
def _placed(name: str, seed: int) -> dict[str, tuple[tuple[int, ...], MinipodSpread]]:
    """Minipods of nodes by rank, and spreads: by each baseline, and Plait's at alpha 0.3."""
    setting = CLUSTERS[name]
    problem = Problem.plain(setting.rows, setting.columns, setting.free(seed), limit=LIMIT, alpha=0.3)
    number: dict[str, int] = {}
    pods = {OURS: tuple(number.setdefault(pod, len(number)) for pod in place(problem).minipods)}
    pods |= {way: made(problem).cells for way, made in PUBLISHED.items()}
    pods["drawn"] = random_fit(problem, by_column=True).cells
    return {way: (one, spread_of(problem, one)) for way, one in pods.items()}


def cluster_spread() -> Found:
    """Section 6.2: spreads of DP and PP groups by each baseline, over placed ones."""
    rows: list[Row] = []
    ratios: dict[tuple[str, str], list[float]] = {}
    for name, (kind, of) in product(CLUSTERS, (("DP", "columns"), ("PP", "rows"))):
        each = [_placed(name, seed) for seed in range(SEEDS)]
        ways = {way: mean(getattr(one[way][1], of) for one in each) for way in each[0]}
        ratios[name, kind] = [round(ways[way] / ways[OURS], 2) for way in ways if way != OURS]
        note = ", ".join(f"{way} {spreads:.1f}" for way, spreads in ways.items())
        rows.append(Row(name=f"{name}, {kind} groups", over=ratios[name, kind], note=f"minipods: {note}"))
    pairs = [zip(*(ratios[name, kind] for name in CLUSTERS), strict=True) for kind in ("DP", "PP")]
    less = [all(small > large + NOISE for small, large in way) for way in zip(*pairs, strict=True)]
    rows.append(Row(name="less for the larger job, DP and PP groups", over=less))
    return Found(rows=rows)


@cache
def _step(job: str, pods: tuple[int, ...], asked: Settings = ()) -> float:
    """Seconds of a step whose nodes lie in these minipods, as ``plait plan`` predicts it."""
    planner = planning(job, asked).planner
    return simulate_plan(
        planner.draft(planner.job), planner.cluster, placed=PlacedOn(pods=pods, network=NETWORK)
    ).seconds


def _stages(number: int) -> Settings:
    """So many stages a rank, of which the paper prints no number."""
    return settings(strategy__schedule="interleaved" if number > 1 else "1f1b", strategy__virtual_stages=number)


def _simulated(asked: Settings = ()) -> dict[str, float]:
    """Gains of the dense model's alignments over neither, in a simulated step."""
    taken = {name: _step(DENSE, pods, asked) for name, pods in MINIPODS.items()}
    return {name: round(taken["neither"] / seconds - 1, 5) for name, seconds in taken.items() if name != "neither"}


def _alpha(gains: Mapping[str, float]) -> float:
    """As section 5.2 has it, of what each alignment gains by more than noise; half where neither does."""
    dp, pp = (gains[kind] if gains[kind] > NOISE else 0.0 for kind in ("DP-aligned", "PP-aligned"))
    return round(dp / (dp + pp), 3) if dp + pp else 0.5


def _unhidden(job: str, asked: Settings) -> dict[str, float]:
    """Share of a step that each alignment saves if nothing hides what is sent, by which ``plait place``
    compares."""
    plan, rate, _, each = plan_of(job_file(job), list(asked))
    sent = CommunicationMatrix.of(plan, ranks_per_node=each, volumes=volumes_of(plan)).mean
    network, planner = Network.read(rate=rate), planning(job, asked).planner
    dp, pp, step = sent.dp + sent.ep, sent.pp, planner.predict(planner.job).seconds
    return {
        "DP-aligned": (network.collective(dp, 2) - network.collective(dp, 1)) / step,
        "PP-aligned": (network.p2p(pp, 2) - network.p2p(pp, 1)) / step,
    }


LAYERS = (24, 48, 72, 96)
DEEP = {"1 stage a rank": 1, "2 stages a rank": 2, "4 stages a rank": 4, "two layers a stage": 0}
"""Stages a rank as layers are added; 0: a quarter of the layers, of two ranks."""


def alignment() -> Found:
    """Figure 5: 96 GPUs over two minipods; and by layers."""
    gains = [_simulated(_stages(number)) for number in (1, 2, 13, 26)]
    experts = [_unhidden(EXPERTS, _stages(number)) for number in (1, 2, 4, 8)]
    rows = [Row(name=f"24B dense, {kind}", over=[one[kind] for one in gains],
                note="1, 2, 13, 26 stages a rank") for kind in gains[0]]  # fmt: skip
    saved = [round(one["PP-aligned"], 4) for one in experts]
    rows += [
        Row(name="experts, PP-aligned", reading=spread(saved), note="by a reading: if nothing is hidden"),
        Row(name="alpha of the 24B dense", over=[_alpha(one) for one in gains]),
        Row(name="alpha of the experts", reading=spread([one["DP-aligned"] / sum(one.values()) for one in experts]),
            note="by a reading: if nothing is hidden"),
    ]  # fmt: skip
    series = [
        Series(name=name, points=[(layers, max(_simulated((
            *settings(model__num_layers=layers), *_stages(number or layers // 4))).values())) for layers in LAYERS])
        for name, number in DEEP.items()
    ]  # fmt: skip
    grows = [all(b[1] > a[1] for a, b in pairwise(one.points)) for one in series]
    rows.append(Row(name="the gain grows with layers", over=grows, note=", ".join(DEEP)))
    return Found(rows=rows, series=series)


ACTIVE = settings(
    model__num_layers=64,
    model__hidden=7168,
    model__num_heads=128,
    model__num_kv_heads=8,
    model__head_size=128,
    model__ffn_hidden=18432,
    model__vocab=129280,
)
"""In place of the job of 405B: what a token passes of a mixture, DeepSeek-V3's (nine of its experts are as
wide as its dense layers), in 64 layers."""


def throughput() -> Found:
    """Figure 9: simulated throughput of Plait's placement over nodes as they come free, by stages a rank; of
    the large job also with the computation of a mixture."""
    medium = settings(strategy__dp=13, train__global_batch_size=832)
    cases: dict[str, tuple[str, list[Settings]]] = {
        "208 GPUs": (DENSE, [(*medium, *_stages(number)) for number in (1, 2, 13, 26)]),
        "9,600 GPUs": (LARGE, [(*more, *_stages(number)) for more in ((), ACTIVE) for number in (1, 2, 4)]),
    }
    rows: list[Row] = []
    for name, (job, every) in cases.items():
        each = [_placed(name, seed) for seed in range(SEEDS)]
        gains = [mean(_step(job, one["drawn"][0], asked) / _step(job, one[OURS][0], asked) for one in each) - 1
                 for asked in every]  # fmt: skip
        rows.append(Row(name=name, over=[round(gain, 5) for gain in gains]))
    return Found(rows=rows)


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
    grows: list[bool] = []
    for case in found["cases"]:
        for minipods, one in case["jobs"].items():
            for others, ratio, (low, high) in zip(("one", "two"), one["beside"], one["spread"], strict=True):
                name = f"jobs in {minipods}, a core {case['core']}, beside {others}"
                note = f"{low:.2f} to {high:.2f} in {case['rounds']} rounds"
                rows.append(Row(name=name, value=round(ratio, 3), command=lab.shown("interference"), note=note))
        narrow, wide = (one["beside"][1] for one in case["jobs"].values())
        grows.append(wide > narrow + MEASURED)
    rows.append(Row(name="more in 3 minipods than in 1, beside two, either core", value=all(grows)))
    return Found(rows=rows, facts={"measured": lab.dates("interference")})


EMULATED: dict[str, Callable[..., Found]] = {"interference-lab": interference_on_lab}
FIGURES: dict[str, Callable[[], Found]] = {
    "weighted-spread": weighted_spread, "latency": latency, "cluster-spread": cluster_spread, "alignment": alignment,
    "throughput": throughput, "queue": queue, "pairs": pairs,
}  # fmt: skip
