"""Counts, by kind, of input that a reader ignored, so that no input is dropped silently.

A reader takes a ``IgnoredInput``, counts ignored input in it, and returns it with its result.
Commands print its lines (``plait.cli.terminal.passed_over``); with ``--json`` they are listed under
``"passed_over"``.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class IgnoredInput:
    """The counts of ignored input by kind, and the position of the first of each kind.

    >>> over = IgnoredInput()
    >>> over.note("rows of a sendrecv table", "line 12")
    >>> over.note("rows of a sendrecv table", "line 13")
    >>> over.lines()
    ['passed over 2 rows of a sendrecv table (the first: line 12)']
    """

    counts: dict[str, int] = field(default_factory=dict[str, int])
    first: dict[str, str] = field(default_factory=dict[str, str])

    def note(self, what: str, where: str = "", count: int = 1) -> None:
        """Count ignored input. what: a plural noun of the format, in the user's words; ``(s)`` in
        it becomes an s if the count is above 1. where: a line, key or name."""
        if count < 1:
            return
        self.counts[what] = self.counts.get(what, 0) + count
        self.first.setdefault(what, where)

    def add(self, other: IgnoredInput, file: str = "") -> None:
        """Add the counts of another reader. file: the file that it read."""
        for what, count in other.counts.items():
            where = ": ".join(part for part in (file, other.first[what]) if part)
            self.note(what, where, count)

    def __bool__(self) -> bool:
        return bool(self.counts)

    def lines(self) -> list[str]:
        """Return a line for each kind, the most frequent first."""
        order = sorted(self.counts.items(), key=lambda item: -item[1])
        return [
            f"passed over {count} {_pluralize(what, count)}"
            + (f" (the first: {self.first[what]})" if self.first[what] else "")
            for what, count in order
        ]

    def rows(self) -> list[dict[str, str | int]]:
        """Return a dict for each kind, for ``--json``."""
        return [{"what": _pluralize(what, n), "count": n, "first": self.first[what]} for what, n in self.counts.items()]


@dataclass(frozen=True)
class Checked:
    """Remarks on valid files. over: input that readers ignored. note: a further remark; empty if
    there is none."""

    over: IgnoredInput = field(default_factory=IgnoredInput)
    note: str = ""


def _pluralize(what: str, count: int) -> str:
    return what.replace("(s)", "s" * (count > 1))
