"""Hints of CUDA graphs: what is told was predicted, of jobs that do not say whether to capture."""

from __future__ import annotations

from typing import Any

import pytest

from plait.api.planning import Planning
from plait.core.cluster.hardware import Cluster
from plait.core.job.settings import PLANNABLE
from plait.core.job.spec import Job
from plait.plan.answer import Planner
from plait.plan.explain.hints import GRAPHS, GRAPHS_WORTH, Hint, cuda_graphs_hints

OPEN = dict.fromkeys(PLANNABLE, "auto")


def planner(preset: str = "b200", model: str = "gpt3-350m", batch: int = 8, **values: Any) -> Planner:
    job = Job.from_dict({
        "model": {"preset": model}, "data": {"sequence_length": 512},
        "train": {"global_batch_size": batch, "precision": "bf16-mixed"},
        "cluster": {"preset": preset, "ranks": 8}, "plan": {"top": 1, "points": 5000}, **values,
    })  # fmt: skip
    return Planner(job, Cluster.preset(preset), 32_000)


def hints(one: Planner) -> list[Hint]:
    return cuda_graphs_hints(one, one.answer().best)


@pytest.mark.parametrize("said", [{}, {"strategy": {**OPEN, "cuda_graphs": "auto"}}])
def test_what_graphs_gain_is_told_as_it_is_predicted(said: dict[str, Any]) -> None:
    one = planner(**said)
    best, (hint,) = one.answer().best, hints(one)
    with_graphs = one.predict(best.job.changed([f"{GRAPHS}=true"]))
    assert (hint.seconds, hint.seconds_nearby) == (best.seconds, with_graphs.seconds)
    assert hint.seconds_nearby < 0.5 * hint.seconds
    assert hint.more == pytest.approx(hint.seconds / hint.seconds_nearby - 1)
    assert hint.sentence.startswith(
        "CUDA graphs would take the host's time away: with strategy.cuda_graphs=true this plan"
    )
    assert ("(auto: " in hint.sentence) == bool(said)
    assert hint.to_dict()["given"] == ("auto" if said else False)


def test_an_answer_has_it_in_text_and_in_json() -> None:
    answer = Planning(planner=planner()).answer()
    assert [one["key"] for one in answer.to_dict()["hints"]] == [GRAPHS]
    assert sum("CUDA graphs would" in part for part in answer.parts() if isinstance(part, str)) == 1


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": {**OPEN, "cuda_graphs": False}},
        {"strategy": {**OPEN, "cuda_graphs": True}},
        {"plan": {"framework": "torchtitan", "top": 1, "points": 5000}},
        {"strategy": {**OPEN, "shard": "zero3", "pp": 1}},
        {"data": {"sequence_length": 512, "documents": "mask"}},
        {"preset": "lab", "model": "gpt3-125m", "cluster": {"preset": "lab", "ranks": 4}},
    ],
)
def test_nothing_is_told_of_jobs_that_say_it_or_cannot_have_it(values: dict[str, Any]) -> None:
    assert hints(planner(**values)) == []


def test_what_computes_for_long_is_not_predicted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = planner("h100", "llama3-8b", 64, data={"sequence_length": 4096})
    best = one.answer().best
    monkeypatch.setattr(Planner, "predict", None)
    assert cuda_graphs_hints(one, best) == []


def test_what_is_hardly_faster_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one = planner()
    assert hints(one)[0].more > GRAPHS_WORTH
    monkeypatch.setattr("plait.plan.explain.hints.GRAPHS_WORTH", 0.9)
    assert hints(one) == []
