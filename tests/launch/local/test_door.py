"""The port of agents and ranks: who knows the word comes in, whatever others say meanwhile."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator

import pytest

from plait.core.base.errors import LaunchError
from plait.launch.local import door
from plait.launch.local.door import AgentPort, Hello, RankConnection
from tests.support.lab import wait_until

TIER = "unit"

WORD = "sesame"


@pytest.fixture
def open_door() -> Iterator[AgentPort]:
    with AgentPort("127.0.0.1", 0, WORD) as found:
        yield found


def knock(there: AgentPort, said: bytes) -> socket.socket:
    end = socket.create_connection(("127.0.0.1", there.port), timeout=60)
    end.sendall(said)
    return end


def message(kind: str, **values: object) -> bytes:
    return json.dumps([kind, values]).encode() + b"\n"


HELLO = {"word": WORD, "host": "n1", "task": 0, "port": 4000}


def first(there: AgentPort) -> Hello | RankConnection:
    """What the next one says who is let in."""
    found: list[tuple[socket.socket, Hello | RankConnection]] = []

    def came() -> bool:
        found.extend(filter(None, [there.next(0.05)]))
        return bool(found)

    wait_until(came, "nobody was let in", seconds=60)
    found[0][0].close()
    return found[0][1]


@pytest.mark.parametrize(
    "said",
    [
        message("Hello", **{**HELLO, "word": 5}),
        message("Hello", **{**HELLO, "word": "\u00e9"}),
        b'["Hello", {"word": "\\ud800", "host": "n1", "task": 0, "port": 1}]\n',
        message("Hello", **{**HELLO, "word": None}),
        message("Hello", **{**HELLO, "word": [WORD]}),
        message("Hello", **{**HELLO, "word": WORD[:-1]}),
        message("Hello", **{**HELLO, "port": "4000"}),
        message("Hello", **{**HELLO, "host": {}}),
        message("Hello", word=WORD),
        message("Hello", **{**HELLO, "more": 1}),
        message("Kill", rank=0),
        message("Nonsense", rank=0),
        message("RankConnection", word=WORD, rank=True),
        message("RankConnection", word=WORD, rank=0) + b"and more",
        b'["Hello", 7]\n',
        b'["Hello"]\n',
        b"{}\n",
        b"null\n",
        b"\n",
        b"\xff\xfe\n",
        b"[" * 3_000 + b"\n",
        b"[" * 60_000 + b"\n",
        b"1" * 5_000 + b"\n",
        b"x" * 100_000,
        b"GET / HTTP/1.1\r\nHost: n1\r\n\r\n",
    ],
    ids=range(25),
)
def test_whatever_a_stranger_says_is_the_end_of_its_connection(open_door: AgentPort, said: bytes) -> None:
    with knock(open_door, said) as stranger, knock(open_door, message("Hello", **HELLO)):
        assert first(open_door) == Hello(WORD, "n1", 0, 4000)
        stranger.settimeout(0.0)

        def ended() -> bool:
            assert open_door.next(0.0) is None
            try:
                return stranger.recv(1) == b""
            except BlockingIOError:
                return False
            except ConnectionResetError:  # closed with something unread
                return True

        wait_until(ended, "the stranger is still listened to", seconds=60)


def test_those_that_say_nothing_keep_nobody_waiting(open_door: AgentPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "FIRST_MESSAGE_SECONDS", 1e9)  # they are not even given up
    silent = [knock(open_door, b"") for _ in range(30)]
    with knock(open_door, message("RankConnection", word=WORD, rank=3)):
        assert first(open_door) == RankConnection(WORD, 3)
    for one in silent:
        one.close()


def test_one_that_says_nothing_is_given_up_after_a_while(open_door: AgentPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "FIRST_MESSAGE_SECONDS", -1.0)
    with knock(open_door, b"") as silent:
        silent.settimeout(0.0)

        def ended() -> bool:
            assert open_door.next(0.05) is None
            try:
                return silent.recv(1) == b""
            except BlockingIOError:
                return False

        wait_until(ended, "it is still waited for", seconds=60)


def test_of_too_many_strangers_the_oldest_goes_and_agents_still_come_in(
    open_door: AgentPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_UNIDENTIFIED", 5)
    silent = [knock(open_door, b"") for _ in range(20)]
    with knock(open_door, message("Hello", **HELLO)):
        assert first(open_door) == Hello(WORD, "n1", 0, 4000)
    for one in silent:
        one.close()


def test_a_port_or_a_name_that_nobody_can_listen_at_is_one_sentence(open_door: AgentPort) -> None:
    with pytest.raises(
        LaunchError, match=f"cannot listen for its agents at 127.0.0.1:{open_door.port}: Address already"
    ):
        AgentPort("127.0.0.1", open_door.port, WORD)
    with pytest.raises(LaunchError, match=r"for its agents at no-such-host\.invalid: "):
        AgentPort("no-such-host.invalid", 0, WORD)


def test_a_port_of_an_address_that_is_no_interface_here_is_open_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a node behind a translated address."""
    with AgentPort("192.0.2.1", 0, WORD) as found, knock(found, message("Hello", **HELLO)):
        assert first(found) == Hello(WORD, "n1", 0, 4000)


