"""The lab's network: links of hosts to switches, each limited in both directions, changed while it runs.

Switches are bridges in a namespace of their own, so the machine's own network is never touched. Host i is the
far end of the switch's port ``host<i>``, called ``eth0`` inside the host. Of several minipods each has a
bridge ``sw<p>`` there, whose port ``pod<p>`` leads to the port ``core<p>`` of one more bridge, ``core``:
whatever crosses minipods shares these links.

All this stands once for each link that a host has: names of the second have ``n1`` at their end, and the far
end of ``host<i>n1`` is ``eth1``. Its addresses are a subnet of their own, so a host reaches each by its link.
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

TIMER_SLACK = 150e-6  # seconds by which the kernel's timer may be late without a loss of rate
QUEUE_SECONDS = 20e-3  # how long a packet waits at most in a full queue ...
SHORTEST_QUEUE = 1 << 21  # bytes; ... unless that holds only a few segments. Only many senders to one host fill a queue
# Not the machine's own choice, which may pace with a timer per packet (bbr): labs behave alike everywhere,
# and cost less CPU.
CONGESTION_CONTROL = "cubic"
INITIAL_WINDOW = 64  # packets, also after a pause: a cluster's transports do not feel their way up after every one
_SEGMENT_SCRIPT = str(Path(__file__).with_name("segment.py"))
_PREFIX = 16
_QUEUE = "root handle 1: htb default 1"
_CLASS = re.compile(r"^class htb 1:1 .*?\brate (\S+)", re.MULTILINE)
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}


def tool(name: str) -> str:
    """Full path of a system tool. Raises LaunchError naming the package it comes in."""
    path = path_of(name)
    if path is None:
        raise LaunchError(f"the lab needs the program {name!r}, which is not installed. Install {_PACKAGES[name]}.")
    return path


def shaper(device: str, rate: int | None, mtu: int) -> list[str]:
    """The commands of tc that let ``rate`` bits per second out of a device; they replace an earlier rate
    without losing a packet.

    One HTB class and not TBF: HTB passes a packet larger than its bucket and makes the next one wait, so that
    the 64 KiB segments of TCP need no bucket of their size. A small bucket is what makes a message after a
    pause take as long as on a real link.
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
    """What names of a link's switches and ports end with."""
    return f"n{nic}" if nic else ""


@dataclass(frozen=True)
class HostState:
    """How each of a host's links is now. address: of the first."""

    host: int
    address: str
    nic: str
    cut: bool


@dataclass(frozen=True)
class PodState:
    """How a minipod's link to the core is now."""

    pod: int
    core: str
    cut: bool


@dataclass(frozen=True)
class LabNetwork:
    """A lab's network, reached through the keeper that holds it; works from any process of the same user."""

    keeper: int
    fds: tuple[int, ...]
    userns: bool
    spec: LabSpec

    def enter(self, host: int | None, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` on a host, or on the switch (None)."""
        user = ["--user", "--preserve-credentials"] if self.userns else []
        where = f"/proc/{self.keeper}/" + ("ns/net" if host is None else f"fd/{self.fds[self.checked(host)]}")
        return [tool("nsenter"), f"--target={self.keeper}", *user, f"--net={where}", "--", *argv]

    def checked(self, host: int) -> int:
        """``host`` if there is one of that number."""
        if not 0 <= host < len(self.fds):
            raise JobError(f"host {host} does not exist", fix=f"This lab has hosts 0 to {len(self.fds) - 1}")
        return host

    def build(self) -> None:
        """Make switches, the hosts' links and their limits."""
        self._batch(None, "ip", ["link set lo up"])
        for host in range(self.spec.hosts):
            self._batch(host, "ip", ["link set lo up"])
        for nic in range(self.spec.nics):
            self._build(nic)

    def _build(self, nic: int) -> None:
        """The switches of one link of each host."""
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
            # Without IPv6 addresses a link is silent until a rank speaks.
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
                self._call(
                    self.enter(host, [sys.executable, "-I", "-S", _SEGMENT_SCRIPT, str(spec.segment), *devices]), ""
                )

    def cut(self, host: int) -> None:
        """Pull the host's cables: its packets go nowhere, and none reach it."""
        self._set(name(self.checked(host)), "down")

    def heal(self, host: int) -> None:
        """Plug the host's cables in again."""
        self._set(name(self.checked(host)), "up")

    def cut_pod(self, pod: int) -> None:
        """Pull the cable between a minipod and the core."""
        self._set(f"pod{self.checked_pod(pod)}", "down")

    def heal_pod(self, pod: int) -> None:
        """Plug a minipod's cable in again."""
        self._set(f"pod{self.checked_pod(pod)}", "up")

    def _set(self, port: str, state: str) -> None:
        self._batch(None, "ip", [f"link set {port}{_rail(nic)} {state}" for nic in range(self.spec.nics)])

    def slow_pod(self, pod: int, rate: str) -> None:
        """Give a minipod's link to the core another rate, in both directions."""
        for port in (f"pod{self.checked_pod(pod)}", f"core{pod}"):
            self._slow(None, [f"{port}{_rail(nic)}" for nic in range(self.spec.nics)], rate)

    def checked_pod(self, pod: int) -> int:
        """``pod`` if there is one of that number with a link to a core."""
        if self.spec.pods == 1:
            raise JobError("this lab has one minipod, and no core", fix="Start one with several: --pods 2")
        if not 0 <= pod < self.spec.pods:
            raise JobError(f"minipod {pod} does not exist", fix=f"This lab has minipods 0 to {self.spec.pods - 1}")
        return pod

    def slow(self, host: int, rate: str) -> None:
        """Give each of the host's links another rate, in both directions."""
        port, nics = name(self.checked(host)), range(self.spec.nics)
        self._slow(None, [f"{port}{_rail(nic)}" for nic in nics], rate)
        self._slow(host, [interface(nic) for nic in nics], rate)

    def _slow(self, host: int | None, devices: Sequence[str], rate: str) -> None:
        bits = parse_rate(rate)
        self._batch(host, "tc", [line for one in devices for line in shaper(one, bits, self.spec.mtu)])

    def state(self) -> list[HostState]:
        """How each host's links are, as the kernel has the first; all are changed together."""
        found = self._links([name(host) for host in range(len(self.fds))])
        return [HostState(host, address(host), rate, cut) for host, (rate, cut) in enumerate(found)]

    def pod_state(self) -> list[PodState]:
        """How each minipod's link to the core is; none where there is no core."""
        found = self._links([f"pod{pod}" for pod in range(self.spec.pods)]) if self.spec.pods > 1 else []
        return [PodState(pod, rate, cut) for pod, (rate, cut) in enumerate(found)]

    def rate(self, host: int) -> str:
        """The rate of a host's links now."""
        return self._links([name(self.checked(host))])[0][0]

    def pod_rate(self, pod: int) -> str:
        """The rate of a minipod's link to the core now."""
        return self._links([f"pod{self.checked_pod(pod)}"])[0][0]

    def _links(self, ports: Sequence[str]) -> list[tuple[str, bool]]:
        """Of each port its rate, and whether it is cut."""
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
        """Several commands of ``ip`` or ``tc`` in one process: what they print."""
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
