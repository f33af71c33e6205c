"""Links between a lab's hosts, tried before training: the slow one is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from plait.lab import Lab, LabSpec

pytestmark = [pytest.mark.lab, pytest.mark.slow]

RANK = """
import json, sys, time
import torch.distributed as dist
from plait.core.base.env import RankEnv
from plait.train.comm.selfcheck import check_links
from plait.train.machine.gpu import device_of
rank = RankEnv.read()
dist.init_process_group("gloo")
check_links(rank, device_of(None))  # connections are made
dist.barrier()
found = check_links(rank, device_of(None))
if rank.rank == 0:
    print(json.dumps(found))
"""


@pytest.mark.parametrize("slow", [None, 3])
def test_a_slow_link_is_named_and_no_other(needs_lab: None, tmp_path: Path, slow: int | None) -> None:
    argv = [sys.executable, "-c", RANK]
    with Lab(LabSpec.parse("5x1@200mbit")) as lab:
        if slow is not None:
            lab.slow(slow, "20mbit")
        ranks = [lab.popen(rank, argv, stdout=subprocess.PIPE, text=True) for rank in range(5)]
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    found = json.loads(said[0].splitlines()[-1])
    named = {(words[4], words[9]) for words in (one.split() for one in found)}
    assert all(str(slow) in pair for pair in named), found
    assert bool(found) == (slow is not None)
