"""The port where the agents of a run, and the lines of its ranks, come in.

Anybody who reaches the port can connect. Strangers are therefore heard side by side, each for a while and a
few bytes, and what they say is compared with the run's word before it is looked at.
"""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import time
from collections import deque
from types import TracebackType
from typing import Self

from plait.core.base.errors import LaunchError
from plait.core.runs.channel import MessageLine
from plait.launch.messages import KINDS, AgentMessage, Hello, LineOf

FIRST = 4096
"""Bytes of what somebody says first."""
SOON = 30.0
"""Seconds in which it has to be said."""
STRANGERS = 256
"""Connections that are heard at a time; of more, the oldest is closed."""
TAKEN = 64
"""Connections that are taken before those that are there are heard."""


class Door:
    """A port, open inside the ``with`` block. host: an address of this machine; port: 0 for any that is free.
    word: what only agents of this run know. Raises LaunchError where nobody can listen there.

    Known: ``Hello`` and ``LineOf`` with the word. All else is refused by closing the connection.
    """

    def __init__(self, host: str, port: int, word: str) -> None:
        self._word = word.encode()
        self._listener = _listen(host, port)
        self._strangers: dict[MessageLine[AgentMessage], tuple[socket.socket, float]] = {}
        self._known: deque[tuple[socket.socket, Hello | LineOf]] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nobody comes in any more; connections that were handed out stay."""
        for line in list(self._strangers):
            self._dismiss(line)
        for end, _ in self._known:
            end.close()
        self._selector.close()
        self._listener.close()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._listener.getsockname()[1]

    def next(self, seconds: float) -> tuple[socket.socket, Hello | LineOf] | None:
        """The next connection that knows the word, and what it said first; None if none comes within
        ``seconds``."""
        if not self._known:
            for key, _ in self._selector.select(seconds):
                if key.data is None:
                    self._take()
                else:
                    self._hear(key.data)
            late = time.monotonic() - SOON
            for line in [line for line, (_, since) in self._strangers.items() if since < late]:
                self._dismiss(line)
        return self._known.popleft() if self._known else None

    def _take(self) -> None:
        for _ in range(TAKEN):
            try:
                end, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return  # it has hung up already
                if not self._strangers:
                    why = error.strerror or error
                    raise LaunchError(f"No further line to an agent or a rank can be opened: {why}.") from None
                self._dismiss(next(iter(self._strangers)))
                continue
            if len(self._strangers) == STRANGERS:
                self._dismiss(next(iter(self._strangers)))
            line = MessageLine[AgentMessage](end, KINDS, most=FIRST)
            self._strangers[line] = end, time.monotonic()
            self._selector.register(line, selectors.EVENT_READ, line)

    def _hear(self, line: MessageLine[AgentMessage]) -> None:
        if line not in self._strangers:  # dismissed to make room
            return
        try:
            said = line.receive()
            if said is None:
                return
            if not isinstance(said, (Hello, LineOf)) or not self._knows(said.word):
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
    """On ``host``'s address alone; on all where that is no interface of this machine."""
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
