"""The agent of a node: starts the node's ranks for a launcher on another machine, and ends with
them.

    python -m plait.launch.local.agent          PLAIT_AGENT holds the launcher's address

The cluster manager starts one agent on every node. The ranks' connections lead to the launcher
itself, which therefore watches all ranks as if they were local. The agent reports each rank's end,
and the signals that the agent receives. When the launcher is gone, the agent kills its ranks.
"""

from __future__ import annotations

import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from plait.core.base import programs
from plait.core.base.cluster_env import own_address, take_agent, task_number, this_host
from plait.core.base.env import RankEnv, note_epoch, rank_variables
from plait.core.base.errors import LaunchError, PlaitError
from plait.core.base.process import end_all, reserved_port
from plait.core.job.collecting import collecting
from plait.core.runs.channel import MessageLine
from plait.launch.health.nodes import look, make_room, raise_limits
from plait.launch.local.door import (
    LOST,
    MESSAGE_TYPES,
    PATIENCE,
    PULSE,
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
from plait.launch.local.local import LocalProcess, start_process, unkillable
from plait.launch.watch import LOOK, catching_signals, say

M = TypeVar("M")
LOG_TAIL = 16_384
"""Characters of a log's end that are sent to the launcher."""
STATES = 1.0
"""Seconds between two checks whether ranks are stopped."""


def main(patience: float = PATIENCE, *, again: bool = False, credentials: str = "") -> int:
    """Serve one run. Returns the run's exit status if the launcher sends it, else 0 if all ranks
    were started and have ended, or the launcher needed no more. patience: seconds to wait for the
    launcher, and for other agents. again: if the launcher disconnects without the run's status, or
    is lost, wait for it or its replacement, unless this agent was signalled. credentials: the
    result of ``take_agent``, if the caller has taken it already."""
    address, word = (credentials or take_agent()).rsplit(" ", 1)
    raise_limits()
    with catching_signals() as signals:
        while True:
            try:
                return _serve(address, word, patience, signals, LOST if again else None)
            except _HungUp as left:
                if not again or left.signalled or signals:
                    return left.status
            except _LauncherLost:
                if not again or signals:
                    raise


def _serve(address: str, word: str, patience: float, signals: deque[int], silence: float | None) -> int:
    """Connect to the launcher and run this node's ranks for it; return the run's exit status.
    Raises _HungUp if the launcher leaves without sending one. word: the run's secret. silence:
    seconds after which a silent launcher counts as lost: a machine that is cut off closes no
    connection."""
    host, port = address.rsplit(":", 1)
    with ExitStack() as held:
        line = _connect(held, host, int(port), patience, signals)
        meeting = held.enter_context(reserved_port(""))  # the ranks' rendezvous port, if this is the first node
        line.send(Hello(word, this_host(), task_number(), meeting, own_address(), look()))
        begin = _await(line, Begin, silence or patience)
        note_epoch(begin.epoch)
        make_room(2 * begin.ranks, f"{begin.ranks} ranks on {this_host()}")
        lines: dict[int, socket.socket] = {}
        for rank in range(begin.first, begin.first + begin.ranks):
            end = held.enter_context(_dial(host, int(port), patience, signals))
            MessageLine[AgentMessage](end, MESSAGE_TYPES).send(RankConnection(word, rank))
            lines[rank] = end
        _await(line, Go, silence or patience)
        if programs.RANK in begin.argv:
            held.enter_context(collecting(Path(begin.logs).parent, begin.first, begin.ranks))
        agent = _Agent(line, begin)
        held.callback(agent.kill)
        agent.start(held, lines)
        return agent.serve(signals, silence)


class _HungUp(Exception):
    """The launcher has disconnected. status: this agent's exit status, if no other launcher comes.
    signalled: True if this agent was signalled."""

    def __init__(self, status: int, *, asked: bool) -> None:
        super().__init__(status)
        self.status, self.signalled = status, asked


class _LauncherLost(LaunchError):
    """Error of an agent whose launcher was lost during the handshake, before ranks were started."""


class _Agent:
    """The ranks of this node, as their agent runs them."""

    def __init__(self, line: MessageLine[AgentMessage], begin: Begin) -> None:
        self.line, self.begin = line, begin
        self.running: dict[int, LocalProcess] = {}
        self.halted: set[int] = set()
        self._due = 0.0

    def start(self, held: ExitStack, lines: Mapping[int, socket.socket]) -> None:
        """Start every rank with its connection, which belongs to the rank alone from then on."""
        logs = Path(self.begin.logs)
        logs.mkdir(parents=True, exist_ok=True)
        for rank, end in lines.items():
            log = held.enter_context((logs / f"rank-{rank}.log").open("w+b"))
            self.running[rank] = start_process(self._popen, rank, log, end)
            end.close()

    def _popen(self, rank: int, *, env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
        begin = self.begin
        who = rank_variables(
            RankEnv(
                rank=rank, world_size=begin.world_size, local_rank=rank - begin.first, local_world_size=begin.ranks,
                node_rank=rank // begin.ranks, master_addr=begin.master_addr, master_port=begin.master_port,
            )
        )  # fmt: skip
        return subprocess.Popen(begin.argv, env={**who, **env}, start_new_session=True, **options)

    def serve(self, signals: Any, silence: float | None = None) -> int:
        """Serve until the launcher knows the end of every rank and disconnects; return the run's
        exit status. silence: as for ``_serve``."""
        done: int | None = None
        asked = False
        beat = heard = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self.line, selectors.EVENT_READ)
            while True:
                if selector.select(LOOK):
                    try:
                        while (message := self.line.receive()) is not None:
                            heard = time.monotonic()
                            if isinstance(message, Done):
                                done = message.status
                            elif isinstance(message, Kill) and message.rank in self.running:
                                self.running[message.rank].kill()
                    except EOFError:
                        if done is None:
                            raise _HungUp(1 if self.running else 0, asked=asked) from None
                        return done
                if silence and time.monotonic() > heard + silence:
                    raise _HungUp(1, asked=asked)
                while signals:
                    asked = True
                    self.line.send(Signalled(signals.popleft()))
                if time.monotonic() > beat + PULSE:
                    beat = time.monotonic()
                    self.line.send(Alive())
                self._look()

    def _look(self) -> None:
        """Report ranks that have ended, were stopped or continue."""
        if states := (now := time.monotonic()) >= self._due:
            self._due = now + STATES
        for rank, process in list(self.running.items()):
            if (status := process.poll()) is not None:
                del self.running[rank]
                self.line.send(Ended(rank, status, process.log_tail()[-LOG_TAIL:] if status else ""))
            elif states and process.stopped != (rank in self.halted):
                self.halted ^= {rank}
                self.line.send(Halted(rank, rank in self.halted))

    def kill(self) -> None:
        """Kill every rank; report the ones that survive SIGKILL."""
        left = end_all(list(self.running.values()))
        for rank, process in self.running.items():
            if process in left:
                say(unkillable(f"rank {rank} on {this_host()}", process.pid))


def _dial(host: str, port: int, patience: float, signals: Sequence[int]) -> socket.socket:
    deadline = time.monotonic() + patience
    while True:
        try:
            end = socket.create_connection((host, port), timeout=10)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{this_host()} cannot reach the launcher at {host}:{port}: {error}. Open that port."
                ) from None
            if signals:
                raise LaunchError(
                    f"{this_host()} was asked to end before the launcher was there: no rank was started."
                ) from None
            time.sleep(0.2)
            continue
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Detects a machine that lost power.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST))
        return end


def _connect(
    held: ExitStack, host: str, port: int, patience: float, signals: Sequence[int]
) -> MessageLine[AgentMessage]:
    return MessageLine(held.enter_context(_dial(host, port, patience, signals)), MESSAGE_TYPES)


def _await(line: MessageLine[AgentMessage], kind: type[M], patience: float) -> M:
    try:
        while isinstance(message := _next(line, patience), Alive):  # the launcher still waits for other agents
            pass
    except EOFError:
        raise _LauncherLost(f"{this_host()}: the launcher has ended.") from None
    if isinstance(message, Refused):
        raise LaunchError(message.why)
    if not isinstance(message, kind):
        raise _LauncherLost(f"{this_host()}: the launcher sent nothing for {patience:.0f} s.")
    return message


def _next(line: MessageLine[AgentMessage], patience: float) -> AgentMessage | None:
    """Return the launcher's next message; None if none comes within ``patience`` seconds. One read
    may have received several messages."""
    with selectors.DefaultSelector() as selector:
        selector.register(line, selectors.EVENT_READ)
        deadline = time.monotonic() + patience
        while (message := line.receive()) is None and (left := deadline - time.monotonic()) > 0:
            selector.select(left)
        return message


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PlaitError as error:
        print(f"plait: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
