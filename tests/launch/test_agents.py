"""Agents that are not where they should be, or not ours, or gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from plait.core.channel import Line
from plait.core.errors import LaunchError, PlacementError, PlaitError
from plait.core.rank_table import RankTable
from plait.launch.agents import Agents
from plait.launch.messages import KINDS, AgentMessage, Hello
from plait.launch.watch import Watch, watched

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
TABLE = RankTable(("left", "right"), 1)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with Agents(TABLE, SLEEP, tmp_path / "logs", host="127.0.0.1", addresses=dict.fromkeys(TABLE.hosts, "127.0.0.1"),
                numbered=True) as open_agents:  # fmt: skip
        yield open_agents


def start(agents: Agents, host: str, number: int) -> subprocess.Popen[str]:
    """An agent that believes to be on ``host``, as task ``number``."""
    env = {**os.environ, **agents.variables, "SLURMD_NODENAME": host, "SLURM_PROCID": str(number)}
    argv = [sys.executable, "-m", "plait.launch.agent"]
    return subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True)


def nothing() -> None:
    """Agents may still come."""


@pytest.mark.parametrize(
    ("host", "number", "match"),
    [("elsewhere", 0, "elsewhere is not in the rank table of 2 hosts"),
     ("right", 0, "right was started as number 0, and is number 1 of the rank table")],
)  # fmt: skip
def test_an_agent_on_the_wrong_host_is_named_by_both_sides(agents: Agents, host: str, number: int, match: str) -> None:
    process = start(agents, host, number)
    with pytest.raises(PlacementError, match=match):
        agents.ranks(nothing)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert match in errors


def test_who_does_not_know_the_word_is_not_heard(agents: Agents) -> None:
    host, port = agents.variables["PLAIT_AGENT"].split(" ")[0].split(":")
    with closing(socket.create_connection((host, int(port)))) as end:
        Line[AgentMessage](end, KINDS).send(Hello("a guess", "left", 0, 1))
        deadline = time.monotonic() + 1

        def soon() -> None:
            if time.monotonic() > deadline:
                raise LaunchError("enough")

        with pytest.raises(LaunchError, match="enough"):
            agents.ranks(soon)
    assert not agents.agents


def test_a_node_that_is_lost_is_named(agents: Agents, tmp_path: Path) -> None:
    processes = [start(agents, host, number) for number, host in enumerate(TABLE.hosts)]
    ranks = agents.ranks(nothing)
    processes[1].send_signal(signal.SIGKILL)  # its rank has no line to us that would be cut: it has died as well
    with pytest.raises(PlaitError, match="right was lost, and rank 1 with it"):
        watched(ranks, tmp_path / "logs", timeout=30, lock=None, sources=list(agents.agents.values()))
    agents.__exit__(None, None, None)
    for process in processes:
        process.communicate(timeout=120)


class Node:
    """A source that passes signals on."""

    def __init__(self) -> None:
        self.end, self.ours = socket.socketpair()

    def fileno(self) -> int:
        return self.ours.fileno()

    def take(self) -> int | None:
        return self.ours.recv(1)[0]

    def look(self, held_up: float) -> None:
        pass

    def got(self, number: int) -> None:
        self.end.send(bytes([number]))


@pytest.mark.parametrize("here", [False, True])
def test_one_ctrl_c_that_reaches_every_node_is_one(tmp_path: Path, here: bool) -> None:
    """The second one of any of them is a second one."""
    nodes = [Node() for _ in range(3)]
    signals = deque([signal.SIGINT.value] if here else [])
    watch = Watch([], tmp_path, signals, timeout=30, lock=None, sources=nodes)

    def listen() -> tuple[bool, bool]:
        watch._listen()
        while signals:
            watch._signalled(signals.popleft())
        return watch.stop is not None, watch.killed

    if here:
        assert listen() == (True, False)
    for node in nodes:
        node.got(signal.SIGINT)
    assert listen() == (True, False)
    nodes[1].got(signal.SIGINT)
    assert listen() == (True, True)
    for node in nodes:
        node.end.close()
        node.ours.close()
