"""A mixture over 10,000 sequences is the same on any ranks, however often the run is resumed, and at every
sequence within one of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait.core.cluster.hardware import HERE
from plait.core.job.spec import Job
from plait.plan.make import make_plan
from plait.train.data.sets import prepare_corpus
from plait.train.data.stream import Stream
from plait.train.engine.feed import Feed

WEIGHTS = {"a": 0.618, "b": 0.25, "c": 0.132}
BATCH, STEPS, RESUMED = 10, 1000, (1, 137, 500, 501, 999)
LAYOUTS: dict[str, dict[str, Any]] = {"dp 1": {}, "dp 2": {"dp": 2}, "dp 3": {"dp": 3}, "pp 2": {"pp": 2}}


def job(folder: Path, **strategy: Any) -> Job:
    return Job.from_dict({
        "model": {"family": "gpt", "num_layers": 2, "hidden": 8, "num_heads": 2, "max_sequence": 8},
        "data": {
            "sources": [{"path": f"{name}.txt", "weight": weight} for name, weight in WEIGHTS.items()],
            "sequence_length": 8, "eval_fraction": 0.0,
        },
        "train": {"steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": 0, "eval_every": 0},
        "strategy": strategy,
    }, folder)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources of letters of their own; each is read several times."""
    found = tmp_path_factory.mktemp("mixture")
    rng = np.random.default_rng(1)
    for name, size in zip(WEIGHTS, (9000, 3001, 4444), strict=True):
        letters = {"a": (97, 123), "b": (65, 91), "c": (48, 58)}[name]
        (found / f"{name}.txt").write_bytes(rng.integers(*letters, size, dtype=np.uint8).tobytes())
    prepare_corpus(job(found).data, found / "corpus", lambda _: None)
    return found


def read(folder: Path, **strategy: Any) -> torch.Tensor:
    """The sequences of a run in order, as its ranks get them; int64 [sequences, S]."""
    one = job(folder, **strategy)
    plan = make_plan(one, HERE, vocab=257)
    feed, found = Feed(one, Stream.open(one, folder / "corpus")), list[torch.Tensor]()
    for step in range(STEPS):
        if step in RESUMED:
            kept = json.loads(json.dumps(feed.identity))
            stream = Stream.open(one, folder / "corpus").resumed(kept, feed.position(step))
            assert stream
            feed = Feed(one, stream)
        by_place = []
        for mesh in plan.layout.meshes:
            rows = [feed.step(step, lambda size, rank=rank: plan.rows_of(rank, size)) for rank in mesh.ranks]
            by_place.append(torch.cat([batch.tokens for one_rank in rows for batch in one_rank]))
        assert all(torch.equal(other, by_place[0]) for other in by_place), "stages read the same"
        found.append(by_place[0])
    return torch.cat(found)


@pytest.fixture(scope="module")
def alone(folder: Path) -> torch.Tensor:
    return read(folder)


def test_every_number_of_sequences_has_its_shares(alone: torch.Tensor) -> None:
    assert len(alone) == BATCH * STEPS == 10_000
    first = torch.where(alone[:, 0] == 256, alone[:, 1], alone[:, 0]).numpy()
    source = np.select([first >= 97, first >= 65], [0, 1], 2)
    given = (source[:, None] == np.arange(3)).cumsum(axis=0)
    wanted = np.arange(1, len(alone) + 1)[:, None] * np.array([*WEIGHTS.values()])
    assert np.abs(given - wanted).max() < 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_and_resumes_change_no_sequence(folder: Path, alone: torch.Tensor, layout: str) -> None:
    assert torch.equal(read(folder, **LAYOUTS[layout]), alone)
