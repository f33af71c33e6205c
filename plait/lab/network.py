"""The lab's network: links from hosts to switches, rate-limited in both directions and changeable
while the lab runs.

Switches are bridges in a namespace of their own, so the machine's own network is never touched.
Host i is the far end of the switch's port ``host<i>``, called ``eth0`` inside the host. With
several minipods, each has a bridge ``sw<p>``; its port ``pod<p>`` leads to the port ``core<p>`` of
another bridge, ``core``. Traffic between minipods shares these links.

All of this exists once per link (NIC) of a host. Names of the second link end in ``n1``, and the
far end of ``host<i>n1`` is ``eth1``. Each link has a subnet of its own, so an address determines
the link that carries its traffic.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

from plait.core.base.errors import JobError, LaunchError
from plait.core.base.lab_hosts import address, format_rate, interface, name, parse_rate, to_bits
from plait.core.base.process import path_of
from plait.lab.spec import NO_LIMIT, SEGMENT, LabSpec

TIMER_SLACK = 150e-6  # seconds that the kernel's timer may be late without a loss of rate
QUEUE_SECONDS = 20e-3  # seconds that a packet waits at most in a full queue
SHORTEST_QUEUE = 1 << 21  # bytes of a queue at least, for several segments; only many senders to one host fill it
# Not the machine's default, which may pace with a timer per packet (bbr): so labs behave alike everywhere,
# and cost less CPU.
CONGESTION_CONTROL = "cubic"
INITIAL_WINDOW = 64  # packets, also after a pause: a cluster's transports have no slow start after each pause
INSIDE = (sys.executable, "-I", "-S", str(Path(__file__).with_name("inside.py")))
"""The command prefix that runs inside.py in a bare interpreter, which starts in milliseconds."""
_PREFIX = 16
_QUEUE = "root handle 1: htb default 1"
_CLASS = re.compile(r"^class htb 1:1 .*?\brate (\S+)", re.MULTILINE)
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}


def tool(name: str) -> str:
    """Return the full path of a system tool. Raises LaunchError that names the tool's package if
    the tool is missing."""
    path = path_of(name)
    if path is None:
        raise LaunchError(f"the lab needs the program {name!r}, which is not installed. Install {_PACKAGES[name]}.")
    return path


def shaper(device: str, rate: int | None, mtu: int) -> list[str]:
    """Return the tc commands that limit a device to ``rate`` bits per second (None: unlimited);
    they replace an earlier rate without losing a packet.

    The limit is one HTB class, not TBF: HTB passes a packet larger than its bucket and delays the
    next one, so TCP's 64 KiB segments need no bucket of their size. With a small bucket, a message
    after a pause takes as long as on a real link.
    """
    bits = NO_LIMIT if rate is None else rate
    bucket = max(mtu + 14, int(bits / 8 * TIMER_SLACK))
    queue = max(SHORTEST_QUEUE, int(bits / 8 * QUEUE_SECONDS))
    return [
        f"class replace dev {device} parent 1: classid 1:1 htb rate {bits}bit "
        f"burst {bucket} cburst {bucket} quantum 65536",
        f"qdisc replace dev {device} parent 1:1 handle 10: bfifo limit {min(queue, 2**31)}",
    ]


def _rail(nic: int) -> str:
    """Return the suffix of names of a NIC's switches and ports."""
    return f"n{nic}" if nic else ""


@dataclass(frozen=True)
class HostState:
    """The present state of a host's links. address: the IP address of its first link. nic: the
    links' rate, such as ``1gbit``. cut: True if no packet passes."""

    host: int
    address: str
    nic: str
    cut: bool


@dataclass(frozen=True)
class PodState:
    """The present state of a minipod's link to the core. core: its rate, such as ``1gbit``. cut:
    True if no packet passes."""

    pod: int
    core: str
    cut: bool


