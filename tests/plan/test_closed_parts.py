"""The parts of a step in closed form: what each is made of, from a layer, from owners and from a pipeline."""

from __future__ import annotations

from dataclasses import fields, replace
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
        self.row, points, options = {"num_micro": 8, **row}, Points.of([{"num_micro": 8, **row}]), options or Options()
        self.seconds: Seconds = step_seconds(model, points, on, sequence=SEQUENCE, options=options)
        self.batch = MicroBatchSeconds.of(Layer(model, points, on, SEQUENCE, BF16, options))
        self.owned = Owners.of(model, points, on, options)

    def late(self, share: float = 1.0) -> Any:
        """What a layer waits for its host, in either direction."""
        batch = self.batch
        return np.maximum(0, batch.late_forward) + np.maximum(0, batch.late_backward + share * batch.late_again)

    def layers(self, share: float = 1.0) -> Any:
        """Seconds of one layer, of which a share computes again."""
        batch = self.batch
        own = batch.forward + batch.backward + batch.sent + share * (batch.again + batch.sent_again)
        return own + self.late(share)

    @property
    def counts(self) -> tuple[Any, Any, Any]:
        """Layers of a first, an inner and a last place."""
        return self.owned.first, self.owned.inner, self.owned.last

    def places(self, share: float = 1.0) -> tuple[Any, Any, Any]:
        """Seconds of a first, an inner and a last place: every stage but that of the head hands on what it
        computed; a first place of zb-v has both ends."""
        batch, each, counts = self.batch, self.layers(share), self.counts
        chunks, turns = self.row.get("virtual", 1), self.row.get("schedule") == ZB_V["schedule"]
        first, last = batch.embedding + chunks * batch.leave, batch.head + (chunks - 1) * batch.leave
        if turns:
            first, last = first + batch.head - batch.leave, chunks * batch.leave
        return counts[0] * each + first, counts[1] * each + chunks * batch.leave, counts[2] * each + last


@pytest.mark.parametrize(
    ("again", "share"), [({}, 1), ({"recompute_layers": 3}, 3 / 8), ({"recompute_layers": 9}, 1),
                         ({"recompute_layers": 0}, 0), ({"recompute_layers": 2, "virtual": 2}, 2 / 4)],
)  # fmt: skip
def test_every_layer_of_the_slowest_place_counts_once_a_micro_batch(again: dict[str, int], share: float) -> None:
    """Of an inner place of four, behind a small vocabulary."""
    small = replace(SHAPES, vocab=8)
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
    same(found.host, 0.0)
    same(found.tp, times * (batch.tp + share * batch.tp_again))
    same(found.cp, times * (batch.cp + share * batch.cp_again))
    same(found.sharding, times * batch.sharding)
    ends = [
        float((at - layers * one.layers(share))[0]) for at, layers in zip(one.places(share), one.counts, strict=True)
    ]
    assert float(found.head[0]) == pytest.approx(8 * max(ends), rel=1e-9)


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
    node gets each part once and shares it out, unless a rank's part is its own."""
    tp, stride = row.get("tp", 1), row.get("tp", 1) * row.get("dp", 1) * row.get("cp", 1)
    tile = row.get("micro", 1) * SEQUENCE / row.get("cp", 1) * 4096 * 2
    if row.get("sequence_parallel"):
        return sent("send", tile / tp, row["pp"], stride)
    if stride < 8:
        return sent("send", tile, row["pp"], stride)
    return sent("send", tile / tp, row["pp"], stride) + sent("all_gather", tile, tp, 1)


def piped(one: Found, options: Options | None = None) -> Pipeline:
    row, batch, each, options = one.row, one.batch, one.layers(), options or Options()
    first, inner, last = one.places()
    ahead = batch.forward + np.maximum(0, batch.late_forward)
    return pipeline(
        Stages(first=first, inner=inner, last=last, forward=ahead / each,
               weight_gradient=(batch.three - batch.linear) / 2 / each, first_chunk=one.owned.first_chunk),
        Points.of([row]), transfer=handed_on(row), hidden=options.transfers_hidden,
        steps_overlap=options.steps_overlap,
    )  # fmt: skip


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"dp": 1}, {"dp": 2, "sequence_parallel": 1}], ids=str)
@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v"])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("steps_overlap", [False, True])
def test_a_pipeline_is_asked_with_what_options_say(
    name: str, hidden: bool, steps_overlap: bool, degrees: dict[str, int]
) -> None:
    told = Options(transfers_hidden=hidden, steps_overlap=steps_overlap)
    row = {"pp": 4, **degrees, "tp": 2, "cp": 2, "micro": 2, "schedule": SCHEDULES.index(name)}
    row["virtual"] = 2 if name == "zb-v" else 1
    one = Found(row, options=told)
    run = piped(one, told)
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


@pytest.mark.parametrize("hides", SHARD_OVERLAPS)
@pytest.mark.parametrize("params", [1, 2])
def test_half_of_what_a_steps_end_sends_hides_behind_a_backward_half_behind_a_forward(hides: str, params: int) -> None:
    """Beside what sharding sends for the same micro-batch; the sum of tied weights hides behind nothing."""
    row = {"pp": 2, "dp": 8, "params": params, "grads": 2, "optim": 8, "shard_overlap": SHARD_OVERLAPS.index(hides)}
    one = Found(row, replace(SHAPES, tied_embeddings=1))
    owned, batch = one.owned, one.batch

    def exposed(busy: Any, other: Any, communicated: Any) -> Any:
        return rates.together(JITTER, busy, other + communicated) - rates.together(JITTER, busy, other)

    down, up = owned.down, owned.up
    if hides in ("backward", "both"):
        down = exposed(16 * batch.backward, 16 * batch.reduced, down)
    if hides in ("forward", "both"):
        up = exposed(16 * batch.forward, 16 * batch.gathered, up)
    assert owned.ends[0] > 0
    same(one.seconds.sync, down + up + owned.ends)


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
