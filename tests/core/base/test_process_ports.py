"""A port that is kept for a process which listens there later."""

from __future__ import annotations

import socket

import pytest

from plait.core.base.process import reserved_port


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_nobody_else_is_given_it_and_a_server_of_ours_listens_there(host: str) -> None:
    with reserved_port(host) as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for _ in range(2):  # ranks that are started again
            with socket.create_server(("127.0.0.1", port)) as server:
                caller = socket.create_connection(("127.0.0.1", port))
                answerer, _ = server.accept()
                answerer.close()  # who hangs up first leaves the port waiting
                caller.close()


def test_two_are_never_the_same() -> None:
    with reserved_port() as first, reserved_port() as second:
        assert first != second
