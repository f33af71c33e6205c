"""What crosses the network after an op, as a table: along which axis, and how many bytes a rank holds of it.

Whether an op has a collective at all, and which, is the graph's to say (``SegmentGraph.collective``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy

Axis = Literal["tp", "rows", "ulysses", "ring"]
STATISTICS = 3
"""Numbers of a token that vocabulary-parallel loss gathers: maximum, sum of exponentials, the target's
logit."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one op of one slice. tokens: of a rank; rows: of them, those of the op's row block. row: bytes of a
    token's residual stream; columns: parts into which it is cut (p2). tp: ranks. words: rows of the
    vocabulary on a rank. number: bytes of one of the loss's statistics. there: bytes of queries, keys and
    values; back: of attention's output; block: of keys and values that go round the ring."""

    tokens: int
    rows: int
    row: int
    columns: int
    tp: int
    words: int
    number: int
    there: int
    back: int
    block: int

    @property
    def stream(self) -> int:
        """The residual stream."""
        return self.tokens * self.row

    @property
    def column_block(self) -> int:
        """Columns of it."""
        return self.stream // self.columns

    @property
    def row_block(self) -> int:
        """Rows of it."""
        return self.rows * self.row

    @property
    def looked_up(self) -> int:
        """Distinct rows of an embedding that one rank has, which depend on the tokens: at most."""
        return min(self.tokens, self.words) * self.row * self.tp

    @property
    def statistics(self) -> int:
        """Of the loss."""
        return self.tp * STATISTICS * self.tokens * self.number


Whole = Literal["stream", "column_block", "row_block", "looked_up", "statistics", "there", "back", "block"]


class Send(NamedTuple):
    """Of ops of these kinds, at ``sites`` or (empty) at any. axis: ``rows`` is the exchange of embedding
    rows over tensor-parallel ranks. whole: which of ``Sizes`` is gathered or reduced; of attention's
    exchanges, what a rank holds."""

    sites: tuple[str, ...]
    kinds: str
    axis: Axis
    whole: Whole

    def nbytes(self, sizes: Sizes) -> int:
        """Of ``whole``."""
        return getattr(sizes, self.whole)


ATTENDS = ("attn", "block")
SENDS = (
    Send(("embed",), "R", "rows", "looked_up"),
    Send(("head",), "F", "tp", "statistics"),
    Send((), "R", "tp", "column_block"),
    Send((), "C", "tp", "row_block"),
    Send((), "NMJ", "tp", "stream"),
    Send(ATTENDS, "FAGE", "ulysses", "there"),
    Send(ATTENDS, "KXD", "ulysses", "back"),
    Send(ATTENDS, "TSH", "ring", "block"),
)


def send_of(site: str, kind: str) -> Send:
    """The row of an op. Raises KeyError for a kind that sends nothing."""
    for send in SENDS:
        if kind in send.kinds and (not send.sites or site in send.sites):
            return send
    raise KeyError(f"{site}.{kind} sends nothing")


def exchanged(model: ModelSpec, strategy: Strategy, row: int) -> tuple[int, int, int]:
    """Bytes that a rank holds of what attention exchanges with the ranks that share its sequences: (queries,
    keys and values; what attention gives; keys and values that go round the ring). row: bytes of one number
    for each token of a rank."""
    ulysses = strategy.cp // strategy.ring
    heads, kv_heads = model.num_heads // strategy.tp, max(1, model.num_kv_heads // strategy.tp)
    each = max(1, kv_heads // ulysses) * ulysses
    # Round the ring go the heads that this rank attends to, of the tokens that its Ulysses group has.
    size = row * model.head_size
    return size * (heads + 2 * each), size * heads, 2 * size * each
