"""The parts of a step in closed form: what each is made of, from a layer, from owners and from a pipeline."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from plait.core.cluster.hardware import Cluster
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, SHARD_OVERLAPS, Points
from plait.core.step.columns.shapes import Shapes
from plait.core.step.seconds import rates
from plait.core.step.seconds.closed_form import Options, Seconds, step_seconds
from plait.core.step.seconds.layer_time import Layer
from plait.core.step.seconds.micro_batch import MicroBatchSeconds
from plait.core.step.seconds.owners import Owners
from plait.core.step.seconds.pipeline_time import Pipeline, Stages, pipeline
from tests.plan.layers import A100, BF16, LLAMA, MIXTRAL, SEQUENCE, same, sent
from tests.plan.machines import cluster

SHAPES = Shapes.of(LLAMA)
JITTER = A100.model_copy(update={
    "efficiency": A100.efficiency.model_copy(update={
        "jitter": A100.efficiency.jitter.model_copy(update={"value": 0.01}),
        "step": A100.efficiency.step.model_copy(update={"value": 0.25}),
    }),
})  # fmt: skip
FULL = {"recompute": RECOMPUTES.index("full")}
ZB_V = {"schedule": SCHEDULES.index("zb-v"), "virtual": 2}


class Found:
    """A step of a row, and what it is made of."""

    def __init__(
        self, row: dict[str, int], model: Shapes = SHAPES, options: Options | None = None, on: Cluster = JITTER
    ) -> None:
        self.row, self.model, self.on, self.options = {"num_micro": 8, **row}, model, on, options or Options()
        points = Points.of([self.row])
        self.seconds: Seconds = step_seconds(model, points, on, sequence=SEQUENCE, options=self.options)
        self.batch = self.batch_of(self.row)
        self.owned = Owners.of(model, points, on, self.options)

    def batch_of(self, row: dict[str, int]) -> MicroBatchSeconds:
        """One micro-batch of a row."""
        return MicroBatchSeconds.of(Layer(self.model, Points.of([row]), self.on, SEQUENCE, BF16, self.options))

    @property
    def schedule(self) -> str:
        return SCHEDULES[self.row.get("schedule", 0)]

    @property
    def chunks(self) -> int:
        return self.row.get("virtual", 1)

    def layers(self, share: float = 1.0) -> Any:
        """Seconds of one layer, of which a share computes again, but for its host."""
        batch = self.batch
        return batch.forward + batch.backward + batch.sent + share * (batch.again + batch.sent_again)

    @property
    def counts(self) -> tuple[Any, Any, Any]:
        """Layers of a first, an inner and a last place."""
        return self.owned.first, self.owned.inner, self.owned.last

    @property
    def ends(self) -> tuple[Any, Any, Any]:
        """Seconds of a first, an inner and a last place beside their layers: every stage but that of the head
        hands on what it computed; a first place of zb-v has both ends."""
        batch, chunks = self.batch, self.chunks
        first, last = batch.embedding + chunks * batch.leave, batch.head + (chunks - 1) * batch.leave
        if self.schedule == "zb-v":
            first, last = first + batch.head - batch.leave, chunks * batch.leave
        return first, chunks * batch.leave, last

    def lead_backward(self, share: float) -> float:
        """What one layer's backward waits for its host, of which a share computes again: the others, as if no
        layer did."""
        none = float(self.batch_of({**self.row, "recompute": 0}).lead_backward[0])
        return none + share * float(self.batch.lead_again[0])

    def lists(self, layers: float, share: float) -> dict[str, tuple[float, float]]:
        """What the host is late after the list of each phase of a stage of so many layers, and what the list
        waits for it: as one layer, and for each layer more what is missing anew."""
        batch = self.batch
        weights = float(batch.late_weights[0]) if self.schedule.startswith("zb") else 0.0
        each = {
            "F": (float(batch.late_forward[0]), float(batch.lead_forward[0])),
            "B": (float((batch.late_backward + share * batch.late_again)[0]) - weights, self.lead_backward(share)),
            "W": (weights, float(batch.lead_weights[0]) if self.schedule.startswith("zb") else 0.0),
        }
        return {
            phase: (layers * net, lead * min(1.0, layers) + max(0.0, layers - 1) * max(0.0, net))
            for phase, (net, lead) in each.items()
        }

    def waits(self, share: float = 1.0) -> list[float]:
        """What a first, an inner and a last place wait for the host in a micro-batch. It begins every list of
        every stage anew, for which an embedding and a head's backward give it time; one rank's both
        directions are a list."""
        head, backward = float(self.batch.head[0]), float(self.batch.head_backward[0])
        late_weights, looked_up = float(self.batch.head_weights[0]), float(self.batch.embedding_forward[0])
        found = list[float]()
        for place, count in enumerate(self.counts):
            lists = self.lists(float(count[0]) / self.chunks, share)
            if all(self.row.get(axis, 1) == 1 for axis in ("pp", "dp", "cp")):
                (ahead, most), (_, behind) = lists["F"], lists["B"]
                found.append(max(most, ahead - head + behind))
                continue
            late = self.chunks * sum(most for _, most in lists.values())
            if place == (0 if self.schedule == "zb-v" else 2):
                split = self.schedule.startswith("zb")
                gives = {"B": backward / 2, "W": late_weights} if split else {"B": backward / 2 + late_weights}
                late -= sum(min(lists[phase][1], seconds) for phase, seconds in gives.items())
            if place == 0 or (place == 2 and self.row.get("pp", 1) == 1):
                late -= min(lists["F"][1], looked_up)
            found.append(late)
        return found

    def places(self, share: float = 1.0) -> tuple[Any, Any, Any]:
        """Seconds of a first, an inner and a last place."""
        each = zip(self.counts, self.ends, self.waits(share), strict=True)
        first, inner, last = (count * self.layers(share) + end + wait for count, end, wait in each)
        return first, inner, last

    def slowest(self, share: float = 1.0) -> int:
        """Number of the slowest of them."""
        return int(np.argmax([float(place[0]) for place in self.places(share)]))


@pytest.mark.parametrize(
    ("again", "share"), [({}, 1), ({"recompute_layers": 3}, 3 / 8), ({"recompute_layers": 9}, 1),
                         ({"recompute_layers": 0}, 0), ({"recompute_layers": 2, "virtual": 2}, 2 / 4)],
)  # fmt: skip
def test_every_layer_of_the_slowest_place_counts_once_a_micro_batch(again: dict[str, int], share: float) -> None:
    """Of an inner place of four, which has eight layers and the others seven, behind a small vocabulary."""
    small = replace(SHAPES, vocab=8, num_layers=30)
    row = {"pp": 4, "tp": 2, "dp": 4, "cp": 2, "ring": 2, "optim": 8, "params": 4, "grads": 4, **FULL, **again}
    if "virtual" in again:
        row["schedule"] = SCHEDULES.index("interleaved")
    one = Found(row, small)
    found, batch, times = one.seconds, one.batch, 8 * 8
    linear = batch.three + share * batch.linear_again
    attention = batch.attention_forward + batch.attention_backward + share * batch.attention_again
    busy = batch.forward + batch.backward + share * batch.again
    same(found.linear, times * linear)
    same(found.attention, times * attention)
    same(found.elementwise, times * (busy - linear - attention))
    assert one.slowest(share) == 1
    same(found.host, 8 * one.waits(share)[1])
    same(found.tp, times * (batch.tp + share * batch.tp_again))
    same(found.cp, times * (batch.cp + share * batch.cp_again))
    same(found.sharding, times * batch.sharding)
    assert float(found.head[0]) == pytest.approx(8 * float(one.ends[1][0]), rel=1e-9)


def test_both_directions_of_experts_and_what_is_repeated() -> None:
    """Of a whole model: embedding and head are at its one place."""
    told = Options(recompute_collectives=True)
    one = Found({"dp": 8, "ep": 8, **FULL}, Shapes.of(MIXTRAL), told)
    same(one.seconds.ep, 8 * 32 * (2 * one.batch.ep + one.batch.ep_again))
    same(one.seconds.head, 8 * (one.batch.head + one.batch.embedding))
    assert one.seconds.bubble[0] == one.seconds.transfers[0] == 0


@pytest.mark.parametrize("zb_v", [False, True])
def test_embedding_and_head_are_at_the_ends(zb_v: bool) -> None:
    """A first place of zb-v has both of them."""
    one = Found({"pp": 4, "dp": 2, **(ZB_V if zb_v else {})})
    found, batch = one.seconds, one.batch
    run = piped(one)
    same(found.bubble, run.bubble)
    same(found.transfers, run.transfers)
    ended = batch.embedding + batch.head + batch.leave if zb_v else batch.head
    same(found.head, 8 * ended)  # at the slowest place


def handed_on(row: dict[str, int]) -> Any:
    """Seconds from one stage to the next. Within a node of eight every rank sends its own; between nodes a
    node gets each part once and shares it out, unless a rank's part is its own. Of several stages on a node
    some hand on to another node, unless all stages are on one."""
    tp, stride = row.get("tp", 1), row.get("tp", 1) * row.get("dp", 1) * row.get("cp", 1)
    tile = row.get("micro", 1) * SEQUENCE / row.get("cp", 1) * 4096 * 2
    around = SCHEDULES[row.get("schedule", 0)] == "interleaved"
    if row.get("sequence_parallel"):
        return hop(tile / tp, row["pp"], stride, round_trip=around)
    if stride < 8:
        return hop(tile, row["pp"], stride, round_trip=around)
    return hop(tile / tp, row["pp"], stride, round_trip=around) + sent("all_gather", tile, tp, 1)


def hop(nbytes: float, pp: int, stride: int, *, round_trip: bool) -> Any:
    """On average. round_trip: the last place hands on to the first one, too."""
    inside, across = sent("send", nbytes, 2, 1), sent("send", nbytes, 2, 8)
    nodes = [place * stride // 8 for place in range(pp)]
    pairs = list(pairwise([*nodes, nodes[0]] if round_trip else nodes))
    crossing = sum(one != other for one, other in pairs) / len(pairs)
    return (1 - crossing) * inside + crossing * across


def piped(one: Found) -> Pipeline:
    """Of the directions of an inner stage, each with its host."""
    batch, told, (first, inner, last) = one.batch, one.options, one.places()
    layers = float(one.owned.inner[0]) / one.chunks
    late = {phase: most for phase, (_, most) in one.lists(layers, 1.0).items()}
    whole = layers * one.layers() + sum(late.values())
    weights = layers * batch.weight_gradients + late["W"]
    ahead = layers * (batch.ahead + batch.shard_forward) + late["F"]
    return pipeline(
        Stages(first=first, inner=inner, last=last, forward=ahead / whole, weight_gradient=weights / whole,
               head_weight=batch.head_weights / batch.head),
        Points.of([one.row]), transfer=handed_on(one.row),
        hidden=told.transfers_hidden or (told.rounds_hide_transfers and one.schedule in ("interleaved", "zb-v")),
        steps_overlap=told.steps_overlap,
    )  # fmt: skip


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"dp": 1}, {"dp": 2, "sequence_parallel": 1}], ids=str)
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h2", "zb-v"])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("steps_overlap", [False, True])
def test_a_pipeline_is_asked_with_what_options_say(
    name: str, hidden: bool, rounds: bool, steps_overlap: bool, degrees: dict[str, int]
) -> None:
    told = Options(transfers_hidden=hidden, rounds_hide_transfers=rounds, steps_overlap=steps_overlap)
    row = {"pp": 4, **degrees, "tp": 2, "cp": 2, "micro": 2, "schedule": SCHEDULES.index(name)}
    row["virtual"] = 2 if name in ("interleaved", "zb-v") else 1
    one = Found(row, options=told)
    run = piped(one)
    same(one.seconds.bubble, run.bubble)
    same(one.seconds.transfers, run.transfers)


def test_processors_that_others_share_are_waited_for_less() -> None:
    """Where ranks that all compute take 1.2 times as long as one alone."""
    crowded = JITTER.model_copy(update={"crowd": 1.2})
    row = {"pp": 4, "dp": 2}
    one, other = Found(row, on=crowded), Found(row)
    run = piped(one)
    same(one.seconds.bubble, max(0.0, float(((run.work + run.bubble) / 1.2 - run.work)[0])))
    assert one.seconds.bubble[0] < other.seconds.bubble[0]
    same(Found({"dp": 2}, on=crowded).seconds.bubble, 0.0)


def exposed(busy: float, other: float, communicated: float) -> float:
    """What sending adds to computation, beside what sharding sends there."""
    return float(rates.together(JITTER, busy, other + communicated) - rates.together(JITTER, busy, other))


def average(one: Found) -> float:
    """Parameters of an average place, to those of the place that has most: the first, or an inner one."""
    model, pp = one.model, one.row["pp"]
    of_layer, words = float(model.layer_weights), float(model.words)
    most = float(one.owned.first[0]) * of_layer + words
    if pp > 2:
        most = max(most, float(one.owned.inner[0]) * of_layer)
    return (model.num_layers * of_layer + 2 * words) / pp / most


def met(one: Found) -> float:
    """Seconds that a layer's backward waits for tensor parallelism, if replicas are on the same node."""
    tp, replicas = one.row.get("tp", 1), one.row["dp"]
    return float((one.batch.back - one.batch.backward)[0]) if tp > 1 and tp * replicas <= 8 else 0.0


