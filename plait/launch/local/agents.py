"""Ranks on other machines, through an agent on each: the launcher's side.

The starter of the agents (Slurm's srun, a pod) only runs one process on every node; the rank table
and the host's name determine its ranks. All connections of agents and ranks are TCP connections to
one port of the launcher, opened with a secret word that only this run's agents know.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from plait.core.base.cluster_env import agent_variable
from plait.core.base.env import epoch_word
from plait.core.base.errors import ERROR_MARK, LaunchError, PlacementError, RankFailure
from plait.core.runs.channel import Channel, MessageLine
from plait.core.topology.rank_table import RankTable
from plait.launch.health.nodes import judge, make_room, nearly_full
from plait.launch.local.door import (
    LOST,
    MESSAGE_TYPES,
    PATIENCE,
    PULSE,
    AgentMessage,
    AgentPort,
    Alive,
    Begin,
    Done,
    Ended,
    Go,
    Halted,
    Hello,
    Kill,
    RankConnection,
    Refused,
    Signalled,
)
from plait.launch.watch import LOOK, RankProcess, say

MOST = 8
"""The largest number of nodes that a message names."""
REACHABLE = "See whether the nodes are up and reach the launcher's port."
"""Advice for agents that do not connect."""


class RemoteProcess:
    """A rank's process on another machine, as reported by its agent."""

    pid = None
    """The process has no pid on this machine."""

    def __init__(self, rank: int, agent: MessageLine[AgentMessage]) -> None:
        self.rank, self._agent = rank, agent
        self.returncode: int | None = None
        self.stopped = False
        self._said = ""

    def poll(self) -> int | None:
        """Return the last known exit status; None if the process runs as far as is known."""
        return self.returncode

    def kill(self) -> None:
        """Ask the agent to kill the process."""
        self._agent.send(Kill(self.rank))

    def log_tail(self) -> str:
        """Return the end of the process's log, once it has failed."""
        return self._said

    def ended(self, status: int, log_tail: str) -> None:
        """Record the process's exit status and the end of its log; later reports are ignored."""
        if self.returncode is None:
            self.returncode, self._said = status, log_tail


class Agent:
    """A connected agent with the ranks of its node, on the launcher's side: an event source for
    ``Watch``. hello: its first message."""

    def __init__(self, line: MessageLine[AgentMessage], hello: Hello) -> None:
        self.line, self.hello = line, hello
        self.ranks: dict[int, RemoteProcess] = {}
        self.heard = time.monotonic()
        self.came, self._told = time.time(), time.monotonic()
        self.lost = False
        """True if the agent ended or fell silent without notice, or its node is unfit."""

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self.line.fileno()

    def take(self) -> int | None:
        """Process the agent's messages; return the number of a signal that the agent received, or
        None. Raises EOFError when the agent, and its ranks with it, is gone."""
        signal: int | None = None
        try:
            while (message := self.line.receive()) is not None:
                self.heard = time.monotonic()
                match message:
                    case Ended(rank, status, said) if rank in self.ranks:
                        self.ranks[rank].ended(status, said)
                    case Halted(rank, halted) if rank in self.ranks:
                        self.ranks[rank].stopped = halted
                    case Signalled(number):
                        signal = number
                    case _:
                        pass
        except EOFError as error:
            self._lost(str(error) or "its agent ended without a word")
            raise
        return signal

    def look(self, held_up: float) -> None:
        """Count the host as lost if its agent has been silent for more than ``LOST`` seconds.
        held_up: seconds in which this process was stopped, which do not count."""
        self.pulse()
        self.heard += held_up
        if (silent := time.monotonic() - self.heard) > LOST:
            self._lost(f"its agent has been silent for {silent:.0f} s")

    def pulse(self) -> None:
        """Send the agent a heartbeat if the last one is ``PULSE`` seconds old."""
        if time.monotonic() > self._told + PULSE:
            self._told = time.monotonic()
            self.line.send(Alive())

    def _lost(self, why: str) -> None:
        self.lost = True
        for rank, process in self.ranks.items():
            lost = f"{ERROR_MARK}{self.hello.host} was lost, and rank {rank} with it: {why}"
            process.ended(1, f"{lost} (the node failed, or the cluster manager has ended it)")


