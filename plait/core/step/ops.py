"""What a training step consists of, as tables of rows whose expressions are letters: read this file first.

``WEIGHTS``, the logical tensors of a model, stands in ``plait.core.model.weights``, which lies below.
``STEPS`` says what every kind of op computes: matrix products, attention, numbers moved. ``SENDS`` says what
crosses the network after it, ``AFTER`` which order is no data. ``TENSORS``, what each op makes and reads of
memory, stands beside (``plait.core.step.tensors``). Which ops a stage has, and which data each needs, is the
graph's to say (``plait.core.step.segments``; ``plait.core.step.attention_ops`` where attention is shared).

A new part of a model is a row of ``WEIGHTS`` for each tensor, rows of ``STEPS`` for what is computed with it,
rows of ``TENSORS`` and their sizes (``plait.core.step.memory.sizes``) for what that keeps, a row of ``SENDS``
if something is sent, and a method in ``plait/train/engine``. Parameters, sharded units, FLOPs, bytes on the
wire, memory, seconds of ops and of the closed form follow from the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

from plait.core.model.weights import WEIGHTS as WEIGHTS
from plait.core.model.weights import Letters

Number: TypeAlias = Any
"""A number, or a column of one for each strategy."""


class Kind(StrEnum):
    """What an op computes; the letter is its name in lists, and ``plait.core.step.segments`` explains it."""

    NORM = "N"
    FIRST = "F"
    ROTATE = "T"
    CORE = "K"
    SECOND = "R"
    LOSS = "L"
    NORM_AGAIN = "M"
    FIRST_AGAIN = "A"
    CORE_AGAIN = "X"
    SECOND_AGAIN = "Y"
    SECOND_GRAD = "D"
    ROTATE_AGAIN = "S"
    CORE_GRAD = "G"
    ROTATE_GRAD = "H"
    HEADS_GRAD = "E"
    PROJECTED_GRAD = "Z"
    FIRST_GRAD = "C"
    WEIGHT_GRAD = "W"
    NORM_GRAD = "J"


FORWARD_KINDS = frozenset((Kind.NORM, Kind.FIRST, Kind.ROTATE, Kind.CORE, Kind.SECOND, Kind.LOSS))
LAYERS: tuple[Literal["attn", "mlp", "block"], ...] = ("attn", "mlp", "block")
"""Sites of which layers consist."""
Branch = Literal["", "embed", "attn", "mlp", "head", "down", "up"]
Letter = Literal["T", "H", "2H", "S", "R", "Z", "O", "V", "N"]
Product = tuple[Letter, Letter, Letter]
Pass = tuple[int, Letter]
ATTENTION_GRAD = 2.5
"""FLOPs of a fused attention kernel's backward, to its forward's: it computes the scores again (Dao 2022,
arXiv 2205.14135)."""


class OpStep(NamedTuple):
    """What ops of a kind compute.

    branch: between a first and a second weight, or an end of the model; empty: the residual stream, of any
    segment. product: [m, k] x [k, n]. cut: which of m, k, n the op's parts divide. moved: for each token,
    numbers that elementwise operations read or write. attends: whether it is attention's core, or that
    core's gradient. when: only where no other rank has a part in the sequence, or some have. weight: of
    weight gradients, 0 for the second weight's and 1 for the first's. cheap: whether selective recomputation
    runs it again.
    """

    branch: Branch
    kind: Kind
    product: Product | None = None
    cut: Literal["", "m", "n"] = ""
    moved: tuple[Pass, ...] = ()
    attends: Literal["", "forward", "backward"] = ""
    when: Literal["", "alone", "shared"] = ""
    weight: int = 0
    cheap: bool = False


STEPS: tuple[OpStep, ...] = (
    OpStep("", Kind.NORM, moved=((3, "S"), (2, "R"))),  # an addition, and the norm
    OpStep("", Kind.NORM_AGAIN, moved=((2, "R"),)),
    OpStep("", Kind.NORM_GRAD, moved=((6, "S"), (4, "R"))),
    OpStep("embed", Kind.SECOND, moved=((1, "H"),)),
    OpStep("embed", Kind.WEIGHT_GRAD, moved=((2, "H"),)),
    OpStep("attn", Kind.FIRST, ("T", "H", "Z")),
    OpStep("attn", Kind.FIRST, moved=((2, "Z"), (2, "N"))),  # to the layout of kernels, normalised, rotated
    OpStep("attn", Kind.FIRST, attends="forward", when="alone"),
    OpStep("attn", Kind.CORE, attends="forward", when="shared"),
    OpStep("attn", Kind.SECOND, ("T", "O", "H"), "n"),
    OpStep("attn", Kind.SECOND_GRAD, ("T", "H", "O")),
    OpStep("attn", Kind.SECOND_GRAD, attends="backward", when="alone"),
    OpStep("attn", Kind.SECOND_GRAD, moved=((4, "Z"), (4, "N")), when="alone"),
    OpStep("attn", Kind.CORE_GRAD, attends="backward", when="shared"),
    OpStep("attn", Kind.PROJECTED_GRAD, moved=((4, "Z"), (4, "N")), when="shared"),
    OpStep("attn", Kind.FIRST_GRAD, ("T", "Z", "H"), "m"),
    OpStep("attn", Kind.WEIGHT_GRAD, ("H", "T", "O")),
    OpStep("attn", Kind.WEIGHT_GRAD, ("Z", "T", "H"), weight=1),
    OpStep("mlp", Kind.FIRST, ("T", "H", "Z")),
    OpStep("mlp", Kind.FIRST, moved=((1, "Z"), (1, "O")), cheap=True),
    OpStep("mlp", Kind.SECOND, ("T", "O", "H"), "n"),
    OpStep("mlp", Kind.SECOND_GRAD, ("T", "H", "O")),
    OpStep("mlp", Kind.SECOND_GRAD, moved=((2, "Z"), (2, "O"))),
    OpStep("mlp", Kind.FIRST_GRAD, ("T", "Z", "H"), "m"),
    OpStep("mlp", Kind.WEIGHT_GRAD, ("H", "T", "O")),
    OpStep("mlp", Kind.WEIGHT_GRAD, ("Z", "T", "H"), weight=1),
    OpStep("head", Kind.FIRST, ("T", "H", "V")),
    OpStep("head", Kind.LOSS, moved=((1, "V"),)),
    OpStep("head", Kind.FIRST_GRAD, ("T", "V", "H"), "m"),
    OpStep("head", Kind.WEIGHT_GRAD, ("V", "T", "H")),
    OpStep("down", Kind.NORM, ("T", "2H", "H")),
    OpStep("up", Kind.NORM, ("T", "H", "H")),
)
AGAIN = {Kind.FIRST_AGAIN: Kind.FIRST, Kind.CORE_AGAIN: Kind.CORE, Kind.SECOND_AGAIN: Kind.SECOND}
"""Kinds that run another's steps a second time."""
AGAIN_KINDS = frozenset((Kind.NORM_AGAIN, *AGAIN))
"""What recomputation runs."""


