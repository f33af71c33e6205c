"""The line between the launcher and a rank: small messages over a socket that the rank inherits. A pair of
Unix sockets on one machine, a TCP connection where the launcher is on another.

It goes both ways. The launcher says when to stop, which no signal mask, background job or import can swallow;
a rank says what it is doing, and that it was asked to stop itself. Over it a rank also reaches the store at
which ranks meet. Either side learns when the other is gone. Sending never blocks and never fails.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast

from plait.core.base.codec.json_text import parse_json
from plait.core.base.errors import JobError

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to save and end."""
LONGEST = 1 << 16
"""Bytes that wait to be sent before signs of life are left out: the other end has not listened for long."""
MOST = 1 << 24
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


StoreVerb = Literal["set", "append", "wait", "add", "check", "delete", "compare_set", "num_keys", "forget"]


@dataclass(frozen=True)
class StoreCall:
    """From a rank: a call of the store at which ranks meet. number: of the call, by the rank; forget: one
    that is still waited for. values: in base64. amount: to add."""

    number: int
    verb: StoreVerb
    keys: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    amount: int = 0


@dataclass(frozen=True)
class StoreAnswer:
    """To a rank: what a call came to; there is none of ``set``, ``append`` and ``forget``. values: in base64.
    amount: a number, or how many. error: why it came to nothing."""

    number: int
    values: tuple[str, ...] = ()
    amount: int = 0
    error: str = ""


Message = Stop | Beat | Error | StoreCall | StoreAnswer
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
        self._sending = threading.Lock()
        end.setblocking(False)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._end.fileno()

    def send(self, message: M, *, keep: bool = False) -> None:
        """Tell the other end, if it is there and listens. keep: whether it is told later if it does not
        listen now (``flush``), however much waits; else what is too much is left out."""
        content = json.dumps([type(message).__name__, message], default=vars).encode() + b"\n"
        with self._sending:
            if keep or len(self._unsent) < LONGEST:
                self._unsent += content
        self.flush()

    def flush(self) -> bool:
        """Send what waits to be sent, as far as the other end takes it; whether nothing is left."""
        if not self._unsent:
            return True
        with self._sending, suppress(OSError):
            while self._unsent:
                self._unsent = self._unsent[self._end.send(self._unsent) :]
        return not self._unsent

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
        super().__init__(end, (Stop, Beat, Error, StoreCall, StoreAnswer))

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
