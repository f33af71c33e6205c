"""A port of this machine that stays free until the process it is meant for listens there."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def reserved_port(host: str = "127.0.0.1") -> Generator[int]:
    """A TCP port that the system gives to nobody else inside the ``with`` block. host: an address of this
    machine; empty for all of them.

    A port that is looked up and let go may be another's by the time that rank 0 has imported torch and
    listens. So it is held by a socket that does not listen itself: a server that sets SO_REUSEADDR, as those
    of Python and torch do, can listen there, and whoever asks for any free port is given another.

    >>> with reserved_port() as port, socket.create_server(("127.0.0.1", port)) as server:
    ...     server.getsockname() == ("127.0.0.1", port)
    True
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        yield held.getsockname()[1]
