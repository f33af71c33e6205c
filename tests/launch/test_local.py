"""Whose fault it was, when ranks fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from plait.core.errors import RankFailure
from plait.launch.local import local_start, run_ranks

# Rank 1 dies; rank 0, which needs it, of that a little later.
RANK = """
import os, pathlib, signal, sys, time
dying = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1":
    dying.touch()
    os.kill(os.getpid(), signal.SIGKILL)
while not dying.exists():
    time.sleep(0.01)
time.sleep(0.3)
os.abort()
"""


def test_a_rank_that_dies_ends_one_that_waits_for_ever(tmp_path: Path) -> None:
    waits = "import os, sys, time; os.environ['RANK'] == '2' and sys.exit(7); time.sleep(600)"
    with pytest.raises(RankFailure, match="rank 2 ended with status 7"):
        run_ranks(local_start([sys.executable, "-I", "-S", "-c", waits], 3), 3, tmp_path / "logs")


def test_the_first_of_two_that_were_killed_is_named(tmp_path: Path) -> None:
    start = local_start([sys.executable, "-I", "-S", "-c", RANK, str(tmp_path / "dying")], 2)
    with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL"):
        run_ranks(start, 2, tmp_path / "logs")
