"""What the launcher and the agents on other machines say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.launch.preflight import Fitness

PATIENCE = 120.0
"""Seconds in which the next agent must have come."""
PULSE = 5.0
"""Seconds between two signs of life of an agent."""
LOST = 60.0
"""Seconds without one after which its host counts as lost: a machine without power hangs up on nobody."""


@dataclass(frozen=True)
class Hello:
    """From an agent, first. word: what only agents of this run know. host: its machine's name. task: its
    number by whoever started it, -1 if it has none. port: free there, for ranks to meet at. address: where
    it is reached, if it knows. fitness: of the node."""

    word: str
    host: str
    task: int
    port: int
    address: str = ""
    fitness: Fitness = field(default_factory=Fitness)


@dataclass(frozen=True)
class Begin:
    """To an agent: its ranks, ``first`` and those after it. argv: what to start. epoch: the word of the
    attempt at the run."""

    first: int
    ranks: int
    world_size: int
    master_addr: str
    master_port: int
    argv: list[str]
    logs: str
    epoch: str = ""


@dataclass(frozen=True)
class Refused:
    """To an agent: nothing is to be started."""

    why: str


@dataclass(frozen=True)
class LineOf:
    """From an agent, first on a connection of its own: the line of this rank, which it will inherit."""

    word: str
    rank: int


@dataclass(frozen=True)
class Go:
    """To an agent, once all lines of all ranks are there: start them."""


@dataclass(frozen=True)
class Halted:
    """From an agent: a rank was stopped (SIGSTOP, a debugger), or goes on."""

    rank: int
    halted: bool


@dataclass(frozen=True)
class Ended:
    """From an agent: a rank's exit status, -N for signal N, and the end of its log."""

    rank: int
    status: int
    said: str


@dataclass(frozen=True)
class Signalled:
    """From an agent: it has got this signal."""

    signal: int


@dataclass(frozen=True)
class Alive:
    """From an agent, every few seconds."""


@dataclass(frozen=True)
class Kill:
    """To an agent: end this rank for certain."""

    rank: int


@dataclass(frozen=True)
class Done:
    """To an agent: the run's exit status, which is to be the agent's own."""

    status: int


AgentMessage = Done | Hello | Begin | Refused | LineOf | Go | Halted | Ended | Signalled | Kill | Alive
KINDS = (Done, Hello, Begin, Refused, LineOf, Go, Halted, Ended, Signalled, Kill, Alive)
