"""Domino's figures by the planner: a step of tensor parallelism alone on H100, with every collective awaited
(Megatron-LM sync), with Megatron-LM's overlap in the backward (async), by Domino's slices, and with none.

The paper searches the slices by a grid, so the fastest of ``SLICES`` counts. It prints no batch sizes for
one node and 4 to 64 for several: those of ``BATCHES`` that fit are taken. Its table of models is not at
hand: where heads do not divide by the ranks (13B on 16 and 32, 30B) the model has 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

from benchmarks.orders import RATIOS, simulated
from benchmarks.orders import Case as OrderCase
from benchmarks.papers import lab
from benchmarks.papers.domino_curves import curves
from benchmarks.papers.found import Found, Row, Series, spread
from benchmarks.papers.planned import Settings, command, planning, predict, settings
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.estimate import estimate
from plait.core.step.orders.overlap import SegmentLists
from plait.core.step.orders.segment_lists import fixed_order
from plait.plan.candidate import Candidate

PAPER = "domino"
BATCHES, SEQUENCES = (4, 8, 16, 32, 64), (512, 1024)
SLICES = ((2, 1), (4, 1), (1, 2), (2, 2))
"""(of the batch, of columns): rows alone, columns alone, both."""
GPT = {"GPT-3 2.7B": "gpt3-2.7b", "GPT-3 6.7B": "gpt3-6.7b", "GPT-3 13B": "gpt3-13b", "GPT-3 30B": "gpt3-30b"}
LLAMA = {"Llama-2 7B": "llama2-7b", "Llama-2 13B": "llama2-13b"}
MODELS = GPT | LLAMA
SHAPE: dict[str, Any] = {
    "family": "gpt", "num_layers": 12, "hidden": 4096, "num_heads": 32, "vocab": 50257, "max_sequence": 2048,
}  # fmt: skip
"""Of a dozen layers of GPT-3 6.7B."""
ODD = {"GPT-3 13B", "GPT-3 30B", "Llama-2 13B"}
"""Their heads do not divide by 16 or 32."""


@dataclass(frozen=True)
class Case:
    """One setting of the paper's. replicas: of the tp ranks."""

    model: str
    gpus: int
    sequence: int
    batch: int
    changes: Settings = ()
    replicas: int = 1

    def __str__(self) -> str:
        return f"{self.model}, {self.gpus * self.replicas} GPUs, {self.sequence} tokens, batch {self.batch}"

    @property
    def asked(self) -> Settings:
        """All but the overlap."""
        heads: dict[str, int] = {}
        if self.model in ODD and self.gpus > 8:
            heads = {"model__num_heads": 64} | ({"model__num_kv_heads": 64} if self.model in LLAMA else {})
        return settings(
            model__preset=MODELS[self.model], **heads, data__sequence_length=self.sequence,
            train__global_batch_size=self.batch * self.replicas, train__micro_batch_size=self.batch,
            strategy__tp=self.gpus, strategy__dp=self.replicas,
        )  # fmt: skip

    def predicted(self, overlap: str) -> Candidate | None:
        """With that overlap, and no slices."""
        return predict(PAPER, self.asked + settings(strategy__overlap=overlap), self.changes)

    @cached_property
    def sliced(self) -> tuple[Settings, Candidate] | None:
        """Domino's fastest slices that fit."""
        found = [
            (asked, one) for batch, columns in SLICES if batch <= self.batch
            if (one := predict(PAPER, asked := self.asked + settings(
                strategy__overlap="domino", strategy__slices__batch=batch, strategy__slices__columns=columns
            ), self.changes))
        ]  # fmt: skip
        return min(found, key=lambda each: each[1].seconds, default=None)

    @cached_property
    def seconds(self) -> dict[str, float] | None:
        """Of a step: sync, async, domino, none. None where one does not fit."""
        plain = {name: self.predicted(name) for name in ("sync", "async", "no-communication")}
        if not self.sliced or not all(plain.values()):
            return None
        found = {name: one.seconds for name, one in plain.items() if one}
        return {"sync": found["sync"], "async": found["async"], "domino": self.sliced[1].seconds,
                "none": found["no-communication"]}  # fmt: skip

    @property
    def gain(self) -> float:
        """Of Domino over sync."""
        return self.ratio("sync", "domino")

    @property
    def theirs(self) -> float:
        """The same of two slices of the batch that take turns as in the paper."""
        asked = self.asked + settings(
            strategy__overlap="domino", strategy__slices__batch=2, strategy__slices__columns=1
        )  # fmt: skip
        one = predict(PAPER, asked, self.changes)
        assert one and self.seconds
        return self.seconds["sync"] / (one.seconds * interleaved(round(self.ratio("sync", "none") - 1, 2)))

    def unfused(self, overlap: str) -> Candidate | None:
        """With that overlap, attending as Megatron-LM does by default: in several kernels, with dropout."""
        asked = self.asked + settings(strategy__overlap=overlap, model__attention_dropout=0.1)
        return predict(PAPER, asked, self.changes)

    @property
    def of_unfused(self) -> float | None:
        """Domino's share of such an optimum; None where that does not fit."""
        one = self.unfused("no-communication")
        return one.seconds / self.seconds["domino"] if one and self.seconds else None

    @property
    def share(self) -> float:
        """Of the synchronous step that is communication."""
        return 1 - self.ratio("none", "sync")

    def ratio(self, slower: str, faster: str) -> float:
        """How many times as long the first takes."""
        assert self.seconds
        return self.seconds[slower] / self.seconds[faster]

    @property
    def shown(self) -> str:
        """The command of Domino's step."""
        assert self.sliced
        flags = [word for change in self.changes for word in ("--what-if", change)]
        return command(PAPER, self.sliced[0], "--evaluate", *flags)


