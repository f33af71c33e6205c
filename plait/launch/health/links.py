"""``plait check`` on hosts: measure loopback, links, clock and disk of each, without torch; and
report what is wrong.

    python -m plait.launch.health.links RESULT_FOLDER DISK_FOLDER BYTES

Started as every rank of a placement; on each host, the first rank does all the work. Node 0 leads:
the other hosts connect to it at the ranks' rendezvous address and follow its orders, so that only
the links to be measured are busy. The order is from the inside out, as in MegaScale (arXiv
2402.15627, 4.3): loopback, neighbours, all pairs, all at once. A link is measured by one TCP stream
in each direction.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.core.base.cluster_env import this_host
from plait.core.base.env import RankEnv, take_launcher
from plait.core.base.files import replacing
from plait.core.runs.channel import Channel, Stop
from plait.core.topology.links import kind_of, rounds, slower

PATIENCE = 10.0
"""Seconds that node 0 waits until all hosts have connected."""
MEASUREMENT_TIMEOUT = 30.0
"""Timeout of one measurement, seconds."""
EVERY_PAIR = 16
"""The largest number of hosts of which all pairs are measured; above it, pairs at distances 1, 2,
4, ... only."""
CLOCK_EXCHANGES = 16
"""Number of message exchanges to estimate a clock's offset; the fastest one counts."""
DISK_BYTES = 16 << 20
"""Bytes written to measure the disk."""
_BLOCK = bytes(1 << 18)


