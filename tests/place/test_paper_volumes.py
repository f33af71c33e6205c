"""Arnold's eq. 11 to 13: its example of 7B, and the planner's own count of the same jobs."""

from __future__ import annotations

import pytest

from benchmarks.baselines.volumes import PaperJob
from plait.core.job.spec import Job
from plait.plan.make import job_step
from plait.plan.search.volumes import pp_rank_volume

BYTES = 2
"""Of an element in half precision."""


def test_the_example_of_7b() -> None:
    """Section 4: 2 GB and 30 MB. Sequence and stages are not printed; with 2,048 tokens and 8
    stages both follow."""
    job = PaperJob(vocab=50_257, sequence=2048, hidden=4096, layers=32, pp=8)
    assert job.dp_volume * BYTES == pytest.approx(2e9, rel=0.05)
    assert job.pp_volume * BYTES == pytest.approx(30e6, rel=0.15)
    whole = PaperJob(vocab=50_257, sequence=2048, hidden=4096, layers=32)
    assert 6.5e9 < whole.dp_volume < 7e9, "a job of one stage exchanges all of its 7B parameters"


def test_micro_batches() -> None:
    assert PaperJob(vocab=1, sequence=1, hidden=1, layers=1, global_batch=1024, micro_batch=2, dp=64).micro_batches == 8


@pytest.mark.parametrize("pp", [2, 4])
def test_the_planner_counts_the_same_parameters_and_activations(pp: int) -> None:
    """Of a GPT of one tensor-parallel rank, dp = 2 without sharding: an all-reduce sends its
    gradients once."""
    hidden, sequence, vocab, layers, batch, dp = 512, 64, 1000, 8, 32, 2
    job = Job.from_dict({
        "model": {"family": "gpt", "num_layers": layers, "hidden": hidden, "num_heads": 8, "vocab": vocab,
                  "max_sequence": sequence},
        "data": {"sequence_length": sequence},
        "train": {"global_batch_size": batch, "micro_batch_size": 4},
        "strategy": {"dp": dp, "pp": pp, "tp": 1, "shard": "ddp"},
    })  # fmt: skip
    paper = PaperJob(
        vocab=vocab, sequence=sequence, hidden=hidden, layers=layers, global_batch=batch, micro_batch=4, dp=dp, pp=pp
    )
    step = job_step(job, vocab)
    first, middle = pp_rank_volume(step, 0), pp_rank_volume(step, 1)
    assert first.dp / step.workload.master == pytest.approx(paper.dp_volume, rel=0.01)
    edges = 1 if pp == 2 else 2  # a stage in the middle hands activations on, and gradients back
    sent = middle.pp / step.workload.itemsize / paper.micro_batches
    assert sent == pytest.approx(paper.pp_volume / 2 * edges)
