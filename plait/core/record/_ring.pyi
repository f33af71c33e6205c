"""What is written in C (``_ring.c``): records of a ring, and collectives until they have ended."""

import mmap
from collections.abc import Callable
from typing import Any, Protocol

class Writer:
    """The records of a ring, from the first. memory: its bytes, the header before them; capacity: how many it
    has, a power of two. Any thread may write."""

    def __init__(self, memory: mmap.mmap, capacity: int, /) -> None: ...
    def begin(
        self,
        kind: int,
        name: int,
        step: int,
        enqueued: int = 0,
        /,
        started: int = 0,
        ended: int = 0,
        size: int = 0,
        group: int = 0,
        sequence: int = 0,
        peer: int = -1,
        call: int = 0,
        signature: int = 0,
    ) -> int:
        """A new record, of which some times may be known only later; its number. enqueued: now, if 0."""

    def enter(self, kind: int, name: int, step: int, /, size: int = 0) -> int:
        """The same of what is handed over and starts now."""

    def start(self, number: int, at: int = 0, /) -> None:
        """What a record is about has started; now, if 0. Nothing, as below, if it is overwritten."""

    def end(self, number: int, at: int = 0, /, failed: bool = False) -> None:
        """It has ended; now, if 0."""

    def size(self, number: int, size: int, /) -> None:
        """It has moved so many bytes."""

    def run(self, acts: tuple[tuple[Callable[[Any], object], int, int], ...], of: Any, step: int, /) -> None:
        """Do some things one after the other. acts: each with the kind and the name of its record, or 0 and 0
        for none. After each that has one, ``look``."""

    def look(self) -> None:
        """Take note of collectives that have ended."""

    @property
    def flying(self) -> list[Flight]:
        """Collectives whose end is looked for, in the order in which they started."""

class Pace:
    """How long a collective takes. taken: ns that it took when its end was last seen as it happened; 0: it
    never was."""

    taken: int

class Line:
    """A group's collectives in the order in which they start: it serves one at a time, so one that starts
    while another travels begins when that ends. number: of the group."""

    def __init__(self, ring: Writer, number: int, /) -> None: ...
    def depart(self, pace: Pace, step: int, name: int, size: int, call: int, signature: int, /) -> Flight:
        """The next one; its record is written."""

class _Work(Protocol):
    def wait(self) -> object: ...
    def is_completed(self) -> bool: ...
    def get_future(self) -> Any: ...

class Flight:
    """A collective under way, and its record. looked: when it was last seen under way, ns. work: what the
    wire gave for it."""

    number: int
    enqueued: int
    looked: int
    work: _Work

    def fly(self, work: object, looked_for: bool, /) -> None:
        """The wire has it. looked_for: looks at the ring find its end; else somebody calls ``land``, or
        waits at once."""

    def land(self, at: Any, failed: bool, /) -> None:
        """It ended at that moment, ns. Said again later, it is not heard."""

    def fail(self) -> None:
        """The wire did not take it."""

    def wait(self) -> None:
        """Return when its result may be used. Raises what the wire raises."""

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""

    def get_future(self) -> Any:
        """Done when it is over."""