def cases(models: Sequence[str], gpus: int) -> Iterator[list[Case]]:
    """Of each model and length the batches that fit, the smallest first."""
    for model in models:
        for sequence in SEQUENCES:
            if own := [one for batch in BATCHES if (one := Case(model, gpus, sequence, batch)).seconds]:
                yield own


def fullest(models: Sequence[str], gpus: int) -> list[Case]:
    """Of each model and length the batch with the most tokens a second, as the paper takes for several
    nodes."""

    def rate(one: Case) -> float:
        assert one.seconds
        return one.batch / one.seconds["domino"]

    return [max(own, key=rate) for own in cases(models, gpus)]


ONE_NODE, SEVERAL = ("GPT-3 2.7B", "GPT-3 6.7B", "GPT-3 13B"), ("GPT-3 6.7B", "GPT-3 13B", "GPT-3 30B")


def _by_model(of: Sequence[Case]) -> list[Row]:
    """A row a model: the least gain and the most in the paper's order; beside it Plait's."""
    rows: list[Row] = []
    for model in dict.fromkeys(one.model for one in of):
        own = [one for one in of if one.model == model]
        gains = dict.fromkeys(f"{gain:.2f}x" for gain in spread([one.gain for one in own]))
        note = f"Plait's order {' to '.join(gains)}; {_at(own)}"
        rows.append(Row(name=model, value=spread([one.theirs for one in own]), command=own[-1].shown, note=note))
    return rows


def _at(own: Sequence[Case]) -> str:
    return "batches " + ", ".join(str(one) for one in sorted({case.batch for case in own}))


def _named(of: Sequence[Case], told: Callable[[Case], float]) -> dict[str, float]:
    return {str(one): round(told(one), 4) for one in of}


def _curves(models: Sequence[str], gpus: int) -> list[Series]:
    """The gain by batch."""
    return [
        Series(name=f"{own[0].model}, {own[0].sequence}", points=[(one.batch, round(one.gain, 4)) for one in own])
        for own in cases(models, gpus)
    ]


