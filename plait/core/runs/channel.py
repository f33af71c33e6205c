"""The channel between the launcher and a rank: small messages over a socket that the rank inherits.
It is a pair of Unix sockets on one machine, or a TCP connection if the launcher is on another
machine.

The launcher sends requests to stop, which no signal mask, background job or import can swallow. A
rank sends its current activity, and signals to stop that it has received itself. A rank also calls
the rendezvous store over it. Either side gets an error when the other is gone. Sending never blocks
and never fails.
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
"""The signals that ask a run to save and end."""
LONGEST = 1 << 16
"""Number of unsent bytes above which status messages are dropped, because the other end has not
read for long."""
MOST = 1 << 24
"""The most bytes of a message that is accepted."""


@dataclass(frozen=True)
class Stop:
    """A request to stop. To a rank: save and end. From a rank: it has received this signal from
    another process."""

    signal: int

    @property
    def status(self) -> int:
        """The exit status of a process that this signal ended, as shells count."""
        return 128 + self.signal


@dataclass(frozen=True)
class Beat:
    """A rank's current activity. doing: its name. step: the training step, -1 before training.
    patient: True if the activity may take very long. first: True if it is the first of its kind
    since the rank's start. writing: step of the checkpoint that is written in the background, 0 if
    none."""

    doing: str
    step: int = -1
    patient: bool = False
    first: bool = False
    writing: int = 0


@dataclass(frozen=True)
class Error:
    """A rank's final error message, which its log on a full disk may lack. kind: the name of the
    error's class."""

    text: str
    kind: str = ""


StoreVerb = Literal["set", "append", "wait", "add", "check", "delete", "compare_set", "num_keys", "forget"]


@dataclass(frozen=True)
class StoreCall:
    """A rank's call of the rendezvous store. number: the rank's number of the call; for ``forget``,
    the call to cancel. values: in base64. amount: the amount to add."""

    number: int
    verb: StoreVerb
    keys: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    amount: int = 0


@dataclass(frozen=True)
class StoreAnswer:
    """The store's answer to a rank's call; ``set``, ``append`` and ``forget`` have no answer.
    values: in base64. amount: a number, or a count. error: the reason if the call failed."""

    number: int
    values: tuple[str, ...] = ()
    amount: int = 0
    error: str = ""


Message = Stop | Beat | Error | StoreCall | StoreAnswer
M = TypeVar("M")


class MessageLine(Generic[M]):
    """One end of a channel of messages: dataclasses of the given ``kinds``, as JSON, one per line.

    Accepted: a message of one of the kinds, with fields of the right types. Anything else, and more
    than ``most`` bytes without an end, raises EOFError, as if the other end was gone. No message is
    ignored.
    """

    def __init__(self, end: socket.socket, kinds: Sequence[type[M]], *, most: int = MOST) -> None:
        self._end, self._most = end, most
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._read = self._unsent = b""
        self._sending = threading.Lock()
        end.setblocking(False)

    def fileno(self) -> int:
        """Return the file descriptor to wait on."""
        return self._end.fileno()

    def send(self, message: M, *, keep: bool = False) -> None:
        """Send a message, if the other end is open and reads. keep: True to queue the message for
        ``flush`` however much is unsent; otherwise it is dropped if more than ``LONGEST`` bytes are
        unsent."""
        content = json.dumps([type(message).__name__, message], default=vars).encode() + b"\n"
        with self._sending:
            if keep or len(self._unsent) < LONGEST:
                self._unsent += content
        self.flush()

    def flush(self) -> bool:
        """Send unsent bytes as far as the other end accepts them; return True if none are left."""
        if not self._unsent:
            return True
        with self._sending, suppress(OSError):
            while self._unsent:
                self._unsent = self._unsent[self._end.send(self._unsent) :]
        return not self._unsent

    def receive(self) -> M | None:
        """Return the next message, None if none has arrived. Raises EOFError if the other end is
        gone or has sent an invalid message."""
        while b"\n" not in self._read:
            if len(self._read) > self._most:
                raise EOFError(f"received more than {self._most} bytes without an end of message")
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
        from plait.core.base.codec.data import decode  # imports pydantic, which a rank does not need at its start

        try:
            name, values = cast("tuple[str, Mapping[str, Any]]", parse_json(text))
            return decode(self._kinds[name], values)
        except (ValueError, TypeError, KeyError, JobError) as error:
            raise EOFError(f"received an invalid message: {str(error)[:200]}") from None

    def taken(self) -> socket.socket:
        """Return the socket, for a channel of other messages. Raises EOFError if more bytes were
        already read from it."""
        if self._read:
            raise EOFError("received more than one message")
        return self._end

    def close(self) -> None:
        """Close the channel; the other end gets EOFError."""
        self._end.close()


class Channel(MessageLine[Message]):
    """One end of the channel between the launcher and a rank."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end, (Stop, Beat, Error, StoreCall, StoreAnswer))

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """Return the launcher's end, and the socket for a rank to inherit."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(ours), theirs

    @staticmethod
    def inherited(descriptor: int) -> Channel:
        """Return the rank's end; its child processes do not inherit it."""
        end = socket.socket(fileno=descriptor)
        end.set_inheritable(False)
        return Channel(end)