@pytest.mark.parametrize("strangers", [0, 2])
def test_where_no_file_can_be_opened_strangers_go_first(
    open_door: AgentPort, monkeypatch: pytest.MonkeyPatch, strangers: int
) -> None:
    """And where there are none, nobody can come in any more."""
    silent = [knock(open_door, b"") for _ in range(strangers)]
    while strangers and len(open_door._strangers) < strangers:
        assert open_door.next(0.05) is None

    class Full:
        def __init__(self, listener: socket.socket) -> None:
            self.listener, self.times = listener, strangers

        def accept(self) -> tuple[socket.socket, object]:
            if self.times >= 0:
                self.times -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self.listener.accept()

    knocking = knock(open_door, b"")
    monkeypatch.setattr(open_door, "_listener", Full(open_door._listener))
    with pytest.raises(
        LaunchError, match="No further connection of an agent or a rank can be opened: Too many open files"
    ):
        open_door.next(60)
    assert not open_door._strangers
    for one in [*silent, knocking]:
        one.close()


def test_one_that_hangs_up_before_it_is_let_in_ends_nothing(
    open_door: AgentPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Aborted:
        def accept(self) -> None:
            raise OSError(errno.ECONNABORTED, "Software caused connection abort")

    with knock(open_door, b""):
        monkeypatch.setattr(open_door, "_listener", Aborted())
        assert open_door.next(60) is None


def test_who_is_let_in_has_a_line_that_is_quick_and_notices_the_end(open_door: AgentPort) -> None:
    with knock(open_door, message("RankConnection", word=WORD, rank=3)):
        found: list[tuple[socket.socket, Hello | RankConnection]] = []
        wait_until(lambda: found.extend(filter(None, [open_door.next(0.05)])) or found, "nobody was let in", seconds=60)
        with found[0][0] as end:
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_many_are_taken_at_a_time_and_all_come_in_one_after_the_other(open_door: AgentPort) -> None:
    """What was heard is handed out before anybody else is listened to."""
    ends = [knock(open_door, message("RankConnection", word=WORD, rank=rank)) for rank in range(70)]
    assert {one.rank for one in (first(open_door) for _ in ends) if isinstance(one, RankConnection)} == set(range(70))
    assert open_door.next(0.0) is None
    for one in ends:
        one.close()


def test_after_the_file_that_was_missing_others_come_in(open_door: AgentPort, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each stranger that goes one more is tried, as long as there are any."""
    silent = [knock(open_door, b"") for _ in range(2)]
    while len(open_door._strangers) < 2:
        assert open_door.next(0.05) is None
    listener = open_door._listener

    class Full:
        times = 1

        def accept(self) -> tuple[socket.socket, object]:
            if self.times:
                self.times -= 1
                raise OSError(errno.ENFILE, "Too many open files")
            return listener.accept()

    with knock(open_door, message("Hello", **HELLO)):
        monkeypatch.setattr(open_door, "_listener", Full())
        assert open_door.next(60) is None
        assert len(open_door._strangers) == 2  # one of those before, and the new one
        monkeypatch.setattr(open_door, "_listener", listener)
        assert first(open_door) == Hello(WORD, "n1", 0, 4000)
    for one in silent:
        one.close()


def test_whom_nobody_took_is_hung_up_on_at_the_end() -> None:
    with AgentPort("127.0.0.1", 0, WORD) as found:
        ends = [
            knock(found, b""),
            *(knock(found, message("RankConnection", word=WORD, rank=rank)) for rank in range(2)),
        ]
        first(found)
        while found._strangers and len(found._strangers) != 1:
            found.next(0.0)
    for end in ends:
        end.settimeout(60)
        assert end.recv(1) == b""
        end.close()


def test_other_errors_of_listening_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*asked: object, **options: object) -> socket.socket:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(LaunchError, match=r"cannot listen for its agents at 127\.0\.0\.1: Permission denied"):
        AgentPort("127.0.0.1", 0, WORD)


def test_a_greeting_may_come_in_pieces(open_door: AgentPort) -> None:
    said = message("Hello", **HELLO)
    with knock(open_door, said[:7]) as end:
        assert open_door.next(0.05) is None and open_door.next(0.05) is None
        end.sendall(said[7:])
        assert first(open_door) == Hello(WORD, "n1", 0, 4000)
