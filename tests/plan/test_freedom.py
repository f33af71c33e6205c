"""More freedom never makes an answer worse, nor better hardware: jobs in which a late host, or the
first of a family, once did. ``benchmarks/planner_trust.py`` draws many more."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.plan.answer import Planner
from plait.plan.explain.what_if import changed_cluster
from plait.plan.search.candidate import Candidate

PLAIN = ("batch_slices == 1", "column_slices == 1")
TINY = (
    ("family", "gpt"),
    ("num_layers", 5),
    ("hidden", 256),
    ("num_heads", 4),
    ("vocab", 50304),
    ("max_sequence", 1024),
)
LONG = (("preset", "llama2-70b"), ("max_sequence", 16384))
DEEP = (("family", "gpt"), ("num_layers", 80), ("hidden", 960), ("num_heads", 12), ("vocab", 50304),
        ("max_sequence", 128), ("parallel_block", True))  # fmt: skip


@cache
def best(
    model: Any,
    where: tuple[str, int],
    shape: tuple[int, int],
    conditions: tuple[str, ...] = (),
    *,
    compute: float = 1.0,
) -> Candidate:
    """The answer's first. model: a preset, or keys and values; where: cluster and ranks; shape:
    tokens of a sequence, sequences of a step."""
    values = {
        "model": {"preset": model} if isinstance(model, str) else dict(model),
        "data": {"sequence_length": shape[0]},
        "train": {"global_batch_size": shape[1], "precision": "bf16-mixed"},
        "cluster": {"preset": where[0], "ranks": where[1]},
        "plan": {"constraints": list(conditions), "top": 3},
    }
    cluster = changed_cluster(Cluster.preset(where[0]), {"compute": compute})
    return Planner(Job.from_dict(values), cluster, 256).answer().best


@pytest.mark.parametrize(
    ("model", "where", "shape", "given", "more"),
    [
        ("gpt3-350m", ("h100", 8), (1024, 8), (), PLAIN),
        ("gpt3-350m", ("h100", 8), (1024, 8), (), ("recompute == none",)),
        ("gpt3-2.7b", ("h100", 8), (512, 8), ("tp == 8",), PLAIN),
        ("gpt3-2.7b", ("h100", 8), (512, 32), ("tp == 8",), PLAIN),
        ("gpt3-1.3b", ("a100-80", 16), (1024, 32), ("tp >= 4",), PLAIN),
        (TINY, ("h100", 128), (1024, 256), (), ("dp == 128",)),
        (LONG, ("h100", 64), (16384, 256), (), ("schedule == 1f1b",)),
    ],
    ids=str,
)  # fmt: skip
def test_a_condition_never_makes_an_answer_better(
    model: Any, where: tuple[str, int], shape: tuple[int, int], given: tuple[str, ...], more: tuple[str, ...]
) -> None:
    free, held = best(model, where, shape, given), best(model, where, shape, (*given, *more))
    assert free.seconds <= held.seconds * 1.001


def test_twice_the_compute_never_makes_an_answer_worse() -> None:
    """A host that is late costs what it costs; a second forward that it has to launch is not
    free."""
    plain, quick = (best(DEEP, ("h100", 32), (128, 256), compute=factor) for factor in (1.0, 2.0))
    assert quick.seconds <= plain.seconds * 1.001
    assert plain.point["recompute"] == quick.point["recompute"] == 0