def rounds(one: Found) -> float:
    """Layers of a place that compute beside its sums: all stages but the last of a place end earlier, by one
    round of micro-batches each."""
    stages = one.chunks if one.schedule == "interleaved" else 1
    return float(one.owned.inner[0]) * (1 + min(one.row["pp"], 8) * (stages - 1)) / stages


def gathered(one: Found, sent: float) -> float:
    """What a layer's backward waits for its gathers and sums of so many seconds: all of what does not fit; or
    an MLP for its gather, behind the sum of the MLP before, behind that MLP itself."""
    batch, model = one.batch, one.model
    back, core = float(batch.back[0]), float(batch.attention_backward[0])
    mlp = (3 if model.gated else 2) * model.hidden * model.ffn_hidden / float(model.layer_weights)
    return max(back + exposed(back, 0.0, sent), mlp * (back - core + sent)) - back


def gradients(one: Found, *, hidden: bool) -> float:
    """Of gradients what a step waits for. A place's sums are in its last backward, and lengthen it: where
    nothing hides them, by all of them; else by what does not fit, and by what they slow down. The places
    before wait for that, too, unless they send on their gradients first; the host has time meanwhile."""
    batch, count, others = one.batch, float(one.owned.inner[0]), one.row["pp"] - 1
    lists, split, down = bool(one.options.in_lists), one.schedule.startswith("zb"), float(one.owned.down[0])
    late = max(0.0, float((batch.late_weights if split and lists else batch.late_backward)[0]))
    if not hidden:
        own, every = max(0.0, down - count * late), one.row["pp"] * max(0.0, down * average(one) - count * late)
        return max(own, every) if lists and not split else own
    each = late + float((batch.weight_gradients if split and lists else batch.back)[0])
    shared = lists and one.row.get("params", 1) > 1
    beside, reduced = count if shared else rounds(one), float(batch.reduced[0])
    more = exposed(beside * each, beside * reduced, down)
    if shared:
        more = count * max(0.0, gathered(one, reduced + down / count) - gathered(one, reduced) - late)
    if split or not lists:
        return more
    own, last = (met(one) / each * min(down, layers * each) for layers in (beside, count))
    slower = min(more, count * each * (JITTER.efficiency.slow_computation.value - 1))
    waits = (more * average(one) if shared else slower) + last - count * late
    return more + own + others * max(0.0, waits)


