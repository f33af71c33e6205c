"""The lab's network: one link per host to a switch, each link limited in both directions, changed while it runs.

The switch is a bridge in a namespace of its own, so the machine's own network is never touched. Host i is the far end of the
switch's port ``host<i>``, called ``eth0`` inside the host.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any

from plait.core.errors import JobError, LaunchError
from plait.lab.spec import LabSpec, format_rate, parse_rate

IFNAME = "eth0"
_FIRST_ADDRESS = IPv4Address("10.77.0.1")
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}


def tool(name: str) -> str:
    """Full path of a system tool; looks in the sbin folders too, which an ordinary user's PATH often lacks."""
    path = shutil.which(name) or shutil.which(name, path="/usr/local/sbin:/usr/sbin:/sbin")
    if path is None:
        raise LaunchError(f"the lab needs the program {name!r}, which is not installed. Install {_PACKAGES[name]}.")
    return path


def address(host: int) -> str:
    """The address of a host on the lab's network."""
    return str(_FIRST_ADDRESS + host)


def shaper(rate: int | None) -> str:
    """The queueing discipline, in tc's words, that lets ``rate`` bits per second through."""
    if rate is None:
        return "noqueue"
    burst = max(80_000, int(rate / 8 * 200e-6))
    limit = max(8 * burst, int(rate / 8 * 10e-3))
    return f"tbf rate {rate}bit burst {burst} limit {limit}"


@dataclass(frozen=True)
class HostState:
    """How a host's link is now."""

    host: int
    address: str
    nic: str
    cut: bool


@dataclass(frozen=True)
class Network:
    """A lab's network, reached through the keeper that holds it; works from any process of the same user."""

    keeper: int
    fds: tuple[int, ...]
    userns: bool

    def enter(self, host: int | None, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` on a host, or on the switch (None)."""
        user = ["--user", "--preserve-credentials"] if self.userns else []
        where = f"/proc/{self.keeper}/" + ("ns/net" if host is None else f"fd/{self.fds[self.checked(host)]}")
        return [tool("nsenter"), f"--target={self.keeper}", *user, f"--net={where}", "--", *argv]

    def checked(self, host: int) -> int:
        """``host`` if there is one of that number."""
        if not 0 <= host < len(self.fds):
            raise JobError(f"host {host} does not exist", fix=f"this lab has hosts 0 to {len(self.fds) - 1}")
        return host

    def build(self, spec: LabSpec) -> None:
        """Make the switch, the hosts' links and their limits."""
        switch = [f"link add name sw0 mtu {spec.mtu} type bridge forward_delay 0 stp_state 0 mcast_snooping 0", "link set lo up", "link set sw0 up"]
        for host, fd in enumerate(self.fds):
            far_end = f"peer name {IFNAME} mtu {spec.mtu} netns /proc/{self.keeper}/fd/{fd}"
            switch.append(f"link add name host{host} mtu {spec.mtu} type veth {far_end}")
            # Without IPv6 addresses a link is silent until a rank speaks.
            switch.append(f"link set host{host} addrgenmode none master sw0 up")
        self._batch(None, "ip", switch)
        self._batch(None, "tc", [f"qdisc replace dev host{host} root {shaper(spec.rate)}" for host in range(spec.hosts)])
        for host in range(spec.hosts):
            up = [f"link set {IFNAME} addrgenmode none up", "link set lo up", f"addr add {address(host)}/16 dev {IFNAME}"]
            self._batch(host, "ip", up)
            self._batch(host, "tc", [f"qdisc replace dev {IFNAME} root {shaper(spec.rate)}"])

    def cut(self, host: int) -> None:
        """Pull the host's cable: its packets go nowhere, and none reach it."""
        self._batch(None, "ip", [f"link set host{self.checked(host)} down"])

    def heal(self, host: int) -> None:
        """Plug the host's cable in again."""
        self._batch(None, "ip", [f"link set host{self.checked(host)} up"])

    def slow(self, host: int, rate: str) -> None:
        """Give the host's link another rate, in both directions."""
        limit = shaper(parse_rate(rate))
        self._batch(None, "tc", [f"qdisc replace dev host{self.checked(host)} root {limit}"])
        self._batch(host, "tc", [f"qdisc replace dev {IFNAME} root {limit}"])

    def state(self) -> list[HostState]:
        """How each host's link is, as the kernel has it."""
        links = {link["ifname"]: link for link in self._ask("ip", "link", "show")}
        rates = {q["dev"]: q.get("options", {}).get("rate") for q in self._ask("tc", "qdisc", "show")}
        states: list[HostState] = []
        for host in range(len(self.fds)):
            port, rate = f"host{host}", rates.get(f"host{host}")
            states.append(HostState(host, address(host), format_rate(rate and rate * 8), "UP" not in links[port]["flags"]))
        return states

    def _ask(self, program: str, *words: str) -> list[dict[str, Any]]:
        return json.loads(self._call(self.enter(None, [tool(program), "-json", *words]), ""))

    def _batch(self, host: int | None, program: str, lines: Sequence[str]) -> None:
        """Several commands of ``ip`` or ``tc`` in one process, all or an error."""
        self._call(self.enter(host, [tool(program), "-batch", "-"]), "\n".join(lines))

    def _call(self, argv: list[str], text: str) -> str:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, env={"LC_ALL": "C", "PATH": os.defpath})
        if done.returncode != 0:
            cause = " ".join((done.stderr or done.stdout).split())
            raise LaunchError(f"the lab could not set its network up: {cause or f'{argv[0]} exited with status {done.returncode}'}.")
        return done.stdout