@cache
def branches_of(site: str) -> tuple[Branch, ...]:
    """What a segment has side by side; a parallel block has attention and MLP."""
    found: dict[str, tuple[Branch, ...]] = {
        "embed": ("embed",), "attn": ("attn",), "mlp": ("mlp",), "block": ("attn", "mlp"), "head": ("head",),
        "down": ("down",), "up": ("up",),
    }  # fmt: skip
    return found.get(site, ())


@cache
def steps_of(branch: Branch, kind: Kind, *, shared: bool = False, selective: bool = False) -> tuple[OpStep, ...]:
    """Rows of a branch's ops of a kind. shared: attention is; selective: so is recomputation."""
    runs = AGAIN.get(kind, kind) if branch in ("attn", "mlp") else kind
    when = ("", "shared" if shared else "alone")
    rows = (step for step in STEPS if (step.branch, step.kind) == (branch, runs) and step.when in when)
    return tuple(step for step in rows if step.cheap or not selective or kind not in AGAIN)


CORES = frozenset((Kind.CORE, Kind.CORE_GRAD))
ROTATES = frozenset((Kind.ROTATE, Kind.ROTATE_AGAIN, Kind.ROTATE_GRAD))


def parts_of(site: str, kind: Kind, *, p2: Number, flat: Number, ring: Number) -> Number:
    """Parts of an op: columns of its output, row blocks of its gradient, blocks of a ring, or weights.

    p2: column slices. flat: 1 if the residual stream is cut by sequence, else 0. ring: ranks of a ring, 1 at
    sites whose attention is not shared.
    """
    if kind in (Kind.SECOND, Kind.SECOND_AGAIN):
        return p2 if site in LAYERS else 1
    if kind == Kind.FIRST_GRAD:  # row blocks of one buffer; a reduce-scatter of the sequence cannot be cut so
        return 1 + (p2 - 1) * (1 - flat)
    if kind == Kind.WEIGHT_GRAD:
        return {"attn": 2, "mlp": 2, "block": 4}.get(site, 1)
    return ring if kind in CORES else ring - 1 if kind in ROTATES else 1


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Values of the letters on one rank. T: tokens. H: hidden. S: numbers of a token of the residual stream,
    as norms see it; R: the same, times what other kernels take. Z: after a branch's first weight; O: before
    its second. V: rows of the vocabulary. N: numbers of a token that norms within attention's core
    normalise."""

    T: Number
    H: Number
    S: Number = 0
    R: Number = 0
    Z: Number = 0
    O: Number = 0  # noqa: E741
    V: Number = 0
    N: Number = 0

    def size(self, letter: Letter) -> Number:
        """Numbers along a dimension."""
        return 2 * self.H if letter == "2H" else getattr(self, letter)

    def product(self, step: OpStep, parts: Number = 1) -> tuple[Number, Number, Number]:
        """(m, k, n) of the step's product, in one of ``parts`` parts."""
        assert step.product is not None
        m, k, n = (self.size(letter) for letter in step.product)
        return m / (parts if step.cut == "m" else 1), k, n / (parts if step.cut == "n" else 1)

    def flops(self, step: OpStep) -> Number:
        """Of the step's product; 0 if it has none."""
        m, k, n = self.product(step) if step.product else (0, 0, 0)
        return 2 * m * k * n

    def moved(self, step: OpStep) -> Number:
        """Numbers that elementwise operations read or write."""
        return self.T * sum(times * self.size(letter) for times, letter in step.moved)


