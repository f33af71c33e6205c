"""The contents of a training step, as tables of rows whose expressions are letters: read this file
first.

``STEPS``: the computation of each kind of op (matrix products, attention, elementwise traffic).
``SENDS``: the communication after it. ``ORDER_CONSTRAINTS``: ordering that no data dependency
implies. ``WEIGHTS`` (``plait.core.model.weights``): the model's logical tensors. ``TENSORS``
(``plait.core.step.tensors``): the tensors that each op writes and reads in memory. The ops of a
stage and their data dependencies: ``plait.core.step.segments``, and
``plait.core.step.attention_ops`` for context-parallel attention.

A new part of a model needs: a row of ``WEIGHTS`` per tensor; rows of ``STEPS`` for its computation;
rows of ``TENSORS`` and their sizes (``plait.core.step.memory.sizes``) for the memory it keeps; a
row of ``SENDS`` if it communicates; a method in ``plait/train/engine``. Parameters, sharded units,
FLOPs, bytes on the wire, memory, and the seconds of ops and of the closed form follow from these
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

from plait.core.model.weights import WEIGHTS as WEIGHTS
from plait.core.model.weights import Dimensions

Number: TypeAlias = Any
"""A number, or an array with one number per strategy."""


class Kind(StrEnum):
    """Kind of computation of an op. The letter is its name in instruction lists;
    ``plait.core.step.segments`` explains each."""

    NORM = "N"
    COLUMN_FORWARD = "F"
    RING_SEND = "T"
    ATTENTION_CORE = "K"
    ROW_FORWARD = "R"
    LOSS = "L"
    NORM_RECOMPUTE = "M"
    COLUMN_RECOMPUTE = "A"
    CORE_RECOMPUTE = "X"
    ROW_RECOMPUTE = "Y"
    ROW_DGRAD = "D"
    RING_SEND_BACKWARD = "S"
    CORE_BACKWARD = "G"
    RING_SEND_GRAD = "H"
    HEADS_EXCHANGE_GRAD = "E"
    COLUMN_OUTPUT_GRAD = "Z"
    COLUMN_DGRAD = "C"
    WGRAD = "W"
    NORM_BACKWARD = "J"
    ROUTER = "P"
    EXPERTS = "Q"
    EXPERTS_BACKWARD = "U"
    ROUTER_BACKWARD = "O"
    ROUTE_COUNTS = "B"
    DISPATCH = "V"
    DISPATCH_RECOMPUTE = "I"


FORWARD_KINDS = frozenset(
    (
        Kind.NORM,
        Kind.COLUMN_FORWARD,
        Kind.RING_SEND,
        Kind.ATTENTION_CORE,
        Kind.ROW_FORWARD,
        Kind.LOSS,
        Kind.ROUTER,
        Kind.ROUTE_COUNTS,
        Kind.DISPATCH,
        Kind.EXPERTS,
    )
)
LAYERS: tuple[Literal["attn", "mlp", "moe", "block"], ...] = ("attn", "mlp", "moe", "block")
"""Sublayers that make up a transformer layer."""
Path = Literal["", "embed", "attn", "mlp", "head", "down", "up", "compress", "expand", "router", "experts"]
Letter = Literal["T", "H", "2H", "S", "R", "Z", "O", "V", "N", "X", "E", "A", "B", "B+R", "Q+R", "2Q"]
Product = tuple[Letter, Letter, Letter]
Pass = tuple[int, Letter]
ATTENTION_GRAD = 2.5
"""FLOPs of a fused attention kernel's backward pass as a multiple of its forward pass: the backward
recomputes the scores (Dao 2022, arXiv 2205.14135)."""


class OpStep(NamedTuple):
    """One computation of ops of a kind.

    branch: the path it belongs to: a path between a first and a second weight, or one end of the
    model; empty: the residual stream, in any segment. product: the matrix product [m, k] x [k, n].
    cut: which of m, k, n is divided among the op's parts. moved: numbers per token that elementwise
    operations read or write. attends: forward or backward of the attention core. when: ``alone``:
    only without context parallelism; ``shared``: only with it. weight: for weight gradients, 0 for
    the second weight and 1 for the first. cheap: True if selective recomputation repeats this
    computation.
    """

    branch: Path
    kind: Kind
    product: Product | None = None
    cut: Literal["", "m", "n"] = ""
    moved: tuple[Pass, ...] = ()
    attends: Literal["", "forward", "backward"] = ""
    when: Literal["", "alone", "shared"] = ""
    weight: int = 0
    cheap: bool = False


def _trained(branch: Path, forward: Kind, back: Kind, *products: Product) -> tuple[OpStep, ...]:
    """Return the forward and backward products of weights; one backward op computes both input and
    weight gradients."""
    steps = list[OpStep]()
    for m, k, n in products:
        steps += [OpStep(branch, forward, (m, k, n)), OpStep(branch, back, (m, n, k)), OpStep(branch, back, (k, m, n))]
    return tuple(steps)


STEPS: tuple[OpStep, ...] = (
    OpStep("", Kind.NORM, moved=((3, "S"), (2, "R"))),  # an addition, and the norm
    OpStep("", Kind.NORM_RECOMPUTE, moved=((2, "R"),)),
    OpStep("", Kind.NORM_BACKWARD, moved=((6, "S"), (4, "R"))),
    OpStep("embed", Kind.ROW_FORWARD, moved=((1, "H"),)),
    OpStep("embed", Kind.WGRAD, moved=((2, "H"),)),
    OpStep("attn", Kind.COLUMN_FORWARD, ("T", "H", "Z")),
    OpStep(
        "attn", Kind.COLUMN_FORWARD, moved=((2, "Z"), (2, "N"))
    ),  # layout change for kernels, query/key norms, rotary
    OpStep("attn", Kind.COLUMN_FORWARD, attends="forward", when="alone"),
    OpStep("attn", Kind.ATTENTION_CORE, attends="forward", when="shared"),
    OpStep("attn", Kind.ROW_FORWARD, ("T", "O", "H"), "n"),
    OpStep("attn", Kind.ROW_DGRAD, ("T", "H", "O")),
    OpStep("attn", Kind.ROW_DGRAD, attends="backward", when="alone"),
    OpStep("attn", Kind.ROW_DGRAD, moved=((4, "Z"), (4, "N")), when="alone"),
    OpStep("attn", Kind.CORE_BACKWARD, attends="backward", when="shared"),
    OpStep("attn", Kind.COLUMN_OUTPUT_GRAD, moved=((4, "Z"), (4, "N")), when="shared"),
    OpStep("attn", Kind.COLUMN_DGRAD, ("T", "Z", "H"), "m"),
    OpStep("attn", Kind.WGRAD, ("H", "T", "O")),
    OpStep("attn", Kind.WGRAD, ("Z", "T", "H"), weight=1),
    OpStep("mlp", Kind.COLUMN_FORWARD, ("T", "H", "Z")),
    OpStep("mlp", Kind.COLUMN_FORWARD, moved=((1, "Z"), (1, "O")), cheap=True),
    OpStep("mlp", Kind.ROW_FORWARD, ("T", "O", "H"), "n"),
    OpStep("mlp", Kind.ROW_DGRAD, ("T", "H", "O")),
    OpStep("mlp", Kind.ROW_DGRAD, moved=((2, "Z"), (2, "O"))),
    OpStep("mlp", Kind.COLUMN_DGRAD, ("T", "Z", "H"), "m"),
    OpStep("mlp", Kind.WGRAD, ("H", "T", "O")),
    OpStep("mlp", Kind.WGRAD, ("Z", "T", "H"), weight=1),
    OpStep("head", Kind.COLUMN_FORWARD, ("T", "H", "V")),
    OpStep("head", Kind.LOSS, moved=((1, "V"),)),
    OpStep("head", Kind.COLUMN_DGRAD, ("T", "V", "H"), "m"),
    OpStep("head", Kind.WGRAD, ("V", "T", "H")),
    OpStep("down", Kind.NORM, ("T", "2H", "H")),
    OpStep("up", Kind.NORM, ("T", "H", "H")),
    # Latent attention: down-projections to the compressed queries, keys and values; up-projections to heads.
    *_trained("compress", Kind.COLUMN_FORWARD, Kind.COLUMN_DGRAD, ("T", "H", "A"), ("T", "H", "B+R")),
    *_trained("expand", Kind.COLUMN_FORWARD, Kind.COLUMN_DGRAD, ("T", "A", "Q+R"), ("T", "B", "2Q")),
    # Router scores; permutation of the routed rows and its inverse; the experts' products.
    *_trained("router", Kind.ROUTER, Kind.ROUTER_BACKWARD, ("T", "H", "E")),
    OpStep("router", Kind.ROUTER, moved=((1, "E"),)),
    OpStep("router", Kind.ROUTER_BACKWARD, moved=((2, "E"),)),
    OpStep("experts", Kind.ROUTER, moved=((1, "H"),)),
    OpStep("experts", Kind.ROUTER_BACKWARD, moved=((2, "H"),)),
    *_trained("experts", Kind.EXPERTS, Kind.EXPERTS_BACKWARD, ("X", "H", "Z"), ("X", "O", "H")),
)
UNLISTED_PATHS: tuple[Path, ...] = ("compress", "expand", "router", "experts")
"""Paths that appear in no instruction list yet: latent attention's first weights, the router, and
experts."""
AGAIN = {
    Kind.COLUMN_RECOMPUTE: Kind.COLUMN_FORWARD,
    Kind.CORE_RECOMPUTE: Kind.ATTENTION_CORE,
    Kind.ROW_RECOMPUTE: Kind.ROW_FORWARD,
}
"""Recomputation kinds, each with the kind whose computations it repeats."""
AGAIN_KINDS = frozenset((Kind.NORM_RECOMPUTE, Kind.DISPATCH_RECOMPUTE, *AGAIN))
"""The op kinds that recomputation runs."""


@cache
def paths_of(site: str) -> tuple[Path, ...]:
    """Return the parallel paths of a segment; a parallel block has attention and MLP."""
    found: dict[str, tuple[Path, ...]] = {
        "embed": ("embed",), "attn": ("attn",), "mlp": ("mlp",), "moe": ("experts", "mlp"), "block": ("attn", "mlp"),
        "head": ("head",), "down": ("down",), "up": ("up",),
    }  # fmt: skip
    return found.get(site, ())


@cache
def steps_of(branch: Path, kind: Kind, *, shared: bool = False, selective: bool = False) -> tuple[OpStep, ...]:
    """Return the rows of a path's ops of one kind. shared: True with context parallelism.
    selective: True under selective recomputation."""
    runs = AGAIN.get(kind, kind) if branch in ("attn", "mlp") else kind
    when = ("", "shared" if shared else "alone")
    rows = (step for step in STEPS if (step.branch, step.kind) == (branch, runs) and step.when in when)
    return tuple(step for step in rows if step.cheap or not selective or kind not in AGAIN)


CORES = frozenset((Kind.ATTENTION_CORE, Kind.CORE_BACKWARD))
ROTATES = frozenset((Kind.RING_SEND, Kind.RING_SEND_BACKWARD, Kind.RING_SEND_GRAD))


def parts_of(site: str, kind: Kind, *, p2: Number, flat: Number, ring: Number) -> Number:
    """Return the number of parts of an op: column slices of its output, row blocks of its input
    gradient, blocks of a ring, or weights.

    p2: column slices. flat: 1 if the residual stream is sharded along the sequence, else 0. ring:
    ranks of an attention ring, 1 for sublayers without context parallelism.
    """
    if kind in (Kind.ROW_FORWARD, Kind.ROW_RECOMPUTE):
        return p2 if site in LAYERS else 1
    if kind == Kind.COLUMN_DGRAD:  # row blocks of one buffer, into which no reduce-scatter can be split
        return 1 + (p2 - 1) * (1 - flat)
    if kind == Kind.WGRAD:
        return {"attn": 2, "mlp": 2, "block": 4}.get(site, 1)
    return ring if kind in CORES else ring - 1 if kind in ROTATES else 1


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Values of the dimension letters on one rank. T: tokens. H: hidden size. S: numbers per token
    of the residual stream that norms process; R: the same, times the relative cost of the norm
    kernels in use. Z: width after a path's first weight; O: width before its second weight. V:
    vocabulary rows. N: numbers per token normalised by norms inside the attention core (query/key
    norms). X: rows per expert; E: number of experts; groups: experts per rank. latent: widths of
    latent attention by letter."""

    T: Number
    H: Number
    S: Number = 0
    R: Number = 0
    Z: Number = 0
    O: Number = 0  # noqa: E741
    V: Number = 0
    N: Number = 0
    X: Number = 0
    E: Number = 0
    groups: Number = 1
    latent: Mapping[str, Number] = field(default_factory=dict[str, Number])

    def size(self, letter: Letter) -> Number:
        """Return the length of a dimension."""
        if letter in self.latent:
            return self.latent[letter]
        return 2 * self.H if letter == "2H" else getattr(self, letter)

    def product(self, step: OpStep, parts: Number = 1) -> tuple[Number, Number, Number]:
        """Return (m, k, n) of the step's matrix product for one of ``parts`` equal parts."""
        assert step.product is not None
        m, k, n = (self.size(letter) for letter in step.product)
        return m / (parts if step.cut == "m" else 1), k, n / (parts if step.cut == "n" else 1)

    def flops(self, step: OpStep) -> Number:
        """Return the FLOPs of the step's matrix product; 0 if it has none."""
        m, k, n = self.product(step) if step.product else (0, 0, 0)
        return 2 * m * k * n

    def moved(self, step: OpStep) -> Number:
        """Return how many numbers the step's elementwise operations read or write."""
        return self.T * sum(times * self.size(letter) for times, letter in step.moved)