def shares() -> Found:
    """Figures 1 and 3: how much of a synchronous step is communication."""
    every = [one for gpus in (8, 16, 32) for own in cases(list(MODELS), gpus) for one in own]
    best = [one for gpus in (8, 16, 32) for one in fullest(list(MODELS), gpus)]
    thirteen = [one for one in every if one.model == "GPT-3 13B"]
    sync = [Row(name=name, value=spread([one.share for one in own]), command=_sync(own[-1]), note=_at(own))
            for name, own in (("GPT-3 13B, 1 to 4 nodes", thirteen), ("GPT-3 and Llama-2, 1 to 4 nodes", every),
                              ("the same, at the batch of the most tokens a second", best))]  # fmt: skip
    series = [
        Series(name=f"{model}, {sequence}", points=[
            (gpus, round(one.share, 4)) for gpus in (8, 16, 32) for one in fullest([model], gpus)
            if one.sequence == sequence
        ]) for model in MODELS for sequence in SEQUENCES
    ]  # fmt: skip
    return Found(rows=sync, series=series, facts={"four": round(max(one.share for one in best), 3)})


def _sync(one: Case) -> str:
    return command(PAPER, one.asked + settings(strategy__overlap="sync"), "--evaluate")


def one_node() -> Found:
    """Figures 9 and 12, one node: gains at the batch of the most tokens a second, and over all batches."""
    best = fullest([*ONE_NODE, *LLAMA], 8)
    every = [one for own in cases([*ONE_NODE, *LLAMA], 8) for one in own]
    rises = {
        f"{own[0].model}, {own[0].sequence} tokens": all(
            a.gain < b.gain + 5e-3 and a.theirs < b.theirs + 5e-3 for a, b in pairwise(own)
        )
        for own in cases([*ONE_NODE, *LLAMA], 8)
    }
    return Found(
        rows=_by_model(best), series=_curves([*ONE_NODE, *LLAMA], 8),
        claims={1: _named(best, lambda one: one.theirs), 7: rises},
        facts={"least": round(min(one.gain for one in every), 2), "small": min(BATCHES)},
    )  # fmt: skip


def of_optimum() -> Found:
    """Figures 10 and 13: Domino's share of the throughput without communication."""
    one, two, four = fullest([*ONE_NODE, *LLAMA], 8), fullest(list(LLAMA), 16), fullest(list(LLAMA), 32)

    def told(case: Case) -> float:
        return case.ratio("none", "domino")

    rows = [Row(name=name, value=spread([told(case) for case in own]), command=own[-1].shown, note=_at(own))
            for name, own in (("GPT-3, one node", [c for c in one if c.model in GPT]),
                              ("Llama-2, one node", [c for c in one if c.model in LLAMA]),
                              ("Llama-2, two nodes", two), ("Llama-2, four nodes", four))]  # fmt: skip
    gpt = [case for case in one if case.model in GPT]
    unfused, wide = ([ratio for case in own if (ratio := case.of_unfused)] for own in (gpt, four))
    rows.append(Row(name="GPT-3, one node, the optimum with attention unfused", value=spread(unfused), note=_at(gpt)))
    worst = min(one, key=told)
    assert worst.sliced
    exposed, step = worst.sliced[1].parts, worst.sliced[1].seconds
    return Found(
        rows=rows, claims={3: _named(gpt, told), 4: _named([*two, *four], told)},
        facts={"low": round(min(unfused), 3), "top": round(max(unfused), 3),
               "wide_low": round(min(wide), 3), "wide_top": round(max(wide), 3),
               "case": str(worst), "exposed": round(exposed.get("tp", 0.0) / step, 3),
               "limit": round(min(_limit(case) for case in [*two, *four]), 3)},
    )  # fmt: skip


def _limit(case: Case) -> float:
    """The share of the optimum that hiding as much as there is computation would reach."""
    assert case.seconds
    sent = case.seconds["sync"] - case.seconds["none"]
    return case.seconds["none"] / max(case.seconds["none"], sent)


def several() -> Found:
    """Figures 11 and 12, several nodes."""
    rows: list[Row] = []
    claims: dict[str, float] = {}
    facts: dict[str, float] = {}
    for gpus, nodes in ((16, "two nodes"), (32, "four nodes")):
        best = fullest([*SEVERAL, *LLAMA], gpus)
        rows += [replace(row, name=f"{row.name}, {nodes}") for row in _by_model(best)]
        if gpus == 32:
            claims = _named(best, lambda one: one.theirs)
        else:
            facts = {"two": round(min(one.theirs for one in best), 2)}
    return Found(rows=rows, series=_curves(list(SEVERAL), 32), claims={2: claims}, facts=facts)


