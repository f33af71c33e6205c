"""What a reader met and did not take, counted by kind, so that nothing is dropped without a word.

A reader takes a ``PassedOver``, notes in it, and gives it back with its answer. Commands print its lines
(``plait.cli.terminal.passed_over``); with ``--json`` they stand under ``"passed_over"``.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PassedOver:
    """Counts by kind, with where the first of each was met.

    >>> over = PassedOver()
    >>> over.note("rows of a sendrecv table", "line 12")
    >>> over.note("rows of a sendrecv table", "line 13")
    >>> over.lines()
    ['passed over 2 rows of a sendrecv table (the first: line 12)']
    """

    counts: dict[str, int] = field(default_factory=dict[str, int])
    first: dict[str, str] = field(default_factory=dict[str, str])

    def note(self, what: str, where: str = "", count: int = 1) -> None:
        """Count ``what``: a plural noun of the format, as a user would say it; ``(s)`` in it becomes an s
        where there is more than one. where: a line, key or name."""
        if count < 1:
            return
        self.counts[what] = self.counts.get(what, 0) + count
        self.first.setdefault(what, where)

    def add(self, other: PassedOver, file: str = "") -> None:
        """Count what another reader has met; ``file``: which file that was."""
        for what, count in other.counts.items():
            where = ": ".join(part for part in (file, other.first[what]) if part)
            self.note(what, where, count)

    def __bool__(self) -> bool:
        return bool(self.counts)

    def lines(self) -> list[str]:
        """A line for each kind, the most frequent first."""
        order = sorted(self.counts.items(), key=lambda item: -item[1])
        return [
            f"passed over {count} {_said(what, count)}"
            + (f" (the first: {self.first[what]})" if self.first[what] else "")
            for what, count in order
        ]

    def rows(self) -> list[dict[str, str | int]]:
        """The same for ``--json``."""
        return [{"what": _said(what, n), "count": n, "first": self.first[what]} for what, n in self.counts.items()]


@dataclass(frozen=True)
class Checked:
    """Remarks on files that are in order. over: what readers passed over. note: what else is to be said;
    empty if there is nothing to say."""

    over: PassedOver = field(default_factory=PassedOver)
    note: str = ""


def _said(what: str, count: int) -> str:
    return what.replace("(s)", "s" * (count > 1))