Axis = Literal["tp", "rows", "ulysses", "ring", "ep"]
STATISTICS = 3
"""Numbers per token that the vocabulary-parallel loss gathers: maximum, sum of exponentials, the
target's logit."""


@dataclass(frozen=True, kw_only=True)
class SendSizes:
    """Sizes for the communication of one op of one slice. tokens: tokens on a rank; rows: the
    tokens in the op's row block. row: bytes of one token's residual stream; columns: number of
    column slices of it (p2). tp: tensor-parallel ranks. words: vocabulary rows on a rank. number:
    bytes of one loss statistic. qkv_bytes: bytes of queries, keys and values; attention_bytes:
    bytes of attention's output; kv_bytes: bytes of the keys and values that circulate on the ring.
    routed: bytes of the rows that a rank sends to experts; routes: of choices of experts, and
    counts: of counts of tokens, of all ranks that gather them."""

    tokens: Number
    rows: Number
    row: Number
    columns: Number
    tp: Number
    words: Number
    number: Number
    qkv_bytes: Number
    attention_bytes: Number
    kv_bytes: Number
    routed: Number = 0
    routes: Number = 0
    counts: Number = 0

    @property
    def stream(self) -> Number:
        """Bytes of the residual stream."""
        return self.tokens * self.row

    @property
    def column_block(self) -> Number:
        """Bytes of one column slice of the residual stream."""
        return self.stream // self.columns

    @property
    def row_block(self) -> Number:
        """Bytes of one row block of the residual stream."""
        return self.rows * self.row

    @property
    def looked_up(self) -> Number:
        """Upper bound on the bytes of distinct embedding rows, over all tensor-parallel ranks; the
        actual number depends on the tokens."""
        rows = (self.tokens + self.words - abs(self.tokens - self.words)) // 2  # min, of numbers or arrays
        return rows * self.row * self.tp

    @property
    def statistics(self) -> Number:
        """Bytes of the loss statistics."""
        return self.tp * STATISTICS * self.tokens * self.number


