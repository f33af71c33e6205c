"""Domino's figures by the planner: a step of tensor parallelism alone on H100, with every collective awaited
(Megatron-LM sync), with Megatron-LM's overlap in the backward (async), by Domino's slices, and with none.

The paper searches the slices by a grid, so the fastest of ``SLICES`` counts. It prints no batch sizes for
one node and 4 to 64 for several: those of ``BATCHES`` that fit are taken. Its table of models is not at
hand: where heads do not divide by the ranks (13B on 16 and 32, 30B) the model has 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from benchmarks.papers import lab
from benchmarks.papers.domino_curves import curves
from benchmarks.papers.found import Found, Row, Series, spread
from benchmarks.papers.planned import Settings, command, planning, predict, settings
from benchmarks.papers.verdicts import NOISE
from plait.core.step.memory.estimate import estimate
from plait.plan.search.candidate import Candidate

PAPER = "domino"
BATCHES, SEQUENCES = (4, 8, 16, 32, 64), (512, 1024)
SLICES = ((2, 1), (4, 1), (1, 2), (2, 2))
"""(of the batch, of columns): rows alone, columns alone, both."""
GPT = {"GPT-3 2.7B": "gpt3-2.7b", "GPT-3 6.7B": "gpt3-6.7b", "GPT-3 13B": "gpt3-13b", "GPT-3 30B": "gpt3-30b"}
LLAMA = {"Llama-2 7B": "llama2-7b", "Llama-2 13B": "llama2-13b"}
MODELS = GPT | LLAMA
ODD = {"GPT-3 13B", "GPT-3 30B", "Llama-2 13B"}
"""Their heads do not divide by 16 or 32."""
SLOWEST = settings(cluster__file="benchmarks/papers/jobs/h100-slowest.toml")
"""Collectives over both tiers of links take what the slower does (ADR 74)."""


@dataclass(frozen=True)
class Case:
    """One setting of the paper's. replicas: of the tp ranks; cluster: in place of the job's."""

    model: str
    gpus: int
    sequence: int
    batch: int
    changes: Settings = ()
    replicas: int = 1
    cluster: Settings = ()

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
        ) + self.cluster  # fmt: skip

    def predicted(self, overlap: str) -> Candidate | None:
        """With that overlap, and no slices."""
        return predict(PAPER, self.asked + settings(strategy__overlap=overlap), self.changes)

    @cached_property
    def fixed(self) -> tuple[Settings, Candidate] | None:
        """The fastest slices that fit, in the paper's order."""
        return self._sliced("fixed")

    @cached_property
    def searched(self) -> tuple[Settings, Candidate] | None:
        """The fastest slices that fit, in Plait's order."""
        return self._sliced("domino")

    def _sliced(self, overlap: str) -> tuple[Settings, Candidate] | None:
        asked = [
            self.asked + settings(strategy__overlap=overlap, strategy__slices__batch=batch,
                                  strategy__slices__columns=columns)
            for batch, columns in SLICES if batch <= self.batch
        ]  # fmt: skip
        fitting = [(each, one) for each in asked if (one := predict(PAPER, each, self.changes))]
        return min(fitting, key=lambda each: each[1].seconds, default=None)

    @cached_property
    def seconds(self) -> dict[str, float] | None:
        """Of a step: sync, async, none, and slices in both orders. None where one does not fit."""
        plain = {name: self.predicted(name) for name in ("sync", "async", "no-communication")}
        if not self.fixed or not self.searched or not all(plain.values()):
            return None
        return {name: one.seconds for name, one in plain.items() if one} | {
            "fixed": self.fixed[1].seconds, "searched": self.searched[1].seconds}  # fmt: skip

    @property
    def gain(self) -> float:
        """Of the paper's order over sync."""
        return self.ratio("sync", "fixed")

    @property
    def own_gain(self) -> float:
        """Of Plait's order over sync."""
        return self.ratio("sync", "searched")

    def unfused(self, overlap: str) -> Candidate | None:
        """With that overlap, attending as Megatron-LM does by default: in several kernels, with dropout."""
        asked = self.asked + settings(strategy__overlap=overlap, model__attention_dropout=0.1)
        return predict(PAPER, asked, self.changes)

    @property
    def of_unfused(self) -> float | None:
        """The share of an optimum that attends unfused; None where that does not fit."""
        one = self.unfused("no-communication")
        return one.seconds / self.seconds["fixed"] if one and self.seconds else None

    @property
    def share(self) -> float:
        """Of the synchronous step that is communication."""
        return 1 - self.ratio("no-communication", "sync")

    def ratio(self, slower: str, faster: str) -> float:
        """How many times as long the first takes."""
        assert self.seconds
        return self.seconds[slower] / self.seconds[faster]

    @property
    def shown(self) -> str:
        """The command of the step in the paper's order."""
        assert self.fixed
        flags = [word for change in self.changes for word in ("--what-if", change)]
        return command(PAPER, self.fixed[0], "--evaluate", *flags)


