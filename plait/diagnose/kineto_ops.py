"""A trace's events in columns, and what they say of collectives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from plait.core.base.numbers import as_number, is_number
from plait.core.base.passed_over import PassedOver
from plait.diagnose.trace_columns import bytes_of_dtype, members_of

RANGE = re.compile(r"^(nccl|ncclx|rccl|rcclx|gloo|mpi|ucc|xccl|hccl|mccl|oneccl|ccl|cncl|eccl|bkcl):", re.IGNORECASE)
"""Ranges that process groups write around a collective: ``BACKEND:what``."""
MESSAGE = re.compile(r"^(\w+::?)*_?(i?send|i?recv)(_any_source)?_?( \d+(->|<-)\d+)?$", re.IGNORECASE)
"""Names of what one rank sends another."""
MOST = 2**53
"""Elements of a message, and numbers of a sequence."""


class Comm(NamedTuple):
    """What a trace says of a collective. group, label, ranks: name, description and members of its group, as
    far as they are told. place: whose it is.
    peer: of a message, the other end; bytes: 0 where not told."""

    name: str
    group: str
    label: str
    ranks: tuple[int, ...]
    place: int | None
    source: int | None
    target: int | None
    bytes: int


class Listed(NamedTuple):
    """A process group as a trace's header lists it."""

    label: str
    ranks: tuple[int, ...]


class Ops(NamedTuple):
    """Columns of a trace's events, times in microseconds; names, what is said of collectives, and members of
    groups by their names. ``kind`` as in ``codes``."""

    start: np.ndarray
    length: np.ndarray
    kind: np.ndarray
    name: np.ndarray
    thread: np.ndarray
    external: np.ndarray
    correlation: np.ndarray
    comm: np.ndarray
    seq: np.ndarray
    names: list[str]
    comms: list[Comm]
    groups: Mapping[str, Listed]
    codes: Mapping[str, int]
    over: PassedOver

    def rows(self, kind: str) -> np.ndarray:
        """Events of a kind."""
        return np.flatnonzero(self.kind == self.codes[kind])

    def name_of(self, row: int) -> str:
        """What an event is called."""
        return self.names[int(self.name[row])]

    def comm_of(self, row: int) -> Comm | None:
        """What an event says of a collective."""
        number = int(self.comm[row]) if row >= 0 else -1
        return self.comms[number] if number >= 0 else None

    def named(self, words: re.Pattern[str]) -> np.ndarray:
        """Of every event whether its name begins as told."""
        return np.array([bool(words.search(name)) for name in self.names] or [False])[self.name]


def comm_of(args: Mapping[str, Any], over: PassedOver) -> Comm | None:
    """What an event's ``args`` say of a collective; None where they say nothing."""
    name = args.get("Collective name")
    if not isinstance(name, str) or not name:
        return None
    found = members_of(args.get("Process Group Ranks"), in_order=True)
    ranks = tuple(map(int, found.split(","))) if found else ()
    if not found and args.get("Process Group Ranks") and "..." not in str(args["Process Group Ranks"])[-9:]:
        over.note("groups whose members cannot be, taken as unknown", "Process Group Ranks")
    if "Seq" in args and not (isinstance(seq := as_number(args["Seq"]), int) and 0 <= seq <= MOST):
        over.note("sequence numbers that cannot be, taken as unknown", "Seq")
    size, item = as_number(args.get("In msg nelems")), bytes_of_dtype(str(args.get("dtype")))
    if is_number(size) and not 0 <= size <= MOST:
        over.note("sizes that cannot be, taken as unknown", "In msg nelems")
        size = None
    place, message = _whole(args.get("Rank")), bool(MESSAGE.match(name))
    if message or place is None or place >= len(ranks):
        place = None
    return Comm(
        name=name[:200], group=str(args.get("Process Group Name") or "")[:200],
        label=str(args.get("Process Group Description") or "")[:200], ranks=ranks,
        place=None if place is None else ranks[place], source=_whole(args.get("Src Rank")),
        target=_whole(args.get("Dst Rank")), bytes=int(size) * item if is_number(size) else 0,
    )  # fmt: skip


def _whole(value: Any) -> int | None:
    value = as_number(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST else None
