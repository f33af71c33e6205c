"""Predicted seconds of a placement: what groups send, over what the network leaves them when they spread.

Of a group spread evenly over s minipods, 1 - 1/s of all pairs lie in different ones: that share of the most
that can be lost (``specs/placement/network.toml``) is lost. Published figures give the most only, so what
lies between is this assumption. The slowest group counts, and nothing is taken to hide it: these are seconds
to compare placements by, not seconds of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from plait.core.base.codec.toml_text import read_toml
from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.base.numbers import shown


@dataclass(frozen=True, kw_only=True)
class Network:
    """rate: bytes per second, each way, of one GPU inside a minipod. collective_loss, p2p_loss: shares of it
    that groups spread over many lose at most. conflicts: by how much longer what crosses minipods takes
    because flows meet on a link: [crossing] of the file, where the core was measured to be slower, times what
    equal-cost multi-path hashing costs; 1 is not at all."""

    rate: float
    collective_loss: float
    p2p_loss: float
    conflicts: float = 1.0

    @staticmethod
    def read(path: Path | None = None, *, rate: float | None = None) -> Network:
        """From a file, or the one that ships. rate: in place of the file's."""
        path = path or specs_folder() / "placement" / "network.toml"
        values = read_toml(path)
        found: dict[str, float] = {}
        for key, least, most in (("rate", 1.0, 1e15), ("collective_loss", 0.0, 0.99), ("p2p_loss", 0.0, 0.99)):
            value = values.get(key, {}).get("value") if isinstance(values.get(key), dict) else None
            if not isinstance(value, (int, float)) or not least <= value <= most:
                fix = f"Write [{key}] with value, a number from {least:g} to {most:g}, source and date"
                raise JobError(f"{shown(value)} is no {key}", file=str(path), key=key, fix=fix)
            found[key] = float(value)
        crossing = values.get("crossing")
        if crossing is not None:
            told = crossing.get("value") if isinstance(crossing, dict) else None
            if not isinstance(told, (int, float)) or not 1 <= told <= 1e6:
                fix = "Write [crossing] with value, a number from 1, source and date; or leave it out"
                raise JobError(f"{shown(told)} is no crossing", file=str(path), key="crossing", fix=fix)
            found["conflicts"] = float(told)
        return Network(**(found | ({"rate": rate} if rate else {})))

    def collective(self, sent: float, spread: int) -> float:
        """Seconds of ``sent`` bytes a GPU in collectives of a group."""
        return self._seconds(sent, spread, self.collective_loss)

    def p2p(self, sent: float, spread: int) -> float:
        """Seconds of ``sent`` bytes a GPU from neighbour to neighbour of a group."""
        return self._seconds(sent, spread, self.p2p_loss)

    def _seconds(self, sent: float, spread: int, most: float) -> float:
        crossing = self.conflicts if spread > 1 else 1.0
        return sent / (self.rate * (1 - most * (1 - 1 / spread))) * crossing