def cases(models: Sequence[str], gpus: int) -> Iterator[list[Case]]:
    """Of each model and length the batches that fit, the smallest first."""
    for model in models:
        for sequence in SEQUENCES:
            if own := [one for batch in BATCHES if (one := Case(model, gpus, sequence, batch)).seconds]:
                yield own


def fullest(models: Sequence[str], gpus: int) -> list[Case]:
    """Of each model and length the batch with the most tokens a second, as the paper takes for several
    nodes."""
    return [_fastest(own) for own in cases(models, gpus)]


def _fastest(own: Sequence[Case]) -> Case:
    """The batch with the most tokens a second."""

    def rate(one: Case) -> float:
        assert one.seconds
        return one.batch / one.seconds["fixed"]

    return max(own, key=rate)


ONE_NODE, SEVERAL = ("GPT-3 2.7B", "GPT-3 6.7B", "GPT-3 13B"), ("GPT-3 6.7B", "GPT-3 13B", "GPT-3 30B")


def _gains(name: str, own: Sequence[Case]) -> Row:
    """The least and the most gain in the paper's order, and in Plait's."""
    return Row(name=name, value=spread([one.gain for one in own]), reading=spread([one.own_gain for one in own]),
               command=own[-1].shown, note=f"by a reading: Plait's order; {_at(own)}")  # fmt: skip


def _of(model: str, own: Sequence[Case]) -> list[Case]:
    return [one for one in own if one.model == model]


def _most(model: str, own: Sequence[Case]) -> float:
    return max(one.gain for one in _of(model, own))


def _at(own: Sequence[Case]) -> str:
    return "batches " + ", ".join(str(one) for one in sorted({case.batch for case in own}))


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
    rows = [Row(name=f"{name}, 1 to 4 nodes", command=_sync(own[-1]), note=_at(own), over=[
                spread([one.share for one in own if one.batch == batch]) for batch in BATCHES
            ]) for name, own in (("GPT-3 13B", _of("GPT-3 13B", every)), ("GPT-3 and Llama-2", every))]  # fmt: skip
    series = [
        Series(name=model, points=[(one.gpus, round(one.share, 4)) for one in _of(model, best) if one.sequence == 1024])
        for model in MODELS
    ]
    return Found(rows=rows, series=series, facts={"share": round(max(one.share for one in best), 3)})


def _sync(one: Case) -> str:
    return command(PAPER, one.asked + settings(strategy__overlap="sync"), "--evaluate")


def one_node() -> Found:
    """Figures 9 and 12, one node: gains at the largest batch that fits, and over all batches."""
    models = [*ONE_NODE, *LLAMA]
    curves = list(cases(models, 8))
    tops = [own[-1] for own in curves]
    rows = [_gains("five models, largest batch", tops)]
    for model in models:
        own = _of(model, tops)
        rows.append(Row(name=f"{model}, largest batch", value=round(_most(model, tops), 4), command=own[-1].shown,
                        reading=round(max(one.own_gain for one in own), 4), note=_at(own)))  # fmt: skip
        every = [one for own in curves for one in _of(model, own)]
        rows.append(Row(name=f"{model}, all batches", over=[round(one.gain, 4) for one in every], note=_at(every)))
    gains = {model: _most(model, tops) for model in models}
    rows += [
        Row(name="grows with the batch",
            value=all(_grows([one.gain for one in own]) for own in curves),
            reading=all(_grows([one.own_gain for one in own]) for own in curves)),
        Row(name="GPT-3 6.7B gains most", value=gains["GPT-3 6.7B"] > NOISE + max(
            gains["GPT-3 2.7B"], gains["GPT-3 13B"])),
        Row(name="Llama-2 13B gains less than 7B", value=gains["Llama-2 13B"] + NOISE < gains["Llama-2 7B"]),
        Row(name="Llama-2 gains less than GPT-3", value=all(
            gains[f"Llama-2 {one}"] + NOISE < gains[f"GPT-3 {other}"]
            for one, other in (("7B", "6.7B"), ("13B", "13B")))),
    ]  # fmt: skip
    least = min(one.gain for own in curves for one in own)
    return Found(rows=rows, series=_curves(models, 8), facts={"least": round(least, 2), "small": min(BATCHES)})


