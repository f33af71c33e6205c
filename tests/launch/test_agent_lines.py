"""A launcher's lines to agents and ranks on other hosts: what is told, what is awaited, when one is
lost."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.core.base.errors import LaunchError, PlacementError, PlaitError
from plait.core.runs.channel import MessageLine
from plait.core.topology.rank_table import RankTable
from plait.launch.local import agents as agents_of
from plait.launch.local.agents import Agent, Agents, RemoteProcess, Rendezvous
from plait.launch.local.door import (
    MESSAGE_TYPES,
    AgentMessage,
    Alive,
    Begin,
    Done,
    Ended,
    Go,
    Halted,
    Hello,
    Kill,
    RankConnection,
    Refused,
    Signalled,
)

TIER = "unit"


class Launcher:
    """An ``Agents`` of four ranks on two hosts, and agents and ranks that connect to it by hand."""

    def __init__(self, held: ExitStack, folder: Path, **options: Any) -> None:
        table = RankTable(("left", "right"), 2)
        own = {key: options.pop(key) for key in ("addresses", "numbered") if key in options}
        meeting: dict[str, Any] = {"host": "127.0.0.1", "word": "sesame", "patience": 60} | options
        self.held = held
        self.agents = held.enter_context(Agents(table, ["rank"], folder, Rendezvous(**meeting), **own))
        self.lines = dict[str, MessageLine[AgentMessage]]()
        self.begun = dict[str, Begin]()

    def says(self, message: AgentMessage) -> MessageLine[AgentMessage]:
        where, word = self.agents.variables["PLAIT_AGENT"].split(" ")
        host, port = where.split(":")
        assert word
        end = self.held.enter_context(socket.create_connection((host, int(port))))
        line = MessageLine[AgentMessage](end, MESSAGE_TYPES)
        line.send(message)
        return line

    def comes(self, host: str, port: int, task: int = -1) -> None:
        self.lines[host] = self.says(Hello("sesame", host, task, port))

    def still(self) -> None:
        """Answer what agents hear."""
        for host, line in self.lines.items():
            if host not in self.begun and isinstance(message := line.receive(), Begin):
                self.begun[host] = message
                for rank in (7, -1, *range(message.first, message.first + message.ranks)):  # two are nobody's
                    self.says(RankConnection("sesame", rank))


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    with ExitStack() as held:
        yield lambda **options: Launcher(held, tmp_path / "logs", **options)


def heard(line: MessageLine[AgentMessage]) -> AgentMessage:
    while (message := line.receive()) is None:
        pass
    return message


@pytest.mark.parametrize("addresses", [None, {"left": "10.0.0.7"}])
def test_agents_are_told_their_ranks_and_where_those_meet_and_then_to_go(
    launcher: Callable[..., Launcher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, addresses: dict[str, str] | None
) -> None:
    room = list[tuple[int, str]]()
    monkeypatch.setattr(agents_of, "make_room", lambda files, what: room.append((files, what)))
    monkeypatch.setenv("PLAIT_EPOCH", "an attempt")
    one = launcher(addresses=addresses)
    one.comes("right", 5, task=0)
    one.comes("left", 4, task=1)  # numbers of who started them say nothing here
    ranks = one.agents.ranks(one.still)
    head, logs = (addresses or {}).get("left", "left"), str((tmp_path / "logs").absolute())
    assert one.begun == {
        host: Begin(first, 2, 4, head, 4, ["rank"], logs, "an attempt") for host, first in (("left", 0), ("right", 2))
    }  # fmt: skip
    assert room == [(6, "The connections of 4 ranks")]
    assert [rank.name for rank in ranks] == ["rank 0 on left", "rank 1 on left", "rank 2 on right", "rank 3 on right"]
    assert {host: heard(line) for host, line in one.lines.items()} == {"left": Go(), "right": Go()}
    for number, (node, host) in enumerate(((0, "left"), (0, "left"), (1, "right"), (1, "right"))):
        process = one.agents.agents[node].ranks[number]
        assert process is ranks[number].process
        process.kill()
        assert heard(one.lines[host]) == Kill(number)
    one.lines["left"].send(Alive())
    one.agents.done(5)
    assert {host: heard(line) for host, line in one.lines.items()} == {"left": Done(5), "right": Done(5)}


def test_how_a_run_ended_is_told_though_an_agent_is_gone(launcher: Callable[..., Launcher]) -> None:
    one = launcher()
    for port, host in enumerate(("left", "right")):
        one.comes(host, port)
    one.agents.ranks(one.still)
    one.lines["left"].taken().close()
    assert heard(one.lines["right"]) == Go()
    one.agents.done(0)
    assert heard(one.lines["right"]) == Done(0)


def test_a_word_that_nobody_chose_cannot_be_guessed(launcher: Callable[..., Launcher]) -> None:
    words = {launcher(word="").agents.variables["PLAIT_AGENT"].split(" ")[1] for _ in range(2)}
    assert len(words) == 2 and all(len(word) >= 32 for word in words)


@pytest.mark.parametrize(
    ("host", "numbered", "task", "said"),
    [
        ("right", True, 0, "right was started as number 0, and is number 1 of the rank table"),
        ("right", True, 1, ""),
        ("right", False, 0, ""),
        ("elsewhere", False, 0, "elsewhere is not in the rank table of 2 hosts"),
    ],
)
def test_who_is_not_where_the_table_has_it_is_refused(
    launcher: Callable[..., Launcher], host: str, numbered: bool, task: int, said: str
) -> None:
    """Numbers count where the starter numbers."""
    one = launcher(numbered=numbered, patience=1)
    one.comes(host, 5, task=task)
    with pytest.raises(PlaitError, match=said or r"the agents of 1 hosts \(left\) did not come within 1 s"):
        one.agents.ranks(one.still)
    if said:
        refused = heard(one.lines[host])
        assert isinstance(refused, Refused) and said in refused.why


def test_one_more_agent_is_refused_while_lines_are_waited_for(launcher: Callable[..., Launcher]) -> None:
    one = launcher()
    for port, host in enumerate(("left", "right")):
        one.comes(host, port)
    late = list[MessageLine[AgentMessage]]()

    def still() -> None:
        if len(one.agents.agents) == 2 and not late:
            late.append(one.says(Hello("sesame", "left", -1, 9)))

    with pytest.raises(PlacementError, match="Two agents came from left"):
        one.agents.ranks(still)
    assert isinstance(heard(late[0]), Refused)


def test_lines_that_do_not_come_are_named(launcher: Callable[..., Launcher]) -> None:
    one = launcher(patience=1)
    for port, host in enumerate(("left", "right")):
        one.comes(host, port)
    with pytest.raises(LaunchError, match="the connections of some ranks did not come within 1 s"):
        one.agents.ranks(lambda: None)


def test_of_many_hosts_that_do_not_come_five_are_named(tmp_path: Path) -> None:
    for count, names in ((5, "n0, n1, n2, n3, n4)"), (6, "n0, n1, n2, n3, n4, ...)")):
        table = RankTable(tuple(f"n{number}" for number in range(count)), 1)
        with (
            Agents(table, ["rank"], tmp_path, Rendezvous(host="127.0.0.1", patience=0.0)) as many,
            pytest.raises(LaunchError, match=re.escape(f"the agents of {count} hosts ({names} did not come")),
        ):
            many.ranks(lambda: None)


@pytest.fixture
def line() -> Iterator[tuple[Agent, MessageLine[AgentMessage]]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        one = Agent(MessageLine(ours, MESSAGE_TYPES), Hello("sesame", "left", 0, 1))
        for rank in range(2):
            one.ranks[rank] = RemoteProcess(rank, one.line)
        yield one, MessageLine(theirs, MESSAGE_TYPES)


def test_what_an_agent_tells_of_its_ranks_is_taken_once(line: tuple[Agent, MessageLine[AgentMessage]]) -> None:
    one, theirs = line
    process = one.ranks[0]
    assert process.pid is None and not process.stopped and process.poll() is None and process.log_tail() == ""
    for message in (Halted(0, True), Halted(7, True), Ended(7, 1, "of another"), Signalled(15), Alive()):
        theirs.send(message)
    one.heard = 0.0
    assert one.take() == 15
    assert one.heard > 0.0
    assert process.stopped and process.poll() is None
    theirs.send(Halted(0, False))
    theirs.send(Ended(0, -9, "it"))
    theirs.send(Ended(0, 1, "later"))
    assert one.take() is None
    assert (process.stopped, process.poll(), process.log_tail()) == (False, -9, "it")
    assert one.ranks[1].poll() is None


def test_an_agent_that_hangs_up_takes_its_ranks_with_it(line: tuple[Agent, MessageLine[AgentMessage]]) -> None:
    one, theirs = line
    one.ranks[1].ended(0, "")
    theirs.taken().close()
    with pytest.raises(EOFError):
        one.take()
    assert [process.poll() for process in one.ranks.values()] == [1, 0]
    assert one.ranks[0].log_tail() == (
        "plait-error: left was lost, and rank 0 with it: its agent ended without a word (the node failed, or the "
        "cluster manager has ended it)"
    )


def test_an_agent_that_says_what_is_no_message_is_lost_and_its_ranks_with_it(
    line: tuple[Agent, MessageLine[AgentMessage]],
) -> None:
    one, theirs = line
    theirs.taken().sendall(b'["Ended", {"rank": "0", "status": 1, "said": ""}]\n')
    with pytest.raises(EOFError):
        one.take()
    assert "left was lost, and rank 0 with it: received an invalid message" in one.ranks[0].log_tail()


def test_an_agent_that_is_silent_for_too_long_is_lost(
    line: tuple[Agent, MessageLine[AgentMessage]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = line
    now, one.heard = 1000.0 + agents_of.LOST, 1000.0  # whole, that no rounding decides
    monkeypatch.setattr(agents_of, "time", SimpleNamespace(monotonic=lambda: now))
    one.look(0.0)
    assert one.ranks[0].poll() is None
    now += 20.0
    one.look(20.0)  # for so long nobody has listened
    assert one.ranks[0].poll() is None
    now += 1.0
    one.look(0.0)
    assert one.ranks[0].poll() == 1
    assert "left was lost, and rank 0 with it: its agent has been silent for 61 s" in one.ranks[0].log_tail()