Axis = Literal["tp", "rows", "ulysses", "ring"]
STATISTICS = 3
"""Numbers of a token that vocabulary-parallel loss gathers: maximum, sum of exponentials, the target's
logit."""


@dataclass(frozen=True, kw_only=True)
class SendSizes:
    """Of one op of one slice. tokens: of a rank; rows: of them, those of the op's row block. row: bytes of a
    token's residual stream; columns: parts into which it is cut (p2). tp: ranks. words: rows of the
    vocabulary on a rank. number: bytes of one of the loss's statistics. there: bytes of queries, keys and
    values; back: of attention's output; block: of keys and values that go round the ring."""

    tokens: Number
    rows: Number
    row: Number
    columns: Number
    tp: Number
    words: Number
    number: Number
    there: Number
    back: Number
    block: Number

    @property
    def stream(self) -> Number:
        """The residual stream."""
        return self.tokens * self.row

    @property
    def column_block(self) -> Number:
        """Columns of it."""
        return self.stream // self.columns

    @property
    def row_block(self) -> Number:
        """Rows of it."""
        return self.rows * self.row

    @property
    def looked_up(self) -> Number:
        """Distinct rows of an embedding that one rank has, which depend on the tokens: at most."""
        rows = (self.tokens + self.words - abs(self.tokens - self.words)) // 2  # the smaller, of numbers or columns
        return rows * self.row * self.tp

    @property
    def statistics(self) -> Number:
        """Of the loss."""
        return self.tp * STATISTICS * self.tokens * self.number


Whole = Literal["stream", "column_block", "row_block", "looked_up", "statistics", "there", "back", "block"]