Whole = Literal[
    "routes",
    "counts",
    "stream",
    "column_block",
    "row_block",
    "looked_up",
    "statistics",
    "qkv_bytes",
    "attention_bytes",
    "kv_bytes",
    "routed",
]


class Send(NamedTuple):
    """The communication of ops of these kinds, for sublayers ``sites`` (empty: any). axis: the
    parallelism it belongs to; ``rows`` is the exchange of embedding rows over tensor-parallel
    ranks. whole: which field of ``SendSizes`` is gathered or reduced; for attention's exchanges,
    the bytes that a rank holds."""

    sites: tuple[str, ...]
    kinds: tuple[Kind, ...]
    axis: Axis
    whole: Whole

    def nbytes(self, sizes: SendSizes) -> Number:
        """Return the bytes that the field ``whole`` names."""
        return getattr(sizes, self.whole)


ATTENDS = ("attn", "block")
SENDS = (
    Send(("embed",), (Kind.ROW_FORWARD,), "rows", "looked_up"),
    Send(("head",), (Kind.COLUMN_FORWARD,), "tp", "statistics"),
    Send((), (Kind.ROW_FORWARD, Kind.ROW_RECOMPUTE), "tp", "column_block"),
    Send((), (Kind.COLUMN_DGRAD,), "tp", "row_block"),
    Send((), (Kind.NORM, Kind.NORM_RECOMPUTE, Kind.NORM_BACKWARD), "tp", "stream"),
    Send(
        ATTENDS,
        (Kind.COLUMN_FORWARD, Kind.COLUMN_RECOMPUTE, Kind.CORE_BACKWARD, Kind.HEADS_EXCHANGE_GRAD),
        "ulysses",
        "qkv_bytes",
    ),
    Send(ATTENDS, (Kind.ATTENTION_CORE, Kind.CORE_RECOMPUTE, Kind.ROW_DGRAD), "ulysses", "attention_bytes"),
    Send(ATTENDS, (Kind.RING_SEND, Kind.RING_SEND_BACKWARD, Kind.RING_SEND_GRAD), "ring", "kv_bytes"),
    Send(("moe",), (Kind.ROUTER,), "ep", "routes"),
    Send(("moe",), (Kind.ROUTE_COUNTS,), "ep", "counts"),
    Send(
        ("moe",),
        (Kind.DISPATCH, Kind.EXPERTS, Kind.DISPATCH_RECOMPUTE, Kind.ROW_DGRAD, Kind.EXPERTS_BACKWARD),
        "ep",
        "routed",
    ),
    Send((), (Kind.ROUTER, Kind.EXPERTS, Kind.EXPERTS_BACKWARD, Kind.ROUTER_BACKWARD), "ep", "routed"),
)


