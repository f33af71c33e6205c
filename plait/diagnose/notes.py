"""What has to be said of files that were read: lines for people, counts for programs."""

from __future__ import annotations

from plait.core.base.passed_over import PassedOver

MANY = 12
"""Lines of one kind from which on only their number is said."""


class Notes:
    """Lines, in order, and counts of what was left out.

    >>> notes = Notes()
    >>> notes.left_out("files that cannot be read", {"a.parquet": "it is truncated", "b.parquet": "a pipe"})
    >>> notes.lines
    ['a.parquet: it is truncated', 'b.parquet: a pipe']
    >>> notes.over.rows()
    [{'what': 'files that cannot be read', 'count': 2, 'first': 'a.parquet'}]
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.over = PassedOver()

    def say(self, line: str) -> None:
        """A line about nothing that was left out."""
        self.lines.append(line)

    def left_out(self, what: str, why: dict[str, str]) -> None:
        """Things of one kind. what: a plural noun. why: by their names."""
        lines = [f"{name}: {reason}" for name, reason in why.items()]
        few = len(lines) < MANY
        self.lines += lines if few else [f"{len(lines)} {what} were left out, such as: {lines[0]}"]
        self.over.note(what, next(iter(why), ""), len(why))

    def count(self, line: str, what: str, count: int, first: str = "") -> None:
        """A line that says of how many things, and where the first was met."""
        self.lines.append(line)
        self.over.note(what, first, count)
