"""Lines of messages between processes: what is a message is taken, all else ends the line."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator

import pytest

from plait.core import channel
from plait.core.channel import Beat, Channel, Error, Stop


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = Channel.pair()
    with theirs:
        yield ours, theirs
    ours.close()


def test_messages_come_whole_and_in_their_order(pair: tuple[Channel, socket.socket]) -> None:
    ours, theirs = pair
    other = Channel(theirs)
    sent = [Beat("step 3", step=3, writing=2), Stop(15), Error("the disk is full: \u00e9\n")]
    for message in sent:
        other.send(message)
    assert [ours.receive() for _ in sent] == sent
    assert ours.receive() is None
    other.close()
    with pytest.raises(EOFError):
        ours.receive()


def test_a_message_that_comes_in_pieces_is_waited_for(pair: tuple[Channel, socket.socket]) -> None:
    ours, theirs = pair
    text = b'["Stop", {"signal": 2}]\n'
    for place in range(len(text) - 1):
        theirs.send(text[place : place + 1])
        assert ours.receive() is None
    theirs.send(text[-1:])
    assert ours.receive() == Stop(2)


@pytest.mark.parametrize(
    "text",
    [b"nonsense", b"[1]", b'["Stop", {"signal": "2"}]', b'["Stop", {}]', b'["Stop", {"signal": 2, "more": 1}]',
     b'["Kill", {"rank": 1}]', b'["Beat", {"doing": 3}]', b'["Beat", {"doing": "x", "step": 1.5}]', b"[" * 50_000,
     b'["Stop", [2]]', b"\xff", b'["Stop", {"signal": ' + b"1" * 5_000 + b"}]"],
    ids=range(12),
)  # fmt: skip
def test_what_is_no_message_ends_the_line(pair: tuple[Channel, socket.socket], text: bytes) -> None:
    ours, theirs = pair
    theirs.sendall(text + b"\n")
    with pytest.raises(EOFError, match="no message"):
        ours.receive()


def test_a_line_without_an_end_is_not_kept(
    pair: tuple[Channel, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    end, theirs = socket.socketpair()
    line = channel.Line[Stop](end, (Stop,), most=100)
    theirs.sendall(b"x" * 200)
    with pytest.raises(EOFError, match="more than 100 bytes came without an end"):
        line.receive()
    end.close()
    theirs.close()


def test_the_longest_thing_that_is_sent_is_taken(pair: tuple[Channel, socket.socket]) -> None:
    """The end of a log, every sign of which takes six bytes."""
    ours, theirs = pair
    theirs.setblocking(True)
    text = "\u00e9" * 16_384
    whole = json.dumps(["Error", {"text": text}]).encode() + b"\n"
    found = None
    for start in range(0, len(whole), 10_000):
        theirs.sendall(whole[start : start + 10_000])
        found = ours.receive()
    assert found == Error(text)


def test_a_ranks_end_is_not_for_what_it_starts() -> None:
    ours, theirs = Channel.pair()
    theirs.set_inheritable(True)
    channel = Channel.inherited(os.dup(theirs.fileno()))
    assert not channel.taken().get_inheritable()
    for end in (ours, channel, theirs):
        end.close()