def _grows(gains: Sequence[float]) -> bool:
    """More at the end than at the beginning, and nowhere less than before, by more than noise."""
    return gains[-1] > gains[0] + NOISE and all(b > a - NOISE for a, b in pairwise(gains))


def of_optimum() -> Found:
    """Figures 10 and 13: Domino's share of the throughput without communication."""
    curves = list(cases([*ONE_NODE, *LLAMA], 8))
    one, two, four = [_fastest(own) for own in curves], fullest(list(LLAMA), 16), fullest(list(LLAMA), 32)
    gpt, llama = ([case for case in one if case.model in models] for models in (GPT, LLAMA))
    slowest = [replace(case, cluster=SLOWEST) for case in four]

    def shares(own: Sequence[Case], order: str) -> list[float]:
        return spread([case.ratio("no-communication", order) for case in own])

    rows = [
        Row(name=name, value=shares(own, "fixed"), reading=shares(own, "searched"), note=_at(own),
            command=own[-1].shown)
        for name, own in (("GPT-3, one node", gpt), ("Llama-2, one node", llama), ("Llama-2, two nodes", two),
                          ("Llama-2, four nodes", four), ("Llama-2, four nodes, slowest tier", slowest))
    ]  # fmt: skip
    every = [case for own in curves for case in own if case.model in GPT]
    rows.append(Row(name="GPT-3, one node, all batches", note=_at(every),
                    over=[round(case.ratio("no-communication", "fixed"), 4) for case in every]))  # fmt: skip
    unfused = [share for case in gpt if (share := case.of_unfused)]
    rows.append(Row(name="GPT-3, one node, unfused", value=spread(unfused), note=_at(gpt)))
    low, high = shares(gpt, "fixed")
    return Found(rows=rows, facts={"low": f"{low:.0%}", "high": f"{high:.0%}"})


def several() -> Found:
    """Figures 11 and 12, several nodes."""
    two, four = (fullest([*SEVERAL, *LLAMA], gpus) for gpus in (16, 32))
    rows = [_gains(f"{model}, {nodes} nodes", _of(model, best))
            for nodes, best in (("two", two), ("four", four)) for model in (*SEVERAL, *LLAMA)]  # fmt: skip
    long = {one.model: one.gain for one in two if one.sequence == 1024 and one.model in GPT}
    rows += [
        _gains("five models, four nodes", four),
        Row(name="GPT-3 13B gains most on two nodes", value=long.pop("GPT-3 13B") > NOISE + max(
            long.values())),
        Row(name="less gain on four nodes than on two", value=all(
            _most(model, four) + NOISE < _most(model, two) for model in (*SEVERAL, *LLAMA))),
    ]  # fmt: skip
    return Found(rows=rows, facts={"two": round(min(one.gain for one in two), 2)})


def asynchronous() -> Found:
    """Section 5.2: Megatron-LM's overlap of the backward over none; by a reading with attention unfused."""
    curves = list(cases(list(ONE_NODE), 8))
    one, more = [_fastest(own) for own in curves], [*fullest(list(SEVERAL), 16), *fullest(list(SEVERAL), 32)]
    every = [case for own in curves for case in own]
    rows = [Row(name="GPT-3, one node, all batches", note=_at(every),
                over=[round(case.ratio("sync", "async"), 4) for case in every])]  # fmt: skip
    for name, own in (("GPT-3, one node", one), ("GPT-3, two and four nodes", more)):
        pairs = [(each.unfused("sync"), each.unfused("async")) for each in own]
        unfused = [sync.seconds / beside.seconds for sync, beside in pairs if sync and beside]
        rows.append(Row(name=name, value=spread([each.ratio("sync", "async") for each in own]), reading=spread(unfused),
                        command=command(PAPER, own[-1].asked + settings(strategy__overlap="async"), "--evaluate"),
                        note=_at(own)))  # fmt: skip
    return Found(rows=rows)


