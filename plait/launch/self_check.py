"""A host's part in ``plait check``: what its loopback, its links, its clock and its disk do, without torch.

    python -m plait.launch.self_check RESULT_FOLDER DISK_FOLDER BYTES

Started as every rank of a place; of a host's ranks the first does it all. Node 0 leads: the others connect to
it at the address where ranks would meet, and do what it says, so that exactly the links that are to be
measured are busy. From the inside out, as MegaScale does it (arXiv 2402.15627, 4.3): loopback, neighbours,
all pairs, all at once. A link is measured by one TCP stream in each direction.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from plait.core.base.cluster_env import this_host
from plait.core.base.env import RankEnv, take_launcher
from plait.core.base.files import replacing
from plait.core.runs.channel import Channel, Stop

PATIENCE = 10.0
"""Seconds in which all hosts must have come."""
LONGEST = 30.0
"""Seconds that one measurement may take."""
EVERY_PAIR = 16
"""Hosts up to which all pairs are measured; of more, those 1, 2, 4, ... places apart."""
CLOCKS = 16
"""Exchanges from which a clock's offset follows: the fastest counts."""
DISK = 16 << 20
"""Bytes that are written to the disk."""
_BLOCK = bytes(1 << 18)


class Peer:
    """A connection with a line of JSON for each message."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(LONGEST)
        self.end, self._lines = end, end.makefile("rwb")

    def say(self, value: Any) -> None:
        """Send a value."""
        self._lines.write(json.dumps(value).encode() + b"\n")
        self._lines.flush()

    def hear(self) -> Any:
        """The next one. Raises OSError when the other end is gone."""
        line = self._lines.readline(1 << 20)
        if not line.endswith(b"\n"):
            raise ConnectionError("the other end is gone")
        return json.loads(line)

    def ask(self, value: Any) -> Any:
        """Send one, and hear the answer."""
        self.say(value)
        return self.hear()


# ---- what is measured ----


class Sink:
    """Takes what others send to this host, and says when it has all of it."""

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
            end.settimeout(LONGEST)
            left = int(end.recv(20))
            end.sendall(b"+")
            while left > 0 and (got := len(end.recv(min(left, 1 << 20)))):
                left -= got
            end.sendall(b"+")


def rate_to(where: Sequence[Any], nbytes: int) -> float:
    """Bytes per second of one stream. Raises OSError."""
    with socket.create_connection((where[0], where[1]), timeout=LONGEST) as end:
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
    """Free bytes, and bytes per second of a file that is written down to the disk."""
    draft = folder / f".check-{this_host()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free, began = shutil.disk_usage(folder).free, time.perf_counter()
        with draft.open("wb", buffering=0) as file:
            for _ in range(DISK // len(_BLOCK)):
                file.write(_BLOCK)
            os.fsync(file.fileno())
        return {"free": free, "rate": DISK / (time.perf_counter() - began)}
    except OSError as error:
        return {"error": f"{folder}: {error.strerror or error}"}
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def rounds(hosts: int) -> list[list[tuple[int, int]]]:
    """Pairs to measure at the same time, no host twice in a round: neighbours first, then the others.

    >>> rounds(4)
    [[(0, 1), (2, 3)], [(1, 2), (0, 3)], [(0, 2), (1, 3)]]
    """
    apart = list(range(1, hosts // 2 + 1))
    if hosts > EVERY_PAIR:
        apart = [1 << power for power in range((hosts // 2).bit_length())]
    left = [tuple(sorted((host, (host + step) % hosts))) for step in apart for host in range(hosts)]
    pairs = list(dict.fromkeys((a, b) for a, b in left if a != b))
    found: list[list[tuple[int, int]]] = []
    while pairs:
        busy: set[int] = set()
        now = [pair for pair in pairs if not busy.intersection(pair) and not busy.update(pair)]
        found.append(now)
        pairs = [pair for pair in pairs if pair not in now]
    return found


# ---- a host that is led ----


class Host:
    """This host: does what node 0 says."""

    def __init__(self, node: int, address: str, folder: Path, nbytes: int) -> None:
        self.node, self.folder, self.nbytes = node, folder, nbytes
        self.sink, self.own = Sink(address), Sink("127.0.0.1")

    def hello(self) -> dict[str, Any]:
        """Who it is."""
        return {"node": self.node, "host": this_host(), "where": self.sink.where}

    def do(self, order: dict[str, Any]) -> Any:
        """An answer to an order."""
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

    def serve(self, leader: Peer) -> None:
        """Until node 0 hangs up."""
        leader.say(self.hello())
        with suppress(OSError):
            while True:
                leader.say(self.do(leader.hear()))


# ---- node 0 ----


class Leader:
    """Node 0: knows all hosts that have come; ``report`` is what they have found."""

    def __init__(self, own: Host, peers: dict[int, tuple[Peer, dict[str, Any]]], nodes: int) -> None:
        self.own, self.peers, self.nodes = own, peers, nodes
        self.here = {own.node: own.hello(), **{node: hello for node, (_, hello) in peers.items()}}

    def ask(self, orders: dict[int, dict[str, Any]]) -> dict[int, Any]:
        """Answers of hosts that do something at the same time; without those that are gone meanwhile."""

        def one(node: int) -> Any:
            try:
                return self.own.do(orders[node]) if node == self.own.node else self.peers[node][0].ask(orders[node])
            except (OSError, ValueError):
                return None

        with ThreadPoolExecutor(max(1, len(orders))) as pool:
            answers = dict(zip(orders, pool.map(one, orders), strict=True))
        return {node: answer for node, answer in answers.items() if answer is not None}

    def report(self) -> dict[str, Any]:
        """All measurements, hosts by their names."""
        alone = self.ask({node: {"do": "alone"} for node in self.here})
        names = {node: hello["host"] for node, hello in self.here.items()}
        links: list[dict[str, Any]] = []
        known = sorted(self.here)
        for now in rounds(len(known)):
            pairs = [(known[a], known[b]) for a, b in now]
            for turn in (pairs, [(b, a) for a, b in pairs]):
                found = self.ask({a: {"do": "send", "to": [self.here[b]["where"]]} for a, b in turn})
                near = {1, len(known) - 1}
                links += [
                    _link(names[a], names[b], found.get(a, ["the host is gone"])[0],
                          "neighbours" if abs(known.index(a) - known.index(b)) in near else "across")
                    for a, b in turn
                ]  # fmt: skip
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
        """Bytes per second that each host sends while all send to all."""
        if len(names) < 3:
            return {}
        to = {node: [hello["where"] for other, hello in self.here.items() if other != node] for node, hello in
              self.here.items()}  # fmt: skip
        found = self.ask({node: {"do": "send", "to": to[node]} for node in names})
        return {names[node]: sum(rate for rate in rates if not isinstance(rate, str)) for node, rates in found.items()}

    def _clock(self, node: int) -> list[float] | None:
        """Seconds by which a host's clock is ahead of this one's, and how far that may be off."""
        if node == self.own.node:
            return [0.0, 0.0]
        best: tuple[float, float] | None = None
        with suppress(OSError, ValueError):
            for _ in range(CLOCKS):
                before = time.time()
                there = self.peers[node][0].ask({"do": "clock"})
                after = time.time()
                if best is None or after - before < best[1]:
                    best = there - (before + after) / 2, after - before
        return None if best is None else [best[0], best[1] / 2]


def _link(source: str, target: str, rate: float | str, kind: str) -> dict[str, Any]:
    found = {"error": rate} if isinstance(rate, str) else {"rate": rate}
    return {"from": source, "to": target, "kind": kind, **found}


# ---- the process ----


def main() -> int:
    """One host's part."""
    _end_with_launcher()
    me = RankEnv.read()
    if me.local_rank:
        return 0
    result, folder, nbytes = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    nodes = me.world_size // me.local_world_size
    if me.node_rank == 0:
        with socket.create_server((me.master_addr, me.master_port), backlog=256) as server:
            own = Host(0, me.master_addr, folder, nbytes)
            report = Leader(own, _gathered(server, nodes - 1), nodes).report()
        with replacing(result / "check.json", parents=False) as path:
            path.write_text(json.dumps(report) + "\n")
        return 0
    if leader := _reached(me.master_addr, me.master_port):
        Host(me.node_rank, leader.getsockname()[0], folder, nbytes).serve(Peer(leader))
    return 0


def _gathered(server: socket.socket, others: int) -> dict[int, tuple[Peer, dict[str, Any]]]:
    """Those who come in time."""
    found: dict[int, tuple[Peer, dict[str, Any]]] = {}
    end = time.monotonic() + PATIENCE
    while len(found) < others and (left := end - time.monotonic()) > 0:
        server.settimeout(left)
        with suppress(OSError, ValueError, KeyError, TypeError):
            peer = Peer(server.accept()[0])
            hello = peer.hear()
            found[int(hello["node"])] = peer, hello
    return found


def _reached(host: str, port: int) -> socket.socket | None:
    """Node 0, if it answers in time: it tells who was missing."""
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