class JsonConnection:
    """A connection that sends and receives one line of JSON per message."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(MEASUREMENT_TIMEOUT)
        self.end, self._lines = end, end.makefile("rwb")

    def say(self, value: Any) -> None:
        """Send a value as one line of JSON. Raises OSError if the connection is closed."""
        self._lines.write(json.dumps(value).encode() + b"\n")
        self._lines.flush()

    def hear(self) -> Any:
        """Receive the next value. Raises OSError if the connection is closed."""
        line = self._lines.readline(1 << 20)
        if not line.endswith(b"\n"):
            raise ConnectionError("the other end is gone")
        return json.loads(line)

    def request(self, value: Any) -> Any:
        """Send a value, and return the answer. Raises OSError if the connection is closed."""
        self.say(value)
        return self.hear()


# ---- measurements ----


class ByteSink:
    """A server that receives the bytes that hosts send to this one, and confirms when all have
    arrived."""

    def __init__(self, address: str) -> None:
        self._server = socket.create_server((address, 0), backlog=256)
        self.where = (address, self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            end, _ = self._server.accept()
            threading.Thread(target=self._take, args=(end,), daemon=True).start()

    @staticmethod
    def _take(end: socket.socket) -> None:
        with suppress(OSError, ValueError), end:
            end.settimeout(MEASUREMENT_TIMEOUT)
            left = int(end.recv(20))
            end.sendall(b"+")
            while left > 0 and (got := len(end.recv(min(left, 1 << 20)))):
                left -= got
            end.sendall(b"+")


def rate_to(where: Sequence[Any], nbytes: int) -> float:
    """Return the rate of one TCP stream to ``where`` (address, port), bytes per second. Raises
    OSError."""
    with socket.create_connection((where[0], where[1]), timeout=MEASUREMENT_TIMEOUT) as end:
        end.sendall(f"{nbytes:>20}".encode())
        end.recv(1)
        began, left = time.perf_counter(), nbytes
        while left > 0:
            end.sendall(_BLOCK[: min(left, len(_BLOCK))])
            left -= len(_BLOCK)
        if end.recv(1) != b"+":
            raise ConnectionError("the other end is gone")
        return nbytes / (time.perf_counter() - began)


def disk_of(folder: Path) -> dict[str, Any]:
    """Return the free bytes of a folder's disk, and the rate of a write with fsync in bytes per
    second; ``error`` if it fails."""
    draft = folder / f".check-{this_host()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free, began = shutil.disk_usage(folder).free, time.perf_counter()
        with draft.open("wb", buffering=0) as file:
            for _ in range(DISK_BYTES // len(_BLOCK)):
                file.write(_BLOCK)
            os.fsync(file.fileno())
        return {"free": free, "rate": DISK_BYTES / (time.perf_counter() - began)}
    except OSError as error:
        return {"error": f"{folder}: {error.strerror or error}"}
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def pairs_of(hosts: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs to measure at the same time: all pairs, or with many hosts those at
    power-of-two distances."""
    every = range(1, hosts // 2 + 1)
    return rounds(hosts, every if hosts <= EVERY_PAIR else (1 << power for power in range((hosts // 2).bit_length())))


# ---- a follower host ----


class CheckedHost:
    """This host, in the part that every host has: it carries out node 0's orders."""

    def __init__(self, node: int, address: str, folder: Path, nbytes: int) -> None:
        self.node, self.folder, self.nbytes = node, folder, nbytes
        self.sink, self.own = ByteSink(address), ByteSink("127.0.0.1")

    def hello(self) -> dict[str, Any]:
        """Return this host's first message: its node number, name and the address of its sink."""
        return {"node": self.node, "host": this_host(), "where": self.sink.where}

    def do(self, order: dict[str, Any]) -> Any:
        """Carry out an order of node 0, a measurement; return its result."""
        match order["do"]:
            case "clock":
                return time.time()
            case "alone":
                rate = statistics.median(rate_to(self.own.where, 4 * self.nbytes) for _ in range(3))
                return {"loopback": rate, "disk": disk_of(self.folder)}
            case "send":
                with ThreadPoolExecutor(max(1, len(order["to"]))) as pool:
                    return list(pool.map(self._rate, order["to"]))
            case _:
                return None

    def _rate(self, where: Sequence[Any]) -> float | str:
        try:
            return rate_to(where, self.nbytes)
        except OSError as error:
            return str(error.strerror or error)

    def serve(self, leader: JsonConnection) -> None:
        """Carry out node 0's orders until it disconnects."""
        leader.say(self.hello())
        with suppress(OSError):
            while True:
                leader.say(self.do(leader.hear()))


# ---- node 0 ----


class CheckLeader:
    """Node 0, which gives orders to all hosts that have connected in time; ``report`` measures and
    returns the results."""

    def __init__(self, own: CheckedHost, peers: dict[int, tuple[JsonConnection, dict[str, Any]]], nodes: int) -> None:
        self.own, self.peers, self.nodes = own, peers, nodes
        self.here = {own.node: own.hello(), **{node: hello for node, (_, hello) in peers.items()}}

    def request(self, orders: dict[int, dict[str, Any]]) -> dict[int, Any]:
        """Have hosts carry out orders at the same time; return their results. orders, results: by
        node, without hosts that have disconnected."""

        def one(node: int) -> Any:
            try:
                return self.own.do(orders[node]) if node == self.own.node else self.peers[node][0].request(orders[node])
            except (OSError, ValueError):
                return None

        with ThreadPoolExecutor(max(1, len(orders))) as pool:
            answers = dict(zip(orders, pool.map(one, orders), strict=True))
        return {node: answer for node, answer in answers.items() if answer is not None}

    def report(self) -> dict[str, Any]:
        """Return all measurements, by host name; rates in bytes per second."""
        alone = self.request({node: {"do": "alone"} for node in self.here})
        names = {node: hello["host"] for node, hello in self.here.items()}
        links: list[dict[str, Any]] = []
        known = sorted(self.here)
        for pairs in pairs_of(len(known)):
            for turn in (pairs, [(b, a) for a, b in pairs]):
                ends = [(known[a], known[b], kind_of(a, b, len(known))) for a, b in turn]
                found = self.request({a: {"do": "send", "to": [self.here[b]["where"]]} for a, b, _ in ends})
                links += [_link(names[a], names[b], found.get(a, ["the host is gone"])[0], kind) for a, b, kind in ends]
        return {
            "hosts": {
                names[node]: {"node": node, "clock": self._clock(node), **alone.get(node, {"loopback": None})}
                for node in known
            },
            "missing": [node for node in range(self.nodes) if node not in self.here],
            "links": links,
            "all_at_once": self._together(names),
        }  # fmt: skip

    def _together(self, names: dict[int, str]) -> dict[str, float]:
        """Return the bytes per second that each host sends while every host sends to every other
        host; empty for fewer than three hosts."""
        if len(names) < 3:
            return {}
        to = {node: [hello["where"] for other, hello in self.here.items() if other != node] for node in self.here}
        found = self.request({node: {"do": "send", "to": to[node]} for node in names})
        return {names[node]: sum(rate for rate in rates if not isinstance(rate, str)) for node, rates in found.items()}

    def _clock(self, node: int) -> list[float] | None:
        """Return (seconds that a host's clock is ahead of this host's, their uncertainty in
        seconds); None if unknown."""
        if node == self.own.node:
            return [0.0, 0.0]
        best: tuple[float, float] | None = None
        with suppress(OSError, ValueError):
            for _ in range(CLOCK_EXCHANGES):
                before = time.time()
                there = self.peers[node][0].request({"do": "clock"})
                after = time.time()
                if best is None or after - before < best[1]:
                    best = there - (before + after) / 2, after - before
        return None if best is None else [best[0], best[1] / 2]


def _link(source: str, target: str, rate: float | str, kind: str) -> dict[str, Any]:
    found = {"error": rate} if isinstance(rate, str) else {"rate": rate}
    return {"from": source, "to": target, "kind": kind, **found}


# ---- findings ----

SLOW_RATIO = 1 / 4
"""A rate below this share of the median of its kind is reported."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a check. rate: bytes per second that a link must have; 0: links are only compared.
    clock: the largest clock offset in seconds. disk_rate: least bytes per second of a write.
    disk_free: least free bytes."""

    rate: float = 0.0
    clock: float = 1.0
    disk_rate: float = 10e6
    disk_free: int = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem. what: ``missing``, ``loopback``, ``link``, ``all at once``, ``clock`` or ``disk``.
    hosts: the hosts concerned. why: a description."""

    what: str
    hosts: tuple[str, ...]
    why: str


def findings(report: Mapping[str, Any], limits: Limits, names: Sequence[str] = ()) -> list[Finding]:
    """Return all problems of a report. names: the names of all expected hosts, by node."""
    hosts: Mapping[str, Any] = report["hosts"]
    found = list[tuple[str, tuple[str, ...], str]]()
    for node in map(int, report["missing"]):
        host = names[node] if node < len(names) else f"node {node}"
        why = f"{host} did not reach the first host in time: its link is cut, or nothing answers there"
        found.append(("missing", (host,), why))
    slow = _slow({host: one["loopback"] for host, one in hosts.items()})
    found += [("loopback", (host,), f"the loopback of {host} {why}") for host, why in slow.items()]
    found += _links(report["links"], limits)
    slow = _slow(report["all_at_once"])
    found += [("all at once", (host,), f"while all hosts send to all, {host} {why}") for host, why in slow.items()]
    for host, one in hosts.items():
        if why := _clock(host, one.get("clock"), limits.clock):
            found.append(("clock", (host,), why))
        if why := _disk(host, one.get("disk"), limits):
            found.append(("disk", (host,), why))
    return [Finding(what=what, hosts=ends, why=why) for what, ends, why in found]


def _links(links: Sequence[Mapping[str, Any]], limits: Limits) -> list[tuple[str, tuple[str, ...], str]]:
    """Return (kind, hosts, description) of each problem: broken links and links below the required
    rate; hosts whose best link is slower than other hosts'; and links slower than the best links of
    both ends."""
    best: dict[str, float] = {}
    for one in links:
        for host in (one["from"], one["to"]):
            best[host] = max(best.get(host, 0.0), one.get("rate", 0.0))
    slow = _slow(best) if any(best.values()) else {}
    found = list[tuple[str, tuple[str, ...], str]]()
    found += [("link", (host,), f"the link of {host}, to its best neighbour, {why}") for host, why in slow.items()]
    for one in links:
        ends, rate = (one["from"], one["to"]), one.get("rate")
        usual = min(best[host] for host in ends)
        if rate is None:
            why = f"does not work: {one['error']}"
        elif rate < limits.rate:
            why = f"passes {in_rate(rate)}, less than the required {in_rate(limits.rate)}"
        elif rate < usual * SLOW_RATIO:
            why = f"passes {in_rate(rate)}, but both hosts reach {in_rate(usual)} to others"
        else:
            continue
        found.append(("link", ends, f"the link from {ends[0]} to {ends[1]} {why}"))
    return found


def _slow(rates: Mapping[str, float | None]) -> dict[str, str]:
    """Return a description for each host whose rate is missing, or far below the median
    (``SLOW_RATIO``). rates: bytes per second by host."""
    known = {key: rate for key, rate in rates.items() if rate is not None}
    return {key: "gave no answer" for key, rate in rates.items() if rate is None} | {
        key: f"passes {in_rate(known[key])}, and the median of all is {in_rate(usual)}"
        for key, usual in slower(known, SLOW_RATIO).items()
    }


def _clock(host: str, clock: Sequence[float] | None, most: float) -> str:
    if clock is None:
        return f"the clock of {host} could not be read"
    ahead, error = clock
    if abs(ahead) - error <= most:
        return ""
    way = "ahead of" if ahead > 0 else "behind"
    why = f"the clock of {host} is {abs(ahead):.2f} s {way} the first host's (give or take {error * 1e3:.1f} ms)"
    return f"{why}: logs and timelines will not match"


def _disk(host: str, disk: Mapping[str, Any] | None, limits: Limits) -> str:
    if disk is None:
        return f"{host} did not report on its disk"
    if "error" in disk:
        return f"{host} cannot write: {disk['error']}"
    if disk["free"] < limits.disk_free:
        least = f"{limits.disk_free / 2**30:g} GiB"
        return f"{host} sees {disk['free'] / 2**30:.2f} GiB free on the disk, less than {least}"
    slow = disk["rate"] < limits.disk_rate
    return f"{host} writes {in_rate(disk['rate'])} to the disk, less than {in_rate(limits.disk_rate)}" if slow else ""


def in_rate(rate: float) -> str:
    """Format bytes per second.

    >>> in_rate(1.25e8)
    '125 MB/s'
    """
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:,.3g} MB/s"


# ---- the process ----


def main() -> int:
    """Run one host's part of the check; return the exit status."""
    _end_with_launcher()
    me = RankEnv.read()
    if me.local_rank:
        return 0
    result, folder, nbytes = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    nodes = me.world_size // me.local_world_size
    if me.node_rank == 0:
        with socket.create_server((me.master_addr, me.master_port), backlog=256) as server:
            own = CheckedHost(0, me.master_addr, folder, nbytes)
            report = CheckLeader(own, _gathered(server, nodes - 1), nodes).report()
        with replacing(result / "check.json", parents=False) as path:
            path.write_text(json.dumps(report) + "\n")
        return 0
    if leader := _reached(me.master_addr, me.master_port):
        CheckedHost(me.node_rank, leader.getsockname()[0], folder, nbytes).serve(JsonConnection(leader))
    return 0


def _gathered(server: socket.socket, others: int) -> dict[int, tuple[JsonConnection, dict[str, Any]]]:
    """Return (connection, first message) of the hosts that connect in time, by node."""
    found: dict[int, tuple[JsonConnection, dict[str, Any]]] = {}
    end = time.monotonic() + PATIENCE
    while len(found) < others and (left := end - time.monotonic()) > 0:
        server.settimeout(left)
        with suppress(OSError, ValueError, KeyError, TypeError):
            peer = JsonConnection(server.accept()[0])
            hello = peer.hear()
            found[int(hello["node"])] = peer, hello
    return found


def _reached(host: str, port: int) -> socket.socket | None:
    """Connect to node 0; None if it does not answer in time. Node 0 itself reports the missing
    hosts."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with suppress(OSError):
            return socket.create_connection((host, port), timeout=1.0)
        time.sleep(0.1)
    return None


def _end_with_launcher() -> None:
    descriptor = take_launcher()
    if descriptor is None:
        return
    line = Channel.inherited(descriptor)

    def listen() -> None:
        while True:
            try:
                message = line.receive()
            except EOFError:
                os._exit(1)
            if isinstance(message, Stop):
                os._exit(message.status)
            time.sleep(0.1)

    threading.Thread(target=listen, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