def send_of(site: str, kind: Kind) -> Send:
    """Return the row of an op. Raises KeyError for a kind that sends nothing."""
    for send in SENDS:
        if kind in send.kinds and (not send.sites or site in send.sites):
            return send
    raise KeyError(f"{site}.{kind} sends nothing")


class OrderConstraint(NamedTuple):
    """An ordering constraint that no data dependency implies: another op for which ops of these
    kinds wait, in sublayers ``sites`` (empty: any).

    of: the op waited for. ``part``: the previous part. ``slice``: the previous slice. ``behind``:
    the following segment's backward, up to the op that reads its activations (the following
    layer's, if a whole layer is recomputed). ``look-up``: the embedding of the last slice.
    ``head``: the head's weight gradient for the last slice. why: the reason, as a key word.
    """

    sites: tuple[str, ...]
    kinds: tuple[Kind, ...]
    of: Literal["part", "slice", "behind", "look-up", "head"]
    why: Literal["parts", "slices", "memory", "tied"]


ORDER_CONSTRAINTS = (
    OrderConstraint(
        (),
        (Kind.NORM_RECOMPUTE, Kind.DISPATCH_RECOMPUTE, Kind.COLUMN_RECOMPUTE, Kind.RING_SEND_BACKWARD),
        "behind",
        "memory",
    ),
    OrderConstraint(("head",), (Kind.COLUMN_FORWARD,), "look-up", "tied"),  # the tied weight is gathered twice
    OrderConstraint(("embed",), (Kind.WGRAD,), "head", "tied"),  # both accumulate into one gradient
    OrderConstraint(
        (), (Kind.ROW_FORWARD, Kind.ROW_RECOMPUTE, Kind.COLUMN_DGRAD), "part", "parts"
    ),  # parts share one buffer
    OrderConstraint((), (Kind.WGRAD, Kind.NORM_BACKWARD), "slice", "slices"),  # slices accumulate into one gradient
)
"""Ordering constraints. Two more are written with the data dependencies: a weight gradient waits
for the input gradient too, although the second weight's needs only the output gradient; rings have
two buffers (``plait.core.step.attention_ops``)."""


@cache
def orders_of(site: str, kind: Kind) -> tuple[str, ...]:
    """Return the names of the ops (``OrderConstraint.of``) that an op of this kind waits for in
    addition to its data."""
    return tuple(row.of for row in ORDER_CONSTRAINTS if kind in row.kinds and site in (row.sites or (site,)))


def exchanged(letters: Dimensions, row: Number, *, tp: Number, ulysses: Number) -> tuple[Number, Number, Number]:
    """Return the bytes that a rank holds of attention's exchanges under context parallelism:
    (queries, keys and values; attention's output; keys and values that circulate on the ring). row:
    bytes that one number per token takes for all tokens of a rank."""
    heads, kv_heads = letters.Q // letters.D // tp, at_least_one(letters.K // letters.D // tp)
    each = at_least_one(kv_heads // ulysses) * ulysses
    # The heads that this rank computes, for its Ulysses group's tokens, circulate on the ring.
    size = row * letters.D
    return size * (heads + 2 * each), size * heads, 2 * size * each


def at_least_one(count: Number) -> Number:
    """Return the heads per rank, at least 1: with fewer heads than ranks, several ranks hold the
    same head."""
    return count + (count < 1)