class Send(NamedTuple):
    """Of ops of these kinds, at ``sites`` or (empty) at any. axis: ``rows`` is the exchange of embedding
    rows over tensor-parallel ranks. whole: which of ``SendSizes`` is gathered or reduced; of attention's
    exchanges, what a rank holds."""

    sites: tuple[str, ...]
    kinds: tuple[Kind, ...]
    axis: Axis
    whole: Whole

    def nbytes(self, sizes: SendSizes) -> Number:
        """Of ``whole``."""
        return getattr(sizes, self.whole)


ATTENDS = ("attn", "block")
SENDS = (
    Send(("embed",), (Kind.SECOND,), "rows", "looked_up"),
    Send(("head",), (Kind.FIRST,), "tp", "statistics"),
    Send((), (Kind.SECOND, Kind.SECOND_AGAIN), "tp", "column_block"),
    Send((), (Kind.FIRST_GRAD,), "tp", "row_block"),
    Send((), (Kind.NORM, Kind.NORM_AGAIN, Kind.NORM_GRAD), "tp", "stream"),
    Send(ATTENDS, (Kind.FIRST, Kind.FIRST_AGAIN, Kind.CORE_GRAD, Kind.HEADS_GRAD), "ulysses", "there"),
    Send(ATTENDS, (Kind.CORE, Kind.CORE_AGAIN, Kind.SECOND_GRAD), "ulysses", "back"),
    Send(ATTENDS, (Kind.ROTATE, Kind.ROTATE_AGAIN, Kind.ROTATE_GRAD), "ring", "block"),
)


def send_of(site: str, kind: Kind) -> Send:
    """The row of an op. Raises KeyError for a kind that sends nothing."""
    for send in SENDS:
        if kind in send.kinds and (not send.sites or site in send.sites):
            return send
    raise KeyError(f"{site}.{kind} sends nothing")


class After(NamedTuple):
    """Order that is no data: what ops of these kinds wait for, at ``sites`` or (empty) at any.

    of: the ``part`` or the ``slice`` before; ``behind``, the backward of the segment after (of the layer
    after, where a whole layer runs again), up to where its activations are read; ``look-up``, the embedding
    of the last slice; ``head``, its gradient there.
    """

    sites: tuple[str, ...]
    kinds: tuple[Kind, ...]
    of: Literal["part", "slice", "behind", "look-up", "head"]
    why: Literal["parts", "slices", "memory", "tied"]


AFTER = (
    After((), (Kind.NORM_AGAIN, Kind.FIRST_AGAIN, Kind.ROTATE_AGAIN), "behind", "memory"),
    After(("head",), (Kind.FIRST,), "look-up", "tied"),  # both ends have one weight, which is gathered twice
    After(("embed",), (Kind.WEIGHT_GRAD,), "head", "tied"),  # both add into one gradient
    After((), (Kind.SECOND, Kind.SECOND_AGAIN, Kind.FIRST_GRAD), "part", "parts"),  # of one buffer
    After((), (Kind.WEIGHT_GRAD, Kind.NORM_GRAD), "slice", "slices"),  # both add into one gradient
)
"""A weight gradient waits for its input's too, though the second weight's needs no more than the output's;
rings have two buffers (``plait.core.step.attention_ops``). Both are written with the data."""


@cache
def orders_of(site: str, kind: Kind) -> tuple[str, ...]:
    """What ops wait for besides data."""
    return tuple(row.of for row in AFTER if kind in row.kinds and site in (row.sites or (site,)))


def exchanged(letters: Letters, row: Number, *, tp: Number, ulysses: Number) -> tuple[Number, Number, Number]:
    """Bytes that a rank holds of what attention exchanges with the ranks that share its sequences: (queries,
    keys and values; what attention gives; keys and values that go round the ring). row: bytes of one number
    for each token of a rank."""
    heads, kv_heads = letters.Q // letters.D // tp, one_at_least(letters.K // letters.D // tp)
    each = one_at_least(kv_heads // ulysses) * ulysses
    # Round the ring go the heads that this rank attends to, of the tokens that its Ulysses group has.
    size = row * letters.D
    return size * (heads + 2 * each), size * heads, 2 * size * each


def one_at_least(count: Number) -> Number:
    """Of heads of which several ranks have the same."""
    return count + (count < 1)
