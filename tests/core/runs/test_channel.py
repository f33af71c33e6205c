"""Lines of messages between processes: what is a message is taken, all else ends the line."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator

import pytest

from plait.core.runs import channel
from plait.core.runs.channel import Beat, Channel, Error, Stop


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
    with pytest.raises(EOFError, match="an invalid message"):
        ours.receive()


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


def test_a_line_of_other_messages_begins_where_nothing_was_read_ahead() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = channel.MessageLine[Stop](ours, (Stop,))
        theirs.sendall(b'["Stop", {"signal": 2}]\n')
        assert line.receive() == Stop(2)
        assert line.taken() is ours
        theirs.sendall(b'["Stop", {"signal": 2}]\nmore')
        assert line.receive() == Stop(2)
        with pytest.raises(EOFError, match="received more than one message"):
            line.taken()


def test_a_line_may_be_as_long_as_is_allowed() -> None:
    message = b'["Stop", {"signal": 2}]\n'
    for most, ends in ((len(message) - 1, False), (len(message) - 2, True)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            line = channel.MessageLine[Stop](ours, (Stop,), most=most)
            theirs.sendall(message[:-1])
            if ends:
                with pytest.raises(EOFError, match="without an end"):
                    line.receive()
                continue
            assert line.receive() is None
            theirs.sendall(message[-1:])
            assert line.receive() == Stop(2)


def test_nobody_waits_for_who_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said meanwhile is kept, up to some length, and follows with what is said next."""
    monkeypatch.setattr(channel, "LONGEST", 1000)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line, other = channel.MessageLine[Error](ours, (Error,)), channel.MessageLine[Error](theirs, (Error,))
        for number in range(3000):
            line.send(Error(f"{number:0200}"))
        came = list[str]()
        for _ in range(5):
            while (message := other.receive()) is not None:
                came.append(message.text)
            line.send(Error("next"))
        said = [text for text in came if text != "next"]
        assert 10 < len(said) < 3000
        assert said == [f"{number:0200}" for number in range(len(said))]
        assert came[-1] == "next"


def test_what_a_rank_inherits_is_not_for_its_own_children() -> None:
    ours, theirs = Channel.pair()
    ends = os.dup(theirs.fileno())
    os.set_inheritable(ends, True)
    channel = Channel.inherited(ends)
    assert not os.get_inheritable(ends)
    for end in (ours, channel, theirs):
        end.close()


def test_who_ends_for_a_signal_has_the_status_that_shells_count() -> None:
    assert Stop(15).status == 143