def parameters(one: Found, *, hidden: bool) -> float:
    """Of new parameters: layers of sharded ones wait for all that was sent before."""
    batch, count, up = one.batch, rounds(one), float(one.owned.up[0])
    if not hidden or (one.options.in_lists and one.row.get("params", 1) > 1):
        return up
    busy = count * float(batch.ahead[0] + max(0.0, float(batch.late_forward[0])))
    return exposed(busy, count * float(batch.gathered[0]), up)


@pytest.mark.parametrize("hides", SHARD_OVERLAPS)
@pytest.mark.parametrize("params", [1, 2])
@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("row", [
    {"pp": 2, "dp": 8}, {"pp": 4, "dp": 4, "tp": 2}, {"pp": 6, "dp": 8, "tp": 2},
    {"pp": 4, "dp": 4, "schedule": SCHEDULES.index("zb-h1")},
    {"pp": 4, "dp": 4, "tp": 2, "schedule": SCHEDULES.index("interleaved"), "virtual": 2},
], ids=str)  # fmt: skip
def test_half_of_what_a_steps_end_sends_hides_behind_a_backward_half_behind_a_forward(
    hides: str, params: int, lists: bool, row: dict[str, int]
) -> None:
    """Beside what sharding sends for the same micro-batch; the sum of tied weights hides behind nothing."""
    row = {
        **row,
        "params": params,
        "grads": params if lists else 2,
        "optim": row["dp"],
        "shard_overlap": SHARD_OVERLAPS.index(hides),
    }
    one = Found(row, replace(SHAPES, tied_embeddings=1), Options(in_lists=lists))
    down = gradients(one, hidden=hides in ("backward", "both"))
    up = parameters(one, hidden=hides in ("forward", "both"))
    assert one.owned.ends[0] > 0
    assert float(one.seconds.sync[0]) == pytest.approx(down + up + float(one.owned.ends[0]), rel=1e-9)


