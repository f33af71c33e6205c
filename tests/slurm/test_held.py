"""A job that Slurm holds because a node could not start it: whoever follows it has it go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.core.runs.attempts import read_attempts
from tests.slurm.test_train import begin
from tests.support.managed import write_job
from tests.support.slurm import ask, slurm_cluster

pytestmark = pytest.mark.slow
PROLOG = '#!/bin/sh\n[ "$SLURMD_NODENAME" != n1 ]\n'
"""Of a cluster whose first node is broken."""


def test_a_job_that_a_broken_node_could_not_start_runs_on_others(tmp_path: Path) -> None:
    job, prolog = write_job(tmp_path, 10), tmp_path / "prolog"
    prolog.write_text(PROLOG)
    prolog.chmod(0o755)
    with slurm_cluster(4, settings=f"PrologFlags=Alloc\nProlog={prolog}\n") as cluster:
        printed = " ".join(begin(cluster, job, "slurm.nodes=2"))
        assert ask(cluster, "sinfo", "-h", "-N", "-t", "drain", "-o", "%N").split() == ["n1"]
    assert "trained 10 steps" in printed
    [attempt] = read_attempts(tmp_path / "runs" / "job")
    assert attempt.outcome == "finished"
    assert len(attempt.hosts) == 2 and "n1" not in attempt.hosts
