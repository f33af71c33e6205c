"""The line between the launcher and a rank: small messages over a socket that the rank inherits. A pair of
Unix sockets on one machine, a TCP connection where the launcher is on another.

It goes both ways. The launcher says when to stop, which no signal mask, background job or import can swallow;
a rank says what it is doing, and that it was asked to stop itself. Either side learns when the other is gone.
Sending never blocks and never fails.
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar, cast

from plait.core.base.codec.json_text import parse_json
from plait.core.base.errors import JobError

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to save and end."""
LONGEST = 1 << 16
"""Bytes that may wait to be sent: the other end has not listened for long."""
MOST = 1 << 20
"""Bytes of a message that is taken."""


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
    """From a rank: what it is at. step: of training, -1 before. patient: may rightly take very long. first:
    it does this for the first time since it was started. writing: step of the checkpoint that is being
    written meanwhile, 0 if none is."""

    doing: str
    step: int = -1
    patient: bool = False
    first: bool = False
    writing: int = 0


@dataclass(frozen=True)
class Error:
    """From a rank: the paragraph that says why it ends, which its log on a full disk cannot keep. kind: the
    name of the error's class."""

    text: str
    kind: str = ""


Message = Stop | Beat | Error
M = TypeVar("M")


class MessageLine(Generic[M]):
    """One end of a line of messages: dataclasses of the given ``kinds``, as JSON, one to a line of text.

    Known: a message of a kind, with values of its fields' types. Refused, as if the other end was gone: all
    else, and more than ``most`` bytes without an end. Nothing is passed over.
    """

    def __init__(self, end: socket.socket, kinds: Sequence[type[M]], *, most: int = MOST) -> None:
        self._end, self._most = end, most
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._read = self._unsent = b""
        end.setblocking(False)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._end.fileno()

    def send(self, message: M) -> None:
        """Tell the other end, if it is there and listens."""
        content = json.dumps([type(message).__name__, asdict(cast("Any", message))]).encode() + b"\n"
        if len(self._unsent) < LONGEST:
            self._unsent += content
        with suppress(OSError):
            while self._unsent:
                self._unsent = self._unsent[self._end.send(self._unsent) :]

    def receive(self) -> M | None:
        """The next message, None if none has come. Raises EOFError when the other end is gone, or has said
        what is no message."""
        while b"\n" not in self._read:
            if len(self._read) > self._most:
                raise EOFError(f"more than {self._most} bytes came without an end")
            try:
                content = self._end.recv(LONGEST)
            except BlockingIOError:
                return None
            except OSError:
                content = b""
            if not content:
                raise EOFError
            self._read += content
        text, _, self._read = self._read.partition(b"\n")
        return self._message(text)

    def _message(self, text: bytes) -> M:
        from plait.core.base.codec.data import decode  # pydantic: a rank starts without it

        try:
            name, values = cast("tuple[str, Mapping[str, Any]]", parse_json(text))
            return decode(self._kinds[name], values)
        except (ValueError, TypeError, KeyError, JobError) as error:
            raise EOFError(f"what came is no message: {str(error)[:200]}") from None

    def taken(self) -> socket.socket:
        """The socket, for a line of other messages. Raises EOFError if something of them was read ahead."""
        if self._read:
            raise EOFError("more came than one message")
        return self._end

    def close(self) -> None:
        """The other end gets EOFError."""
        self._end.close()


class Channel(MessageLine[Message]):
    """One end of the line between the launcher and a rank."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end, (Stop, Beat, Error))

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """The launcher's end, and the socket for a rank to inherit."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(ours), theirs

    @staticmethod
    def inherited(descriptor: int) -> Channel:
        """The rank's end; processes that it starts do not get it."""
        end = socket.socket(fileno=descriptor)
        end.set_inheritable(False)
        return Channel(end)
