"""What is named as bad on hosts, and what is not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.env import RankEnv
from plait.core.runs.channel import Channel, Stop
from plait.launch.health import links as self_check
from plait.launch.health.links import (
    EVERY_PAIR,
    ByteSink,
    CheckedHost,
    CheckLeader,
    JsonConnection,
    Limits,
    disk_of,
    findings,
    pairs_of,
    rate_to,
)
from tests.support.lab import REPOSITORY
from tests.support.ports import own_port

TIER = "unit"

DEFAULT = Limits()


@given(st.integers(1, 70))
def test_no_host_is_in_two_pairs_of_a_round(hosts: int) -> None:
    found = pairs_of(hosts)
    for one in found:
        busy = [host for pair in one for host in pair]
        assert len(busy) == len(set(busy))
    pairs = [pair for one in found for pair in one]
    assert len(pairs) == len(set(pairs))
    if hosts <= EVERY_PAIR:
        assert len(pairs) == hosts * (hosts - 1) // 2
    assert {host for pair in pairs for host in pair} == (set(range(hosts)) if hosts > 1 else set())


def report(hosts: int = 4, **changes: Any) -> dict[str, Any]:
    names = [f"n{number}" for number in range(hosts)]
    good = {"loopback": 5e9, "clock": [0.001, 0.0005], "disk": {"free": 1 << 40, "rate": 3e8}}
    links = [
        {"from": a, "to": b, "kind": "neighbours" if (i - j) % hosts in (1, hosts - 1) else "across", "rate": 1e9}
        for i, a in enumerate(names) for j, b in enumerate(names) if a != b
    ]  # fmt: skip
    told = {"hosts": {name: dict(good) for name in names}, "missing": [], "links": links,
            "all_at_once": dict.fromkeys(names, 9e8)}  # fmt: skip
    return told | changes


def named(told: dict[str, Any], limits: Limits = DEFAULT) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.what, one.hosts) for one in findings(told, limits)]


def test_nothing_is_wrong() -> None:
    assert named(report()) == []
    assert named(report(1, all_at_once={})) == []


def test_what_is_slower_than_its_kind_is_named() -> None:
    told = report()
    told["links"][0]["rate"] = 2e8
    told["hosts"]["n2"]["loopback"] = 1e9
    told["all_at_once"]["n3"] = 1e8
    assert named(told) == [("loopback", ("n2",)), ("link", ("n0", "n1")), ("all at once", ("n3",))]
    told["links"][0]["rate"] = 4e8  # not yet a quarter
    assert ("link", ("n0", "n1")) not in named(told)
    assert ("link", ("n0", "n1")) in named(told, Limits(rate=5e8))


def test_a_host_all_of_whose_links_are_slow_is_named_and_not_those_whom_it_reaches() -> None:
    told = report()
    for link in told["links"]:
        if "n2" in (link["from"], link["to"]):
            link["rate"] = 5e7
    assert named(told) == [("link", ("n2",))]


@pytest.mark.parametrize(
    ("host", "what", "says"),
    [
        ({"clock": [-2.5, 0.1]}, "clock", "2.50 s behind"), ({"clock": None}, "clock", "could not be read"),
        ({"disk": {"error": "/x: Read-only file system"}}, "disk", "Read-only"),
        ({"disk": {"free": 1000, "rate": 1e9}}, "disk", "0.00 GiB free"),
        ({"disk": {"free": 1 << 40, "rate": 1e6}}, "disk", "writes 1 MB/s"), ({"disk": None}, "disk", "did not report"),
        ({"loopback": None}, "loopback", "no answer"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_host_is_said(host: dict[str, Any], what: str, says: str) -> None:
    told = report()
    told["hosts"]["n1"] |= host
    (found,) = findings(told, Limits())
    assert (found.what, found.hosts) == (what, ("n1",))
    assert says in found.why


def test_a_clock_within_its_error_is_fine() -> None:
    told = report()
    told["hosts"]["n1"]["clock"] = [1.2, 0.3]
    assert named(told) == []


def test_missing_hosts_and_broken_links_are_named() -> None:
    told = report(missing=[4])
    told["links"][0] = {"from": "n0", "to": "n1", "kind": "neighbours", "error": "timed out"}
    found = findings(told, Limits(), [f"n{number}" for number in range(5)])
    assert [(one.what, one.hosts) for one in found] == [("missing", ("n4",)), ("link", ("n0", "n1"))]


@pytest.mark.system
def test_a_machine_whose_disk_is_too_slow(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "plait.cli.main", "check", "--json", "--disk", "999999999", "--size", "1"], cwd=tmp_path,
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert "disk" in [one["what"] for one in told["bad"]]
    (host,) = told["hosts"].values()
    assert host["loopback"] > 0
    assert host["disk"]["rate"] > 0
    assert told["links"] == []
    assert list((tmp_path / "runs").iterdir()) == []


# ---- hosts that are threads ----

KIB = 1 << 10


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "DISK_BYTES", 1 << 18)
    monkeypatch.setattr(self_check, "CLOCK_EXCHANGES", 3)


def hang_up(peer: JsonConnection) -> None:
    with suppress(OSError):  # something may be unsaid
        peer._lines.close()
    peer.end.close()


def checked(folder: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, came: list[int]) -> dict[str, Any]:
    """The report of node 0 on those of ``nodes`` that came; two ranks on each."""
    port = own_port()
    here = threading.local()

    def read() -> RankEnv:
        node, local = here.rank
        return RankEnv(rank=2 * node + local, world_size=2 * nodes, local_rank=local, local_world_size=2,
                       node_rank=node, master_port=port)  # fmt: skip

    def be(node: int, local: int) -> None:
        here.rank = node, local
        ended.append(self_check.main())

    class Kept(JsonConnection):
        """A connection that is there until the process of node 0 would end."""

        def __init__(self, end: socket.socket) -> None:
            super().__init__(end)
            kept.append((here.rank[0], self))

    ended, kept = list[int](), list[tuple[int, JsonConnection]]()
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(self_check, "JsonConnection", Kept)
    monkeypatch.setattr(RankEnv, "read", staticmethod(read))
    monkeypatch.setattr(self_check, "take_launcher", lambda: None)
    monkeypatch.setattr(self_check, "this_host", lambda: f"n{here.rank[0]}" if hasattr(here, "rank") else "disk")
    monkeypatch.setattr("sys.argv", ["self_check", str(folder), str(folder / "disk"), str(64 * KIB)])
    ranks = [threading.Thread(target=be, args=(node, local)) for node in came for local in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks[:2]:
        rank.join(60)
    for leads in (True, False):
        for peer in [peer for node, peer in kept if (node == 0) == leads]:
            hang_up(peer)
        for rank in ranks:
            rank.join(60)
    assert ended == [0] * len(ranks)
    return json.loads((folder / "check.json").read_text())


@pytest.mark.usefixtures("quick")
def test_four_hosts_measure_every_link_in_both_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(tmp_path, monkeypatch, 4, [0, 1, 2, 3])
    names = [f"n{node}" for node in range(4)]
    assert [found["hosts"][name]["node"] for name in names] == [0, 1, 2, 3]
    assert found["missing"] == []
    kinds = {(link["from"], link["to"]): link["kind"] for link in found["links"]}
    assert set(kinds) == {(a, b) for a in names for b in names if a != b}
    assert sorted(pair for pair, kind in kinds.items() if kind == "across") == [
        ("n0", "n2"), ("n1", "n3"), ("n2", "n0"), ("n3", "n1")
    ]  # fmt: skip
    assert all(link["rate"] > 0 for link in found["links"])
    assert set(found["all_at_once"]) == set(names) and min(found["all_at_once"].values()) > 0
    for name in names:
        host = found["hosts"][name]
        assert host["loopback"] > 0 and host["disk"]["rate"] > 0 and host["disk"]["free"] > 0
        offset, error = host["clock"]
        assert abs(offset) <= error + 1e-6
    assert found["hosts"]["n0"]["clock"] == [0.0, 0.0]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == []


@pytest.mark.usefixtures("quick")
def test_hosts_that_do_not_come_are_waited_for_no_longer_than_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "PATIENCE", 0.5)
    found = checked(tmp_path, monkeypatch, 3, [0])
    assert found["missing"] == [1, 2]
    assert (list(found["hosts"]), found["links"], found["all_at_once"]) == (["n0"], [], {})


def test_nobody_waits_for_ever_for_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "PATIENCE", 0.2)
    monkeypatch.setattr(self_check, "take_launcher", lambda: None)
    alone = RankEnv(rank=1, world_size=2, local_world_size=1, node_rank=1, master_port=own_port())
    monkeypatch.setattr(RankEnv, "read", staticmethod(lambda: alone))
    monkeypatch.setattr("sys.argv", ["self_check", "results", "disk", "1"])
    assert self_check.main() == 0


def pair_of() -> tuple[JsonConnection, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return JsonConnection(ours), server.accept()[0]


def test_a_host_that_is_gone_leaves_out_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, theirs = pair_of()
    gone = {"node": 1, "host": "n1", "where": ("127.0.0.1", own_port())}
    theirs.close()
    monkeypatch.setattr(self_check, "DISK_BYTES", 1 << 18)
    leader = CheckLeader(CheckedHost(0, "127.0.0.1", tmp_path, KIB), {1: (peer, gone)}, 2)
    assert list(leader.request({0: {"do": "clock"}, 1: {"do": "clock"}})) == [0]
    found = leader.report()
    assert found["hosts"]["n1"] == {"node": 1, "clock": None, "loopback": None}
    there, back = found["links"]
    assert (there["to"], there["error"]) == ("n1", "Connection refused")
    assert (back["from"], back["error"]) == ("n1", "the host is gone")
    hang_up(peer)


@pytest.mark.parametrize("said", [b"", b'"half', b"no JSON\n"])
def test_a_line_that_is_no_value_is_an_error(said: bytes) -> None:
    peer, theirs = pair_of()
    theirs.sendall(said)
    theirs.close()
    with pytest.raises((OSError, ValueError)):
        peer.hear()
    hang_up(peer)


def test_an_order_that_nobody_knows_is_answered_with_nothing(tmp_path: Path) -> None:
    host = CheckedHost(3, "127.0.0.1", tmp_path, KIB)
    assert host.do({"do": "dance"}) is None
    assert host.do({"do": "send", "to": []}) == []
    rate, refused = host.do({"do": "send", "to": [host.own.where, ("127.0.0.1", own_port())]})
    assert rate > 0 and refused == "Connection refused"
    assert (host.hello()["node"], host.hello()["where"]) == (3, host.sink.where)


@pytest.mark.parametrize("said", [b"x" * 20, b"", b"-1".rjust(20)])
def test_a_stranger_who_sends_no_number_ends_no_sink(said: bytes) -> None:
    sink = ByteSink("127.0.0.1")
    with socket.create_connection(sink.where) as stranger:
        stranger.sendall(said)
    assert rate_to(sink.where, 3 * KIB + 1) > 0


def test_a_sink_says_when_it_has_all_and_not_before() -> None:
    sink = ByteSink("127.0.0.1")
    with socket.create_connection(sink.where) as end:
        end.settimeout(60)
        end.sendall(f"{10:>20}".encode())
        assert end.recv(1) == b"+"
        end.sendall(b"x" * 9)
        end.settimeout(0.2)
        with pytest.raises(TimeoutError):
            end.recv(1)
        end.settimeout(60)
        end.sendall(b"x")
        assert end.recv(2) == b"+"


def test_a_disk_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file: " in disk_of(tmp_path / "file")["error"]


@pytest.mark.parametrize(("message", "status"), [(Stop(15), 143), (None, 1)])
def test_a_host_ends_with_its_launcher(message: Stop | None, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Channel.pair()
    ended, told = threading.Event(), list[int]()

    def leave(code: int) -> None:
        told.append(code)
        ended.set()
        threading.Event().wait()  # a process that has ended does nothing more

    monkeypatch.setattr(self_check, "take_launcher", lambda: os.dup(theirs.fileno()))
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(RankEnv, "read", staticmethod(lambda: RankEnv(local_rank=1, local_world_size=2)))
    assert self_check.main() == 0
    ours.send(message) if message else ours.close()
    theirs.close()
    assert ended.wait(60)
    assert told == [status]
    ours.close()


@pytest.mark.parametrize("hang_up", [b"", b"-"])
def test_a_stream_that_is_not_taken_to_its_end_is_an_error(hang_up: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            end, _ = server.accept()
            with end:
                left = int(end.recv(20))
                end.sendall(b"+")
                while left:
                    left -= len(end.recv(left))
                end.sendall(hang_up)

        taking = threading.Thread(target=take)
        taking.start()
        with pytest.raises(ConnectionError, match="the other end is gone"):
            rate_to(server.getsockname(), 1000)
        taking.join()


def test_a_rate_that_was_asked_for_is_asked_of_every_link() -> None:
    told = report()
    told["links"][0]["rate"] = 0.79e9
    assert named(told) == []
    ends = (told["links"][0]["from"], told["links"][0]["to"])
    found = {one.hosts: one.why for one in findings(told, replace(DEFAULT, rate=0.8e9))}
    assert found.keys() == {ends}
    assert found[ends].endswith("passes 790 MB/s, less than the required 800 MB/s")
    assert not named(told, replace(DEFAULT, rate=0.79e9))