def test_the_slowest_node_is_late_by_its_share_of_all_that_is_not_fixed() -> None:
    one = Found({"pp": 2, "dp": 16, "optim": 16})
    found = one.seconds
    run = piped(one)
    spent = run.work + run.bubble + run.transfers + found.sync + found.optimizer
    same(found.straggler, spent * one.owned.late * 0.01)
    same(found.fixed, 0.25)
    same(found.optimizer, one.owned.optimizer)
    same(found.total, spent + found.straggler + 0.25)
    assert one.owned.late[0] > 0


SLOW = cluster(host_layer=1.0, host_collective=0.5)
"""A host that is late whatever runs."""


@pytest.mark.parametrize(
    ("row", "passes", "calls"),
    [
        ({}, (1, 1), 0), ({"p1": 2, "micro": 2}, (2, 2), 0), ({"tp": 2}, (1, 1), 4),
        (FULL, (1, 1 + 7 / 9), 0), ({**FULL, "recompute_layers": 8}, (1, 1 + 7 / 9 / 4), 0),
        ({"graphs": 1}, (0, 0), 0),
    ],
    ids=str,
)  # fmt: skip
def test_a_late_host_is_what_a_micro_batch_lacks_of_its_launches(
    row: dict[str, int], passes: tuple[float, float], calls: int
) -> None:
    """Of 32 layers, eight times: launches of each, less what runs anyway. Recomputed is a part of them."""
    one = Found({**row, "overlap": OVERLAPS.index("sync")}, on=SLOW)
    share = row.get("recompute_layers", 32) / 32
    runs = one.batch.forward + one.batch.backward + one.batch.sent + share * (one.batch.again + one.batch.sent_again)
    told = sum(passes) + 0.5 * calls
    lacks = 8 * 32 * float((told - runs)[0]) if told else 0.0
    assert float(one.seconds.host[0]) == pytest.approx(lacks, rel=2e-3)  # what is at the ends may run meanwhile
    same(one.seconds.total, sum(getattr(one.seconds, part.name) for part in fields(Seconds)))
    quick = Found({**row, "overlap": OVERLAPS.index("sync")}, on=cluster(host_layer=0.0, host_collective=0.0))
    same(quick.seconds.host, 0.0)
    same(quick.seconds.linear, one.seconds.linear)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_later_host_never_makes_a_step_shorter(schedule: str) -> None:
    row = {"pp": 4, "dp": 2, "tp": 2, "schedule": SCHEDULES.index(schedule)}
    found = [
        float(Found(row, on=cluster(host_layer=each, host_collective=each / 5)).seconds.total[0])
        for each in (0.0, 1e-5, 1e-3, 3e-3, 1e-2, 1e-1)
    ]
    assert found == sorted(found) and found[0] < found[-1]
    graphs = Found({**row, "graphs": 1}, on=cluster(host_layer=1e-1, host_collective=0.0)).seconds.total[0]
    assert float(graphs) == pytest.approx(found[0])
