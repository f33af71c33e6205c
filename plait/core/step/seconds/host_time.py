"""The host that launches ops, and is late where they take less than launching them.

A host launches ahead of what runs, from the beginning of a pass of a stage on. By how much it is late after
some ops is launching them less running them; what a pass waits for it is the most of that before any op.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Late(NamedTuple):
    """Ops one after the other. net: seconds that launching them takes longer than running them; below 0
    where the host gets ahead. most: the same before the last of them runs, or before an earlier one,
    whichever is most: what they wait for a host that begins with them."""

    net: Any = 0.0
    most: Any = 0.0

    @staticmethod
    def of(launch: Any, busy: Any, count: Any = 1) -> Late:
        """Of an op that is launched in ``count`` equal parts."""
        if isinstance(count, int) and count == 1:  # most are: five passes over columns fewer
            return Late(launch - busy, launch)
        return Late(launch / count - busy / count, launch / count).times(count)

    def then(self, other: Late) -> Late:
        """Followed by other ops."""
        return Late(self.net + other.net, np.maximum(self.most, self.net + other.most))

    def times(self, count: Any) -> Late:
        """The same several times."""
        first = self.most * np.minimum(1, count)
        return Late(self.net * count, first + np.maximum(0, count - 1) * np.maximum(0, self.net))
