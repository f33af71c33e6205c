"""Arnold's own count of what a GPU sends (arXiv 2509.15940, appendix C), to set beside the planner's.

The paper gives no unit. Elements are meant here: bytes are elements times the size of what is sent. Both
are of one pass: gradients once (eq. 12), one micro-batch (eq. 13); the planner counts bytes of a whole
step.
"""

from __future__ import annotations

from dataclasses import dataclass

GELU_LAYER = (4, 2), (8, 7)
"""Parameters of attention and MLP of a layer, in hidden^2 and hidden (eq. 12)."""


@dataclass(frozen=True, kw_only=True)
class PaperJob:
    """A GPT in the paper's letters: V, s, h, l, gb, mb, dp, pp."""

    vocab: int
    sequence: int
    hidden: int
    layers: int
    global_batch: int = 1
    micro_batch: int = 1
    dp: int = 1
    pp: int = 1

    @property
    def micro_batches(self) -> float:
        """m = gb / (mb dp) (eq. 11)."""
        return self.global_batch / (self.micro_batch * self.dp)

    @property
    def dp_volume(self) -> float:
        """h (V + s) + l / pp (4 h^2 + 2 h + 8 h^2 + 7 h): parameters of a stage that has the embedding (eq.
        12)."""
        h = self.hidden
        layer = sum(square * h * h + line * h for square, line in GELU_LAYER)
        return h * (self.vocab + self.sequence) + self.layers / self.pp * layer

    @property
    def pp_volume(self) -> float:
        """2 mb s h: activations of a micro-batch, and their gradients (eq. 13)."""
        return 2 * self.micro_batch * self.sequence * self.hidden