def faster_network() -> Found:
    """Section 5.3: 800 GB/s between four nodes, and 128 and 256 GPUs, which are replicas of 32 here."""
    fast = ("nic=2x",)
    slow = fullest(list(SEVERAL), 32)
    faster = [replace(one, changes=fast) for one in slow]
    wide = {changes: [Case("GPT-3 6.7B", 32, 1024, 32, changes, replicas) for replicas in (1, 4, 8)]
            for changes in ((), fast)}  # fmt: skip
    rows = [
        _gains("GPT-3 6.7B on 32 GPUs", wide[()][:1]),
        Row(name="the most at 800 GB/s", value=round(max(one.gain for one in faster), 4),
            reading=round(max(one.own_gain for one in faster), 4), command=faster[0].shown),
        Row(name="more at 800 than at 400 GB/s, six cases",
            value=all(b.gain > a.gain + NOISE for a, b in zip(slow, faster, strict=True)),
            reading=all(b.own_gain > a.own_gain + NOISE for a, b in zip(slow, faster, strict=True))),
    ]  # fmt: skip
    base, *more = wide[()]
    rows += [Row(name=f"more on {one.gpus * one.replicas} GPUs than on 32", value=one.gain > base.gain + NOISE,
                 reading=one.own_gain > base.own_gain + NOISE, command=one.shown) for one in more]  # fmt: skip
    series = [Series(name=f"{name}, {order}", points=[
                  (one.gpus * one.replicas, round(getattr(one, of), 4)) for one in wide[changes]])
              for name, changes in (("400 GB/s", ()), ("800 GB/s", fast))
              for order, of in (("the paper's order", "gain"), ("Plait's", "own_gain"))]  # fmt: skip
    return Found(rows=rows, series=series)


def graphs() -> Found:
    """Section 5.2: CUDA graphs, GPT-3 13B of 512 tokens on one node."""
    rows: list[Row] = []
    for batch in (4, 16):
        one = Case("GPT-3 13B", 8, 512, batch)
        assert one.fixed
        asked = one.fixed[0] + settings(strategy__cuda_graphs="true")
        graphed = predict(PAPER, asked)
        value = round(graphed.seconds / one.fixed[1].seconds - 1, 4) if graphed else None
        rows.append(Row(name=f"micro-batch of {batch}", value=value, command=command(PAPER, asked, "--evaluate")))
    return Found(rows=rows)


def cuts() -> Found:
    """Section 3: what tensor-parallel ranks send for a micro-batch by the cuts that Domino takes, and by
    those that it avoids: columns of X, or rows of B, into N give N x N partial results of the whole size."""
    case = Case("GPT-3 6.7B", 8, 1024, 32)
    rows: list[Row] = []
    whole = 0.0
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
        whole = sent if name == "no cut" else whole
        rows.append(Row(name=name, value=round(sent / whole, 4), command=where, note=f"{sent / 2**30:.1f} GiB"))
    rows += [Row(name=f"columns of X, or rows of B, into {parts}", value=float(parts**2), note="the paper's own count")
             for parts in (2, 4)]  # fmt: skip
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
        "a whole step: Domino over sync": whole["sync"],
        "a whole step: of the optimum": whole["none"],
    }
    return Found(
        rows=[*_rows("domino", values), *_rows("whole step", steps)],
        series=[Series(name=name, points=own) for name, own in points.items()],
        facts={"emulated": f"{first['comm_share']:.0%}", "measured": lab.dates("domino", "whole step")},
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
    "faster-network": faster_network, "shares": shares, "cuda-graphs": graphs, "cuts": cuts,
    "curves": curves,
}  # fmt: skip