@dataclass(frozen=True)
class Rendezvous:
    """The launcher's address for agents. host: an address of this machine that other nodes reach.
    port, word: the port and the secret word, if agents know them already. patience: seconds to wait
    for the next agent."""

    host: str
    port: int = 0
    word: str = ""
    patience: float = PATIENCE


class Agents:
    """The launcher's port for the agents of ``table``'s hosts, open inside the ``with`` block.

    argv: the command of every rank. logs: the folder of their logs. at: the launcher's address.
    addresses: of hosts whose names do not resolve. numbered: True if whoever starts the agents
    (srun) numbers them, so that the numbers must agree with the table as well. seat: returns the
    table for the registered hosts, if the cluster manager may choose the hosts."""

    def __init__(
        self,
        table: RankTable,
        argv: Sequence[str],
        logs: Path,
        at: Rendezvous,
        *,
        addresses: Mapping[str, str] | None = None,
        numbered: bool = False,
        seat: Callable[[Sequence[str]], RankTable] | None = None,
    ) -> None:
        self.table, self.argv, self.logs = table, list(argv), logs
        self._addresses, self._numbered, self._seat = addresses or {}, numbered, seat
        self._word = at.word or secrets.token_hex(16)
        self._patience = at.patience
        self._door, self._host = AgentPort(at.host, at.port, self._word), at.host
        self._held = ExitStack()
        self.agents: dict[int, Agent] = {}

    def __enter__(self) -> Self:
        self._held.enter_context(self._door)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnect: agents then kill their ranks and end."""
        self._held.close()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that agents need."""
        return agent_variable(f"{self._host}:{self._door.port} {self._word}")

    @property
    def lost(self) -> set[str]:
        """Hosts whose agents are gone without notice, or are unfit."""
        return {agent.hello.host for agent in self.agents.values() if agent.lost}

    def ranks(self, still: Callable[[], None]) -> list[RankProcess]:
        """Start all ranks once all agents have registered; return them, by rank. still: called
        repeatedly; raises if agents cannot come any more.

        Raises PlacementError for an agent whose host contradicts the table, RankFailure for unfit
        nodes, LaunchError for a missing agent, and if this process cannot open enough connections.
        """
        make_room(len(self.table.hosts) + self.table.world_size, f"The connections of {self.table.world_size} ranks")
        while len(self.agents) < len(self.table.hosts):
            end, first = self._next(still, self._missing, self._forget_gone)
            self._held.enter_context(end)
            if isinstance(first, Hello):
                self._welcome(Agent(MessageLine(end, MESSAGE_TYPES), first))
        if self._seat:
            come = [self.agents[task] for task in sorted(self.agents)]
            self.table = self._seat([agent.hello.host for agent in come])
            self.agents = {self.table.node_rank(agent.hello.host): agent for agent in come}
        self._judge()
        first = self.agents[0].hello
        where = self._addresses.get(first.host) or first.address or first.host
        for node, agent in self.agents.items():
            ranks = self.table.ranks_per_node
            logs = str(self.logs.absolute())
            agent.line.send(
                Begin(node * ranks, ranks, self.table.world_size, where, first.port, self.argv, logs, epoch_word())
            )
        channels: dict[int, Channel] = {}
        while len(channels) < self.table.world_size:
            end, said = self._next(still, lambda: "the connections of some ranks", self._all_there)
            self._held.enter_context(end)
            if isinstance(said, Hello):
                self._welcome(Agent(MessageLine(end, MESSAGE_TYPES), said))  # a surplus agent, which is refused
            elif 0 <= said.rank < self.table.world_size:
                channels[said.rank] = Channel(end)
        for agent in self.agents.values():
            agent.heard = time.monotonic()
            agent.line.send(Go())
        return [self._rank(number, channels[number]) for number in range(self.table.world_size)]

    def done(self, status: int) -> None:
        """Send agents the run's exit status, which they return as their own; to be called before
        disconnecting."""
        for agent in self.agents.values():
            with suppress(EOFError):  # unread data would reset the connection and lose the status
                while agent.line.receive() is not None:
                    pass
            agent.line.send(Done(status))

    def _rank(self, number: int, channel: Channel) -> RankProcess:
        agent = self.agents[number // self.table.ranks_per_node]
        process = agent.ranks[number] = RemoteProcess(number, agent.line)
        return RankProcess(number, process, channel, heard=time.monotonic(), where=agent.hello.host)

    def _welcome(self, agent: Agent) -> None:
        host, task = agent.hello.host, agent.hello.task
        try:
            if self._seat:  # a recreated pod replaces its predecessor
                self.agents[task] = agent
                return
            node = self.table.node_rank(host)
            if node in self.agents:
                raise PlacementError(f"Two agents came from {host}: start one on each host.")
            if self._numbered and task != node:
                raise PlacementError(
                    f"{host} was started as number {task}, and is number {node} of the rank table: start "
                    "agents in the table's order, as srun does with SLURM_HOSTFILE."
                )
        except PlacementError as error:
            agent.line.send(Refused(str(error)))
            raise
        self.agents[node] = agent

    def _judge(self) -> None:
        """Raise RankFailure that names the nodes unfit for ranks; print warnings about the
        others."""
        agents = {agent.hello.host: agent for agent in self.agents.values()}
        fitness = {host: agent.hello.fitness for host, agent in agents.items()}
        found = judge(fitness, {host: agent.came for host, agent in agents.items()})
        for remark in [one for one in (*found.remarks[:MOST], nearly_full(self.logs)) if one]:
            say(f"warning: {remark}")
        if found.unfit:
            for host in found.unfit:
                agents[host].lost = True
            told = "; ".join(f"{host} is not fit: {why}" for host, why in [*found.unfit.items()][:MOST])
            raise RankFailure(f"{told}.", cause="unfit")

    def _gone(self) -> list[int]:
        """Return the keys in ``agents`` of agents that have disconnected before their ranks were
        started."""
        found = list[int]()
        for key, agent in self.agents.items():
            try:
                agent.line.receive()
            except EOFError:
                found.append(key)
        return found

    def _forget_gone(self) -> None:
        """Remove disconnected agents from ``agents``, if the cluster manager chooses the hosts:
        replacements may come."""
        for key in self._gone() if self._seat else ():
            del self.agents[key]

    def _all_there(self) -> None:
        if gone := self._gone():
            host = self.agents[gone[0]].hello.host
            raise LaunchError(f"{host} was lost before its ranks were started: see whether the node is up.")

    def _missing(self) -> str:
        if self._seat:
            return f"the agents of {len(self.table.hosts) - len(self.agents)} of {len(self.table.hosts)} nodes"
        names = [host for node, host in enumerate(self.table.hosts) if node not in self.agents]
        return f"the agents of {len(names)} hosts ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"

    def _next(
        self, still: Callable[[], None], missing: Callable[[], str], look: Callable[[], None]
    ) -> tuple[socket.socket, Hello | RankConnection]:  # fmt: skip
        """Return the next connection of an agent or a rank, with its first message. still, look:
        called repeatedly; they raise if waiting is in vain. missing: describes what is missing, for
        the error. Raises LaunchError after ``Rendezvous.patience`` seconds."""
        deadline = time.monotonic() + self._patience
        while True:
            still()
            look()
            for agent in self.agents.values():
                agent.pulse()
            if found := self._door.next(LOOK):
                return found
            if time.monotonic() > deadline:
                raise LaunchError(f"{missing()} did not come within {self._patience:.0f} s. {REACHABLE}")
