"""The port where a run's agents, and the connections of its ranks, come in; and the messages
between launcher and agents.

Anyone who reaches the port can connect. Unknown connections are therefore read concurrently, each
for a limited time and number of bytes, and their first message is compared with the run's secret
word before it is used.
"""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from plait.core.base.errors import LaunchError
from plait.core.runs.channel import MessageLine
from plait.launch.health.nodes import NodeReport

PATIENCE = 120.0
"""Seconds that a launcher waits for the next agent to connect."""
PULSE = 5.0
"""Seconds between two heartbeats of an agent."""
LOST = 60.0
"""Seconds without a heartbeat after which an agent's host counts as lost: a machine without power
closes no connection."""


@dataclass(frozen=True)
class Hello:
    """An agent's first message. word: the run's secret. host: the machine's name. task: the number
    from the agent's starter, -1 if none. port: a free port there for the ranks' rendezvous.
    address: the machine's address, if known. fitness: the node's resources."""

    word: str
    host: str
    task: int
    port: int
    address: str = ""
    fitness: NodeReport = field(default_factory=NodeReport)


@dataclass(frozen=True)
class Begin:
    """A message to an agent with its ranks, ``first`` and the following. argv: the command of each
    rank. epoch: the word that identifies the run's attempt."""

    first: int
    ranks: int
    world_size: int
    master_addr: str
    master_port: int
    argv: list[str]
    logs: str
    epoch: str = ""


@dataclass(frozen=True)
class Refused:
    """A message to an agent: the agent is refused, no rank is to be started."""

    why: str


@dataclass(frozen=True)
class RankConnection:
    """A rank's first message on a connection of its own, sent by its agent; the rank will inherit
    the connection."""

    word: str
    rank: int


@dataclass(frozen=True)
class Go:
    """A message to an agent, once the connections of all ranks are open: start the ranks."""


@dataclass(frozen=True)
class Halted:
    """A message from an agent: a rank was stopped (SIGSTOP, a debugger), or continues."""

    rank: int
    halted: bool


@dataclass(frozen=True)
class Ended:
    """A message from an agent: a rank's exit status, -N for signal N, and the end of its log."""

    rank: int
    status: int
    said: str


@dataclass(frozen=True)
class Signalled:
    """A message from an agent: the agent has received this signal."""

    signal: int


@dataclass(frozen=True)
class Alive:
    """A heartbeat, sent every few seconds in both directions."""


@dataclass(frozen=True)
class Kill:
    """A message to an agent: kill this rank."""

    rank: int


@dataclass(frozen=True)
class Done:
    """A message to an agent: the run's exit status, which the agent returns as its own."""

    status: int


AgentMessage = Done | Hello | Begin | Refused | RankConnection | Go | Halted | Ended | Signalled | Kill | Alive
MESSAGE_TYPES = (Done, Hello, Begin, Refused, RankConnection, Go, Halted, Ended, Signalled, Kill, Alive)


FIRST_MESSAGE_BYTES = 4096
"""The largest size of a connection's first message, in bytes."""
FIRST_MESSAGE_SECONDS = 30.0
"""Seconds within which a new connection must send its first message."""
MAX_UNIDENTIFIED = 256
"""Unidentified connections that are read at a time; beyond that, the oldest is closed."""
MAX_UNREAD = 64
"""The largest number of connections that are accepted before the accepted ones are read."""


class AgentPort:
    """A listening port, open inside the ``with`` block. host: an address of this machine. port: 0
    for any free one. word: the run's secret. Raises LaunchError if the port cannot be opened.

    Known: ``Hello`` and ``RankConnection`` with the word. Any other message is refused by closing
    the connection.
    """

    def __init__(self, host: str, port: int, word: str) -> None:
        self._word = word.encode()
        self._listener = _listen(host, port)
        self._strangers: dict[MessageLine[AgentMessage], tuple[socket.socket, float]] = {}
        self._known: deque[tuple[socket.socket, Hello | RankConnection]] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening; connections that were handed out stay open."""
        for line in list(self._strangers):
            self._dismiss(line)
        for end, _ in self._known:
            end.close()
        self._selector.close()
        self._listener.close()

    @property
    def port(self) -> int:
        """The port's number."""
        return self._listener.getsockname()[1]

    def next(self, seconds: float) -> tuple[socket.socket, Hello | RankConnection] | None:
        """Return the next connection that knows the word, with its first message; None if none
        comes within ``seconds``."""
        if not self._known:
            for key, _ in self._selector.select(seconds):
                if key.data is None:
                    self._take()
                else:
                    self._hear(key.data)
            late = time.monotonic() - FIRST_MESSAGE_SECONDS
            for line in [line for line, (_, since) in self._strangers.items() if since < late]:
                self._dismiss(line)
        return self._known.popleft() if self._known else None

    def _take(self) -> None:
        for _ in range(MAX_UNREAD):
            try:
                end, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return  # the peer has disconnected already
                if not self._strangers:
                    why = error.strerror or error
                    raise LaunchError(f"No further connection of an agent or a rank can be opened: {why}.") from None
                self._dismiss(next(iter(self._strangers)))
                continue
            if len(self._strangers) == MAX_UNIDENTIFIED:
                self._dismiss(next(iter(self._strangers)))
            line = MessageLine[AgentMessage](end, MESSAGE_TYPES, most=FIRST_MESSAGE_BYTES)
            self._strangers[line] = end, time.monotonic()
            self._selector.register(line, selectors.EVENT_READ, line)

    def _hear(self, line: MessageLine[AgentMessage]) -> None:
        if line not in self._strangers:  # closed to make room
            return
        try:
            said = line.receive()
            if said is None:
                return
            if not isinstance(said, (Hello, RankConnection)) or not self._knows(said.word):
                raise EOFError
            end = line.taken()
        except EOFError:
            self._dismiss(line)
            return
        self._selector.unregister(line)
        del self._strangers[line]
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._known.append((end, said))

    def _knows(self, word: str) -> bool:
        return secrets.compare_digest(word.encode(errors="replace"), self._word)

    def _dismiss(self, line: MessageLine[AgentMessage]) -> None:
        self._selector.unregister(line)
        end, _ = self._strangers.pop(line)
        end.close()


def _listen(host: str, port: int) -> socket.socket:
    """Listen on ``host``'s address only; on all addresses if no interface of this machine has
    it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        try:
            listener = socket.create_server(address[:2], family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener = socket.create_server(("", port), backlog=1024)
    except OSError as error:
        at = f"{host}:{port}" if port else host
        raise LaunchError(f"The launcher cannot listen for its agents at {at}: {error.strerror or error}.") from None
    listener.setblocking(False)
    return listener
