"""The line between the launcher and a rank: small messages over a socket that the rank inherits.

It goes both ways. The launcher says when to stop, which no signal mask, background job or import can swallow;
a rank says what it is doing, and that it was asked to stop itself. Either side learns when the other is gone.
Sending never blocks and never fails.
"""

from __future__ import annotations

import json
import signal
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to save and end."""
_LONGEST = 1 << 16


@dataclass(frozen=True)
class Stop:
    """To a rank: save and end. From a rank: it has got this signal from somebody else."""

    signal: int

    @property
    def status(self) -> int:
        """The exit status of who ended for it, as shells count."""
        return 128 + self.signal


@dataclass(frozen=True)
class Beat:
    """From a rank: what it is at. step: of training, -1 before. patient: may rightly take very long."""

    doing: str
    step: int = -1
    patient: bool = False


Message = Stop | Beat


class Channel:
    """One end of the line."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.setblocking(False)

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """The launcher's end, and the socket for a rank to inherit."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Channel(ours), theirs

    @staticmethod
    def inherited(descriptor: int) -> Channel:
        """The rank's end; processes that it starts do not get it."""
        end = socket.socket(fileno=descriptor)
        end.set_inheritable(False)
        return Channel(end)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._end.fileno()

    def send(self, message: Message) -> None:
        """Tell the other end, if it is there and listens."""
        with suppress(OSError):
            self._end.send(json.dumps([type(message).__name__, asdict(message)]).encode())

    def receive(self) -> Message | None:
        """The next message, None if none has come. Raises EOFError when the other end is gone."""
        try:
            content = self._end.recv(_LONGEST)
        except BlockingIOError:
            return None
        except OSError:
            content = b""
        if not content:
            raise EOFError
        kind, values = json.loads(content)
        return {"Stop": Stop, "Beat": Beat}[kind](**values)

    def close(self) -> None:
        """The other end gets EOFError."""
        self._end.close()