def asynchronous() -> Found:
    """Section 5.2: Megatron-LM's overlap of the backward over none."""
    one, more = fullest(list(ONE_NODE), 8), [*fullest(list(SEVERAL), 16), *fullest(list(SEVERAL), 32)]

    def told(case: Case) -> float:
        return case.ratio("sync", "async")

    rows = [Row(name=name, value=spread([told(each) for each in own]), note=_at(own),
                command=command(PAPER, own[-1].asked + settings(strategy__overlap="async"), "--evaluate"))
            for name, own in (("GPT-3, one node", one), ("GPT-3, two and four nodes", more))]  # fmt: skip
    pairs = [(each.unfused("sync"), each.unfused("async")) for each in one]
    plain = spread([sync.seconds / beside.seconds for sync, beside in pairs if sync and beside])
    rows.append(Row(name="GPT-3, one node, attention unfused", value=plain, note=_at(one)))
    return Found(rows=rows, claims={5: _named([*one, *more], told)}, facts={"low": plain[0], "top": plain[1]})


def faster_network() -> Found:
    """Section 5.3: 800 GB/s between four nodes, and 128 and 256 GPUs, which are replicas of 32 here."""
    rows: list[Row] = []
    points: dict[str, list[tuple[float | str, float]]] = {"400 GB/s": [], "800 GB/s": []}
    gains: dict[str, float] = {}
    fixed: dict[str, list[float]] = {"slow": [], "fast": []}
    for replicas in (1, 4, 8):
        for name, changes in (("400 GB/s", ()), ("800 GB/s", ("nic=2x",))):
            one = Case("GPT-3 6.7B", 32, 1024, 32, changes, replicas)
            value = round(one.gain, 4)
            points[name].append((32 * replicas, value))
            rows.append(Row(name=f"{32 * replicas} GPUs, {name}", value=value, command=one.shown))
    wide = [(model, seq) for model in SEVERAL for seq in SEQUENCES]
    best = {(one.model, one.sequence): one for one in fullest(list(SEVERAL), 32)}
    for model, sequence in wide:
        slow = best[model, sequence]
        fast = Case(model, 32, sequence, slow.batch, ("nic=2x",))
        gains[f"{fast}, more than at 400 GB/s"] = fast.gain > slow.gain and fast.theirs > slow.theirs
        fixed["slow"].append(slow.theirs)
        fixed["fast"].append(fast.theirs)
    rows.append(Row(name="most of three models at 800 GB/s", value=max(
        round(Case(model, 32, seq, best[model, seq].batch, ("nic=2x",)).gain, 4) for model, seq in wide
    ), command=Case(*wide[0][:1], 32, wide[0][1], best[wide[0]].batch, ("nic=2x",)).shown))  # fmt: skip
    series = [Series(name=name, points=own) for name, own in points.items()]
    facts = {name: f"{min(own):.2f}x to {max(own):.2f}x" for name, own in fixed.items()}
    return Found(rows=rows, series=series, claims={6: gains}, facts=facts)


def graphs() -> Found:
    """Section 5.2: CUDA graphs, GPT-3 13B of 512 tokens on one node."""
    rows: list[Row] = []
    for batch in (4, 16):
        one = Case("GPT-3 13B", 8, 512, batch)
        assert one.sliced
        asked = one.sliced[0] + settings(strategy__cuda_graphs="true")
        graphed = predict(PAPER, asked)
        value = round(graphed.seconds / one.sliced[1].seconds - 1, 4) if graphed else None
        rows.append(Row(name=f"micro-batch of {batch}", value=value, command=command(PAPER, asked, "--evaluate")))
    return Found(rows=rows)


@cache
def interleaved(ratio: float) -> float:
    """How many times as long a micro-batch of a dozen layers takes in the paper's order as in the searched
    one, where communication is ``ratio`` of computation."""
    one = OrderCase(ModelSpec(**SHAPE), Strategy(tp=2, p1=2), ("step",))
    costs = one.costs(ratio)
    lists = one.lists(costs)
    fixed = SegmentLists(lists.graph, {phase: fixed_order(replace(lists.graph, phase=phase)) for phase in one.phases})
    return simulated(fixed, costs) / simulated(lists, costs)


