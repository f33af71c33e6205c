"""``Lab``: an emulated cluster that exists while a ``with`` block runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from plait.core.base.env import MASTER_PORT, RankEnv, inherited, rank_base
from plait.core.base.errors import LaunchError
from plait.core.base.lab_hosts import address, interface, nic_of
from plait.core.base.process import end_all
from plait.lab.network import INSIDE, LabNetwork, tool
from plait.lab.registry import LabEntry, register, unregister
from plait.lab.spec import LabSpec

PROBE_PORT = "29499"
"""The port on which hosts test whether they reach each other, below the port of the ranks'
rendezvous."""
SWEEP_SECONDS = 2.0
"""Seconds to wait for the keeper (``inside.py``) to kill the processes on the hosts; a process that
survives longer is not waited for."""


class Lab:
    """An emulated cluster: hosts behind rate-limited links, up inside the ``with`` block; every
    process on the hosts ends with the block. nodes: the host of every node of the job, as in a rank
    table; all hosts in their order by default.

    >>> with Lab(LabSpec.parse("2x1@1gbit")) as lab:  # doctest: +SKIP
    ...     lab.popen(1, ["hostname", "-I"]).wait()
    """

    def __init__(
        self, spec: LabSpec, *, name: str | None = None, command: Sequence[str] = (), nodes: Sequence[int] | None = None
    ) -> None:
        self.spec = spec
        self.nodes = tuple(range(spec.hosts)) if nodes is None else tuple(nodes)
        self.command = tuple(command)  # shown by `plait lab list`
        self._wanted_name = name
        self._entry: LabEntry | None = None
        self._keeper: subprocess.Popen[str] | None = None
        self._lifeline = -1
        self._ranks: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        if not sys.platform.startswith("linux"):
            raise LaunchError(
                f"the lab needs Linux network namespaces, and this is {sys.platform}. Use a Linux machine."
            )
        for program in ("ip", "tc", "nsenter"):
            tool(program)
        try:
            network = self._start_keeper()
            network.build()
            self._entry = register(self._wanted_name, self.spec, network, self.command)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_keeper(self) -> LabNetwork:
        read_end, self._lifeline = os.pipe()
        try:
            argv = [*INSIDE, "keep", str(self.spec.hosts), str(os.getpid())]
            self._keeper = subprocess.Popen(
                argv, stdin=read_end, stdout=subprocess.PIPE, text=True, cwd="/", start_new_session=True
            )
        finally:
            os.close(read_end)
        assert self._keeper.stdout is not None
        answer = self._keeper.stdout.readline()
        reply = json.loads(answer or '{"error": "?", "message": "its first process ended early"}')
        if "error" in reply:
            raise LaunchError(_why_not(reply["error"], reply["message"]))
        return LabNetwork(self._keeper.pid, tuple(reply["fds"]), reply["userns"], self.spec)

    def close(self) -> None:
        """End every process on the hosts at once, and remove the network. A process that the kernel
        cannot end keeps its host's namespace alive until it ends."""
        end_all(self._ranks)  # before the keeper's sweep, so that no rank enters its namespace after it
        self._ranks.clear()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._keeper is not None:
            with suppress(subprocess.TimeoutExpired):
                self._keeper.wait(SWEEP_SECONDS)
            if self._keeper.stdout is not None:
                self._keeper.stdout.close()
        if self._entry is not None:
            unregister(self._entry)
            self._entry = None

    @property
    def entry(self) -> LabEntry:
        """The lab's entry in the list of running labs. Raises LaunchError if the lab is not up."""
        if self._entry is None:
            raise LaunchError("the lab is not up. Use it inside its `with` block.")
        return self._entry

    @property
    def name(self) -> str:
        """The lab's name in ``plait lab list``."""
        return self.entry.name

    @property
    def network(self) -> LabNetwork:
        """The lab's switch and links."""
        return self.entry.network

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment variables to add for a rank: torchrun's and the lab's own."""
        return rank_environment(self.spec, self.name, rank, self.nodes)

    def rank_command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on the host of a rank. Its process ends with the
        lab, whoever starts it."""
        return self.network.enter(self.nodes[self.spec.host_of(rank)], argv)

    def popen(self, rank: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start ``argv`` as a rank, in a process group of its own; ``options`` are passed to
        ``subprocess.Popen``."""
        base = options.pop("env", None)
        env = {**(rank_base() if base is None else base), **self.environment(rank)}
        options.setdefault("start_new_session", True)
        process = subprocess.Popen(self.rank_command(rank, argv), env=env, **options)
        self._ranks.append(process)
        return process

    def reached(self) -> list[set[int]]:
        """Return, for each host, the numbers of the hosts that it reaches over the network now,
        itself included. Raises LaunchError if the hosts cannot be tested."""
        addresses = [address(host) for host in range(self.spec.hosts)]
        probes = [
            subprocess.Popen(
                self.network.enter(host, [*INSIDE, "reach", str(host), PROBE_PORT, *addresses]),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            )
            for host in range(self.spec.hosts)
        ]  # fmt: skip
        try:
            for probe in probes:
                assert probe.stdout is not None
                probe.stdout.readline()
            for probe in probes:
                assert probe.stdin is not None
                probe.stdin.write("\n")
                probe.stdin.flush()
            return [set(json.loads((probe.stdout and probe.stdout.readline()) or "[]")) for probe in probes]
        except BrokenPipeError:
            raise LaunchError(
                "the lab's network cannot be tested: a test process ended early. Start the lab anew."
            ) from None
        finally:
            for probe in probes:
                probe.kill()
                probe.communicate()

    def cut(self, host: int) -> None:
        """Cut a host's links: no packet passes until ``heal``. Raises JobError for an unknown
        host."""
        self.network.cut(host)

    def heal(self, host: int) -> None:
        """Restore a host's links after ``cut``. Raises JobError for an unknown host."""
        self.network.heal(host)

    def slow(self, host: int, rate: str) -> None:
        """Set the rate of a host's links in both directions, such as ``100mbit``. Raises JobError
        for an unknown host or an invalid rate."""
        self.network.slow(host, rate)


def rank_environment(spec: LabSpec, name: str, rank: int, nodes: Sequence[int]) -> dict[str, str]:
    """Return a rank's environment variables: torchrun's, and the network interface that gloo uses.
    nodes: the host of every node."""
    me = RankEnv(
        rank=rank,
        world_size=len(nodes) * spec.ranks_per_host,
        local_rank=rank % spec.ranks_per_host,
        local_world_size=spec.ranks_per_host,
        node_rank=rank // spec.ranks_per_host,
        master_addr=address(nodes[0]),
        master_port=MASTER_PORT,  # each lab has its own network, so all labs can use one port
        lab=name,
    )
    threads = inherited().get("OMP_NUM_THREADS", "1")
    link = interface(nic_of(me.local_rank, me.local_world_size, spec.nics)) if len(nodes) > 1 else "lo"
    return {**me.variables(), "GLOO_SOCKET_IFNAME": link, "OMP_NUM_THREADS": threads}


def _why_not(code: str, message: str) -> str:
    """Return a paragraph that explains why the kernel refused a namespace."""
    if code in ("EPERM", "EACCES", "ENOSPC", "EINVAL", "ENOSYS"):
        return (
            f"the lab may not create network namespaces here ({message}): it needs root, or a kernel that lets "
            "users create user namespaces. Run it as root, or allow them (sysctl user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone=1, "
            "or on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0)."
        )
    return f"the lab could not start: {message}."