@dataclass(frozen=True)
class LabNetwork:
    """A lab's network. keeper: the process that holds its namespaces. fds: the keeper's descriptors
    of the hosts' namespaces. userns: True if a user namespace was needed. Works from any process of
    the same user."""

    keeper: int
    fds: tuple[int, ...]
    userns: bool
    spec: LabSpec

    def enter(self, host: int | None, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on a host, or in the switch's namespace (None)."""
        user = ["--user", "--preserve-credentials"] if self.userns else []
        where = f"/proc/{self.keeper}/" + ("ns/net" if host is None else f"fd/{self.fds[self.checked(host)]}")
        return [tool("nsenter"), f"--target={self.keeper}", *user, f"--net={where}", "--", *argv]

    def checked(self, host: int) -> int:
        """Return ``host`` if the lab has a host of that number. Raises JobError if not."""
        if not 0 <= host < len(self.fds):
            raise JobError(f"host {host} does not exist", fix=f"This lab has hosts 0 to {len(self.fds) - 1}")
        return host

    def build(self) -> None:
        """Create the switches, the hosts' links and their rate limits."""
        self._batch(None, "ip", ["link set lo up"])
        for host in range(self.spec.hosts):
            self._batch(host, "ip", ["link set lo up"])
        for nic in range(self.spec.nics):
            self._build(nic)

    def _build(self, nic: int) -> None:
        """Create the switches, links and limits of one NIC of every host."""
        spec, rail, link = self.spec, _rail(nic), interface(nic)
        several = range(spec.pods if spec.pods > 1 else 0)
        bridges = [*(f"sw{pod}{rail}" for pod in range(spec.pods)), *([f"core{rail}"] if several else [])]
        switch: list[str] = []
        for bridge in bridges:
            kind = "type bridge forward_delay 0 stp_state 0 mcast_snooping 0"
            switch += [f"link add name {bridge} mtu {spec.mtu} {kind}", f"link set {bridge} up"]
        for pod in several:
            up, down = f"pod{pod}{rail}", f"core{pod}{rail}"
            switch.append(f"link add name {up} mtu {spec.mtu} type veth peer name {down} mtu {spec.mtu}")
            switch.append(f"link set {up} addrgenmode none master sw{pod}{rail} up")
            switch.append(f"link set {down} addrgenmode none master core{rail} up")
        for host, fd in enumerate(self.fds):
            far_end = f"peer name {link} mtu {spec.mtu} netns /proc/{self.keeper}/fd/{fd}"
            switch.append(f"link add name {name(host)}{rail} mtu {spec.mtu} type veth {far_end}")
            # Without IPv6 addresses a link carries no packet until a rank sends one.
            switch.append(f"link set {name(host)}{rail} addrgenmode none master sw{spec.pod_of(host)}{rail} up")
        self._batch(None, "ip", switch)
        rates = {f"{name(host)}{rail}": spec.rate for host in range(spec.hosts)}
        rates |= {f"{end}{pod}{rail}": spec.core_rate for pod in several for end in ("pod", "core")}
        self._batch(None, "tc", [f"qdisc replace dev {port} {_QUEUE}" for port in rates])
        self._batch(None, "tc", [line for port, rate in rates.items() for line in shaper(port, rate, spec.mtu)])
        subnet = IPv4Network((address(0, nic), _PREFIX), strict=False)
        for host in range(spec.hosts):
            up = f"link set {link} addrgenmode none up"
            own = f"addr add {address(host, nic)}/{_PREFIX} dev {link} noprefixroute"
            route = f"route add {subnet} dev {link} congctl {CONGESTION_CONTROL} initcwnd {INITIAL_WINDOW}"
            self._batch(host, "ip", [up, own, route])
            self._batch(host, "tc", [f"qdisc replace dev {link} {_QUEUE}", *shaper(link, spec.rate, spec.mtu)])
        if spec.segment > SEGMENT:
            for host, devices in [(None, [*bridges, *rates]), *((host, [link]) for host in range(spec.hosts))]:
                self._call(self.enter(host, [*INSIDE, "segment", str(spec.segment), *devices]), "")

    def cut(self, number: int, *, pod: bool = False) -> None:
        """Cut the links of a host, or the link between a minipod and the core: no packet passes in
        either direction."""
        self._set(self._port(number, pod), "down")

    def heal(self, number: int, *, pod: bool = False) -> None:
        """Restore the links that ``cut`` has cut."""
        self._set(self._port(number, pod), "up")

    def _set(self, port: str, state: str) -> None:
        self._batch(None, "ip", [f"link set {port}{_rail(nic)} {state}" for nic in range(self.spec.nics)])

    def _port(self, number: int, pod: bool) -> str:
        """Return the name of the switch's port of a host or, with ``pod``, of a minipod. Raises
        JobError if the lab has none of that number."""
        if pod and self.spec.pods == 1:
            raise JobError("this lab has one minipod, and no core", fix="Start one with several: --pods 2")
        if pod and not 0 <= number < self.spec.pods:
            raise JobError(f"minipod {number} does not exist", fix=f"This lab has minipods 0 to {self.spec.pods - 1}")
        return f"pod{number}" if pod else name(self.checked(number))

    def slow(self, number: int, rate: str, *, pod: bool = False) -> None:
        """Set the rate of a host's links, or of a minipod's link to the core, in both
        directions."""
        port, nics, bits = self._port(number, pod), range(self.spec.nics), parse_rate(rate)
        near = [f"{end}{_rail(nic)}" for end in (port, *([f"core{number}"] if pod else [])) for nic in nics]
        for host, devices in ((None, near), (number, [] if pod else [interface(nic) for nic in nics])):
            if devices:
                self._batch(host, "tc", [line for one in devices for line in shaper(one, bits, self.spec.mtu)])

    def state(self) -> list[HostState]:
        """Return the state of each host's links, read from the first link; all links of a host
        change together."""
        found = self._links([name(host) for host in range(len(self.fds))])
        return [HostState(host, address(host), rate, cut) for host, (rate, cut) in enumerate(found)]

    def pod_state(self) -> list[PodState]:
        """Return the state of each minipod's link to the core; empty if the lab has one minipod."""
        found = self._links([f"pod{pod}" for pod in range(self.spec.pods)]) if self.spec.pods > 1 else []
        return [PodState(pod, rate, cut) for pod, (rate, cut) in enumerate(found)]

    def rate(self, number: int, *, pod: bool = False) -> str:
        """Return the present rate of a host's links, or of a minipod's link to the core, as text
        such as ``1gbit``."""
        return self._links([self._port(number, pod)])[0][0]

    def _links(self, ports: Sequence[str]) -> list[tuple[str, bool]]:
        """Return (rate such as ``1gbit``, True if it is cut) of each of the switch's ports."""
        links = json.loads(self._call(self.enter(None, [tool("ip"), "-json", "link", "show"]), ""))
        cut = {link["ifname"] for link in links if "UP" not in link["flags"]}
        # Many versions of tc have no JSON form for classes.
        classes = self._batch(None, "tc", [f"class show dev {port}" for port in ports])
        rates = [to_bits(text) for text in _CLASS.findall(classes)]
        assert len(rates) == len(ports)
        return [
            (format_rate(None if rate == NO_LIMIT else rate), port in cut)
            for port, rate in zip(ports, rates, strict=True)
        ]

    def _batch(self, host: int | None, program: str, lines: Sequence[str]) -> str:
        """Run several ``ip`` or ``tc`` commands in one process, on a host or in the switch's
        namespace (None); return their output."""
        return self._call(self.enter(host, [tool(program), "-batch", "-"]), "\n".join(lines))

    def _call(self, argv: list[str], text: str) -> str:
        done = subprocess.run(
            argv, check=False, input=text, capture_output=True, text=True, env={"LC_ALL": "C", "PATH": os.defpath}
        )
        if done.returncode != 0:
            cause = " ".join((done.stderr or done.stdout).split())
            raise LaunchError(
                f"the lab could not set its network up: {cause or f'{argv[0]} ended with status {done.returncode}'}."
            )
        return done.stdout
