"""The parts of a step in closed form: what each is made of, from a layer, from owners and from a pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.cluster.hardware import Cluster
from plait.core.step.columns.points import RECOMPUTES, SCHEDULES, SHARD_OVERLAPS, Points
from plait.core.step.columns.shapes import Shapes
from plait.core.step.seconds import rates
from plait.core.step.seconds.closed_form import Options, Seconds, step_seconds
from plait.core.step.seconds.layer_time import Layer
from plait.core.step.seconds.micro_batch import MicroBatchSeconds
from plait.core.step.seconds.owners import Owners
from plait.core.step.seconds.pipeline_time import Pipeline, Stages, pipeline
from tests.plan.layers import A100, BF16, LLAMA, MIXTRAL, SEQUENCE, same, sent

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

    def layers(self, share: float = 1.0) -> Any:
        """Seconds of one layer, of which a share computes again."""
        batch = self.batch
        return batch.forward + batch.backward + batch.host + batch.sent + share * (batch.again + batch.sent_again)


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
    busy = batch.forward + batch.backward + share * batch.again + batch.host
    same(found.linear, times * linear)
    same(found.attention, times * attention)
    same(found.elementwise, times * (busy - linear - attention))
    same(found.tp, times * (batch.tp + share * batch.tp_again))
    same(found.cp, times * batch.cp)
    same(found.sharding, times * batch.sharding)
    same(found.head, 8 * batch.head if one.seconds.head[0] > 8 * batch.embedding[0] else 8 * batch.embedding)


def test_both_directions_of_experts_and_what_is_repeated() -> None:
    """Of a whole model: embedding and head are at its one place."""
    told = Options(recompute_collectives=True)
    one = Found({"dp": 8, "ep": 8, **FULL}, Shapes.of(MIXTRAL), told)
    same(one.seconds.ep, 8 * 32 * (2 * one.batch.ep + one.batch.ep_again))
    same(one.seconds.head, 8 * (one.batch.head + one.batch.embedding))
    assert one.seconds.bubble[0] == one.seconds.transfers[0] == 0


def stages(one: Found) -> tuple[Any, Any]:
    """Of a first and of a last place, before embedding and head."""
    return one.owned.first * one.layers(), one.owned.last * one.layers()


@pytest.mark.parametrize("zb_v", [False, True])
def test_embedding_and_head_are_at_the_ends(zb_v: bool) -> None:
    """A first place of zb-v has both of them."""
    one = Found({"pp": 4, "dp": 2, **(ZB_V if zb_v else {})})
    found, batch = one.seconds, one.batch
    first, last = stages(one)
    first, last = first + batch.embedding + (batch.head if zb_v else 0), last + (0 if zb_v else batch.head)
    run = piped(one, first, last, one.owned.inner * one.layers())
    same(found.bubble, run.bubble)
    same(found.transfers, run.transfers)
    ended = batch.embedding + batch.head if zb_v else batch.head
    same(found.head, 8 * ended)  # at the slowest place


def piped(one: Found, first: Any, last: Any, inner: Any, options: Options | None = None) -> Pipeline:
    row, batch, each, options = one.row, one.batch, one.layers(), options or Options()
    ranks = row.get("tp", 1) * row.get("dp", 1) * row.get("cp", 1)
    tokens = row.get("micro", 1) * SEQUENCE / row.get("cp", 1)
    hop = sent("send", tokens * 4096 * 2 / row.get("tp", 1), row["pp"], ranks)
    return pipeline(
        Stages(first=first, inner=inner, last=last, forward=batch.forward / each,
               weight_gradient=(batch.three - batch.linear) / 2 / each, first_chunk=one.owned.first_chunk),
        Points.of([row]), transfer=hop, hidden=options.transfers_hidden,
        steps_overlap=options.steps_overlap,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v"])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("steps_overlap", [False, True])
def test_a_pipeline_is_asked_with_what_options_say(name: str, hidden: bool, steps_overlap: bool) -> None:
    told = Options(transfers_hidden=hidden, steps_overlap=steps_overlap)
    row = {"pp": 4, "dp": 2, "tp": 2, "cp": 2, "micro": 2, "schedule": SCHEDULES.index(name)}
    row["virtual"] = 2 if name == "zb-v" else 1
    one = Found(row, options=told)
    first, last = stages(one)
    ends = (one.batch.embedding + one.batch.head, 0.0) if name == "zb-v" else (one.batch.embedding, one.batch.head)
    run = piped(one, first + ends[0], last + ends[1], one.owned.inner * one.layers(), told)
    same(one.seconds.bubble, run.bubble)
    same(one.seconds.transfers, run.transfers)


def test_processors_that_others_share_are_waited_for_less() -> None:
    """Where ranks that all compute take 1.2 times as long as one alone."""
    crowded = JITTER.model_copy(update={"crowd": 1.2})
    row = {"pp": 4, "dp": 2}
    one, other = Found(row, on=crowded), Found(row)
    first, last = stages(one)
    run = piped(one, first + one.batch.embedding, last + one.batch.head, one.owned.inner * one.layers())
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
    first, last = stages(one)
    run = piped(one, first + one.batch.embedding, last + one.batch.head, one.owned.inner * one.layers())
    spent = run.work + run.bubble + run.transfers + found.sync + found.optimizer
    same(found.straggler, spent * one.owned.late * 0.01)
    same(found.fixed, 0.25)
    same(found.optimizer, one.owned.optimizer)
    same(found.total, spent + found.straggler + 0.25)
    assert one.owned.late[0] > 0
