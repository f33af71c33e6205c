"""Links between a lab's hosts, tried before training: the slow one is named."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from plait.lab import Lab, LabSpec

pytestmark = [pytest.mark.lab, pytest.mark.slow]

RANK = """
import json, sys
import torch.distributed as dist
from plait.core.base.env import RankEnv
from plait.train.comm.selfcheck import check_links
from plait.train.machine.gpu import device_of
rank = RankEnv.read()
dist.init_process_group("gloo")
check_links(rank, device_of(None))  # connections are made
while sys.stdin.readline():
    dist.barrier()
    found = check_links(rank, device_of(None))
    if rank.rank == 0:
        print(json.dumps(found), flush=True)
"""


def test_a_slow_link_is_named_and_no_other(needs_lab: None) -> None:
    found: list[list[str]] = []
    with Lab(LabSpec.parse("5x1@200mbit")) as lab:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        ranks: list[Any] = [lab.popen(rank, [sys.executable, "-c", RANK], **pipes) for rank in range(5)]
        for rate in ("200mbit", "20mbit"):
            lab.slow(3, rate)
            for one in ranks:
                one.stdin.write("again\n")
            found.append(json.loads(ranks[0].stdout.readline()))
        for one in ranks:
            one.communicate(timeout=60)
    assert found[0] == []
    assert found[1] and all("3" in (words[4], words[9]) for words in (one.split() for one in found[1])), found