def order() -> Found:
    """Figures 7 and 8: the paper's fixed interleaving over the order that Plait searches, by simulated time
    of a micro-batch of 12 layers, two slices."""
    rows: list[Row] = []
    points: list[tuple[float | str, float]] = []
    for ratio in RATIOS:
        value = round(interleaved(ratio), 4)
        points.append((ratio, value))
        rows.append(Row(name=f"communication {ratio:g} of computation", value=value))
    return Found(rows=rows, series=[Series(name="fixed over searched", points=points)])


def cuts() -> Found:
    """Section 3: what tensor-parallel ranks send for a micro-batch by the cuts that Domino takes, and by
    those that it avoids: columns of X, or rows of B, into N give N x N partial results of the whole size."""
    case = Case("GPT-3 6.7B", 8, 1024, 32)
    rows: list[Row] = []
    for name, batch, columns in (
        ("no cut", 1, 1),
        ("rows of X into 2", 2, 1),
        ("columns of B into 2", 1, 2),
        ("both", 2, 2),
    ):
        asked = case.asked + settings(
            strategy__overlap="domino", strategy__slices__batch=batch, strategy__slices__columns=columns
        )
        planner = planning(PAPER, asked).planner
        sent = estimate(planner.draft(planner.job), gpu=True).places[0].sent["tp"]
        where = command(PAPER, asked, "--evaluate")
        rows.append(Row(name=name, value=round(sent / 2**30, 2), command=where))
        if name == "no cut":
            whole = sent / 2**30
    rows += [
        Row(name=f"columns of X, or rows of B, into {parts}", value=round(whole * parts**2, 2),
            note=f"{parts} x {parts} times that of no cut") for parts in (2, 4)
    ]  # fmt: skip
    return Found(rows=rows)


def on_lab(*, again: bool) -> Found:
    """Two hosts of one rank behind links at which communication is a share of the synchronous step."""
    found = lab.measured("domino", again=again)
    points: dict[str, list[tuple[float | str, float]]] = {"Megatron-LM (async)": [], "Domino": [], "optimum": []}
    for one in found["points"]:
        for name, which in zip(points, ("async", "domino", "none"), strict=True):
            points[name].append((round(one["comm_share"], 3), round(one["against"][which]["sync"], 3)))
    first = found["points"][0]
    against = first["against"]
    values = {
        "Domino over sync": against["domino"]["sync"], "async over sync": against["async"]["sync"],
        "of the optimum": against["domino"]["none"], "hidden by rows": against["domino"]["hidden"],
        "hidden by columns": against["column"]["hidden"],
    }  # fmt: skip
    whole = lab.measured("whole step", again=again)["points"][0]["against"]["domino"]
    steps = {
        "a whole step (data, clipping, AdamW): Domino over sync": whole["sync"],
        "a whole step: of the optimum": whole["none"],
    }
    return Found(
        rows=[*_rows("domino", values), *_rows("whole step", steps)],
        series=[Series(name=name, points=own) for name, own in points.items()],
        facts={"share": f"{first['comm_share']:.0%}", "machine": found["machine"]},
    )


def _rows(name: str, values: Mapping[str, float]) -> list[Row]:
    """What a benchmark of an emulated cluster has found, with the spread over its rounds."""
    first = lab.measured(name, again=False)["points"][0]
    low, high = first["spread"]["domino"]
    note = f"{first['rounds']} rounds, Domino {low:.2f} to {high:.2f} s"
    return [Row(name=row, value=round(value, 3), command=lab.shown(name), note=note) for row, value in values.items()]


EMULATED: dict[str, Callable[..., Found]] = {"emulated": on_lab}
FIGURES: dict[str, Callable[[], Found]] = {
    "one-node": one_node, "several-nodes": several, "of-optimum": of_optimum, "async": asynchronous,
    "faster-network": faster_network, "shares": shares, "cuda-graphs": graphs, "order": order, "cuts": cuts,
    "curves": curves,
}  # fmt: skip
