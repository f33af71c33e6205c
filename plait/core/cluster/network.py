"""Predicted seconds of a placement: what groups send, over what the network leaves them when they spread.

Of a group spread evenly over s minipods, 1 - 1/s of all pairs lie in different ones: that share of the
most that can be lost (``specs/placement/network.toml``) is lost. Published figures give the most only, so
what lies between is this assumption. By the same one, two neighbours in different minipods lose all of it
(``pair_factor``). The slowest group counts, and nothing is taken to hide it: these are seconds to compare
placements by, not seconds of a step. ``core`` says more of a network: what all flows
of a minipod to others share (``plait.core.step.clock.placed_prices``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.core.base.codec.toml_text import read_toml
from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.base.numbers import shown

KEYS = (
    ("rate", "rate", 1.0, 1e15), ("collective_loss", "collective_loss", 0.0, 0.99), ("p2p_loss", "p2p_loss", 0.0, 0.99),
    ("crossing", "conflicts", 1.0, 1e6), ("core", "core", 1.0, 1e18),
)  # fmt: skip
"""Tables of a file, their fields, the least and the most that they may be."""
OPEN = ("conflicts", "core")
"""Fields that a file may leave out."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """rate: bytes per second, each way, of one GPU inside a minipod. collective_loss, p2p_loss: shares of
    it that groups spread over many lose at most. conflicts: by how much longer what crosses minipods
    takes because flows meet on a link: [crossing] of the file, where the core was measured to be slower,
    times what equal-cost multi-path hashing costs; 1 is not at all. core: bytes per second, each way, of
    a minipod's link to the others; None where nobody has measured it."""

    rate: float
    collective_loss: float
    p2p_loss: float
    conflicts: float = 1.0
    core: float | None = None

    @staticmethod
    def read(path: Path | None = None, *, rate: float | None = None) -> Network:
        """From a file, or the one that ships. rate: in place of the file's."""
        path = path or specs_folder() / "placement" / "network.toml"
        values, found = read_toml(path), dict[str, float]()
        for key, name, least, most in KEYS:
            if key not in values and name in OPEN:
                continue
            told: Any = values[key].get("value") if isinstance(values.get(key), dict) else None
            if not isinstance(told, (int, float)) or not least <= told <= most:
                fix = f"Write [{key}] with value, a number from {least:g} to {most:g}, source and date"
                fix += "; or leave it out" if name in OPEN else ""
                raise JobError(f"{shown(told)} is no {key}", file=str(path), key=key, fix=fix)
            found[name] = float(told)
        return Network(**(found | ({"rate": rate} if rate else {})))

    def collective(self, sent: float, spread: int) -> float:
        """Seconds of ``sent`` bytes a GPU in collectives of a group."""
        return self._seconds(sent, spread, self.collective_loss)

    def p2p(self, sent: float, spread: int) -> float:
        """Seconds of ``sent`` bytes a GPU from neighbour to neighbour of a group."""
        return self._seconds(sent, spread, self.p2p_loss)

    def collective_factor(self, spread: int) -> float:
        """How many times as long a collective takes as inside one minipod."""
        return self._seconds(self.rate, spread, self.collective_loss)

    @property
    def pair_factor(self) -> float:
        """The same of what two neighbours in different minipods send: all of it crosses."""
        return self.conflicts / (1 - self.p2p_loss)

    def _seconds(self, sent: float, spread: int, most: float) -> float:
        crossing = self.conflicts if spread > 1 else 1.0
        return sent / (self.rate * (1 - most * (1 - 1 / spread))) * crossing
