"""The tensors that ops write and read, as a table of rows; the lifetime of each in memory follows
from it.

A tensor lives from the step of the op that writes it to the end of the last step that reads it. A
recomputed op writes it anew: the first copy ends with its last reader before that. A tensor without
readers is never allocated (for example what autograd would keep of a recomputed norm or core). So
no row describes what recomputation, slices or a split backward keep. Sizes of tensors:
``plait.core.step.memory.sizes``, under the same names.

Names: h, incoming residual stream; n, the normalised stream; full, n gathered over the whole
sequence; z and o, after the first weight and before the second; saved and n_saved, what autograd
keeps in addition for cores and norms; y_partial and y, the segment's contribution to the stream
before and after its collective; g, gradient of the outgoing stream; g_y, gradient of the
contribution, where dropout makes it differ from g; g_full, g_y (or g) gathered over the whole
sequence; g_z, gradient of z; g_n and g_shard, gradient of n.

Names of experts: logits and g_scores, of the router and their gradient; chosen, weights, routes,
all_routes, order, places and rows, which experts a token goes to, and where its rows lie; counts,
all_counts and load, tokens of experts; going and come,
rows sent and received; x, rows by expert, and row_weights, their factors; g_rows and weighted,
operands of the second weights' gradient.

Names of context-parallel attention: going and come, send and receive buffers of an exchange of
heads; q, queries; block0, keys and values of this rank; block1 ..., those received from the
previous rank of the ring; sums and found, attention output and log-sum-exp over the blocks so far;
given, kernel and leaf, one kernel's output, what it saves for the backward, and its input; sum1
..., gradient of a block in transit; g_own, gradient of the own block.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

from plait.core.step.ops import Kind, Path, paths_of, steps_of

Flag = Literal[
    "normed", "joins", "looked_up", "embeds", "dropped", "ends", "leaves", "apart", "scattered", "again", "within",
    "rejoins", "anew", "twice",
    "alone", "shared", "exchanged", "ring", "of_second", "of_first", "first", "last", "middle", "later",
    "next_to_last",
]  # fmt: skip
"""Condition flags of rows.

For a segment: normed, it begins with a norm; joins, the previous segment's output is added to its
stream; looked_up, the previous segment is an embedding; embeds, the segment is the embedding;
dropped, the model has dropout; leaves, its stream goes to another stage; ends, its stream or its
input gradient crosses stages; apart, the other end of a skip connection is on another stage;
scattered, reductions leave a shard of the sequence; again, context-parallel attention is
recomputed; twice, so is its second weight; rejoins, its stream is added up again, since the
previous segment was recomputed; anew, the previous segment's stream will be added up again; within,
norms stand inside the attention core.

For a path: alone or shared, without or with context parallelism; exchanged, heads are exchanged
(Ulysses); ring, keys and values circulate. For a part: of_first or of_second, the weight whose
gradient it computes; first, last; middle, neither first nor last; later, the third or a later part;
next_to_last.
"""


class TensorStep(NamedTuple):
    """The tensors that one step of ops of these kinds writes and reads; the rows of an op run in
    order.

    branch: as in ``OpStep``; ``both``: attention's and the MLP's, one after the other. makes,
    reads: tensor names. drops: names freed here, whoever has read them. work: name of the peak
    temporary bytes while the step runs, results included, on top of what is alive. when: flags that
    must hold, or must not (``-flag``). sent: True if the row belongs to the start of the op's
    collective. projects: True for a weight's product, which selective recomputation does not
    repeat.

    ``name=size`` is a tensor whose size has another name. ``<name`` belongs to the previous
    segment, ``down.name`` to the down of an up's level. ``name!`` crosses stages: it stays until
    the phase ends. ``a|b`` reads the first of the two that the segment has. ``{part}``,
    ``{before}`` and ``{next}`` are part numbers; ``{near}`` and ``{end}`` are the last two of a
    ring.
    """

    branch: Path | Literal["both"]
    kinds: tuple[Kind, ...]
    makes: str = ""
    reads: str = ""
    work: str = ""
    when: str = ""
    drops: str = ""
    sent: bool = False
    projects: bool = False


N, M, F, R, Y, L = Kind.NORM, Kind.NORM_RECOMPUTE, Kind.COLUMN_FORWARD, Kind.ROW_FORWARD, Kind.ROW_RECOMPUTE, Kind.LOSS
D, C, W, J = Kind.ROW_DGRAD, Kind.COLUMN_DGRAD, Kind.WGRAD, Kind.NORM_BACKWARD
T, K, X, S = Kind.RING_SEND, Kind.ATTENTION_CORE, Kind.CORE_RECOMPUTE, Kind.RING_SEND_BACKWARD
G, H, E, Z = Kind.CORE_BACKWARD, Kind.RING_SEND_GRAD, Kind.HEADS_EXCHANGE_GRAD, Kind.COLUMN_OUTPUT_GRAD
P, B, V, I, Q = Kind.ROUTER, Kind.ROUTE_COUNTS, Kind.DISPATCH, Kind.DISPATCH_RECOMPUTE, Kind.EXPERTS  # noqa: E741
A, U, O = Kind.COLUMN_RECOMPUTE, Kind.EXPERTS_BACKWARD, Kind.ROUTER_BACKWARD  # noqa: E741

TENSORS: tuple[TensorStep, ...] = (
    # Input of the segment.
    TensorStep("", (N,), work="joining", when="joins -looked_up"),
    TensorStep("", (N,), work="placing", when="joins looked_up"),
    TensorStep("", (N,), makes="h=came", reads="<y <y_partial", when="-leaves"),
    TensorStep("", (N,), makes="h!=came", reads="<y <y_partial", when="leaves"),
    TensorStep("", (N,), reads="<h", when="anew"),
    TensorStep("", (M,), work="joining", when="rejoins"),
    TensorStep("", (M,), makes="h=came", reads="<y <y_partial", when="rejoins"),
    TensorStep("", (N, M), makes="n_saved n=stream", work="norming", when="normed"),
    TensorStep("", (N, M), makes="full", sent=True),
    TensorStep("down", (N,), makes="pairs=stream"),
    TensorStep("down", (N,), work="stream"),
    TensorStep("down", (N,), makes="skip!=stream", when="apart"),
    TensorStep("up", (N,), makes="skip=stream", when="apart"),
    TensorStep("up", (N,), work="doubling"),
    # First weights, then cores. Context-parallel attention begins here and ends before the second weight.
    TensorStep("both", (F,), makes="z", projects=True),
    TensorStep("attn", (F,), makes="going=there", reads="z", work="leaving", when="exchanged"),
    TensorStep("attn", (F,), makes="q=query block0=block", reads="z", work="leaving", when="shared -exchanged"),
    TensorStep("both", (F,), makes="o saved", reads="z", work="core", when="alone"),
    TensorStep("", (F,), reads="n full"),
    TensorStep("attn", (F, G, E), makes="come=there", sent=True),
    TensorStep("attn", (T,), makes="q=query block0=block", reads="going come", when="first exchanged"),
    TensorStep("attn", (T, S), drops="block{before}", when="later"),
    TensorStep("attn", (T, S), makes="block{next}=block", sent=True),
    TensorStep("attn", (K, X), reads="going", when="-ring"),
    TensorStep("attn", (K, X), makes="kernel given=query", when="-ring"),
    TensorStep("attn", (K, X), reads="come", work="core", when="-ring"),
    TensorStep("attn", (K, X), makes="leaf=there", reads="kernel", work="there", when="-ring"),
    TensorStep("attn", (K,), drops="block{before}", when="ring later"),
    TensorStep("attn", (K,), makes="sums", work="first_block", when="ring first"),
    TensorStep("attn", (K,), work="next_block", when="ring -first"),
    TensorStep("attn", (K,), reads="sums", work="query", when="ring last"),
    TensorStep("attn", (K,), makes="found", drops="block{part}", when="ring last"),
    TensorStep("attn", (K,), makes="going=query", reads="q block0", when="ring last exchanged"),
    TensorStep("attn", (K,), makes="o", reads="q block0", when="ring last -exchanged"),
    TensorStep("attn", (X,), makes="q=query block0=block", reads="going come", when="ring exchanged"),
    TensorStep("attn", (X,), makes="going=query", when="ring exchanged"),
    TensorStep("attn", (X,), makes="o", when="ring -exchanged"),
    TensorStep("attn", (K, X, D), makes="come=query", sent=True),
    # Experts: choices, rows to and from the ranks of experts, and the experts' cores.
    TensorStep("experts", (P,), makes="logits chosen weights routes", work="scoring"),
    TensorStep("experts", (P,), makes="all_routes", sent=True),
    TensorStep("experts", (B,), makes="order=choices counts load", reads="routes all_routes", work="counting"),
    TensorStep("experts", (B,), makes="all_counts", sent=True),
    TensorStep("experts", (V,), makes="places=choices rows=row_numbers"),
    TensorStep("experts", (V, I), makes="going=packed", reads="weights", work="packing"),
    TensorStep("experts", (V, I), makes="come=packed", sent=True),
    TensorStep("experts", (Q,), makes="x=routed row_weights z", reads="going come"),
    TensorStep("experts", (A,), makes="x=routed row_weights z", reads="going come", projects=True),
    TensorStep("experts", (Q, A), makes="o saved", reads="z", work="core"),
    TensorStep("experts", (Q,), makes="going=routed", reads="o x row_weights", work="second", when="exchanged"),
    TensorStep("experts", (Q,), makes="going=returned", reads="o x row_weights", work="second", when="-exchanged"),
    TensorStep("experts", (Q,), makes="come=returned", sent=True),
    TensorStep("experts", (D,), makes="come=routed", sent=True),
    # Second weights; the head's loss, whose gradient takes the logits' place.
    TensorStep("", (R, Y), makes="y_partial", when="first"),
    TensorStep("", (R, Y), makes="y=stream", when="first scattered -embeds", sent=True),
    TensorStep("experts", (R,), reads="going come n full", work="summing", when="last"),
    TensorStep("embed", (R,), makes="y=full", sent=True),
    TensorStep("attn", (R, Y), makes="o", reads="given|going come", when="first exchanged"),
    TensorStep("both", (R, Y), reads="o", when="last"),
    TensorStep("head", (F,), makes="loss"),
    TensorStep("head", (F,), makes="logits", work="softmax"),
    TensorStep("head", (L,), reads="logits loss", work="narrowing"),
    TensorStep("head", (L,), makes="g_logits"),
    # Backward through second weights and cores.
    TensorStep("", (D,), reads="g_y"),
    TensorStep("attn", (D,), makes="o", reads="given|going come", when="exchanged again -twice"),
    TensorStep("attn", (D,), makes="going=query", work="leaving_back", when="exchanged"),
    TensorStep("attn", (D,), makes="g_o=query", work="leaving_back", when="shared -exchanged"),
    TensorStep("both", (D,), makes="g_z=z", reads="saved z", work="core_back", when="alone"),
    TensorStep("attn", (G,), reads="going", when="first"),
    TensorStep("attn", (G,), reads="leaf kernel come given", work="core_back", when="-ring"),
    TensorStep("attn", (G,), makes="going=there", when="-ring"),
    TensorStep("attn", (G,), makes="g_q=sums_of_query sum0=block", when="ring first"),
    TensorStep("attn", (G,), drops="block{part}", when="ring -first"),
    TensorStep("attn", (G,), makes="g_block{part}=block", when="ring middle"),
    TensorStep("attn", (G,), makes="g_own", when="ring last"),
    TensorStep("attn", (G,), work="block_back", when="ring -last"),
    TensorStep("attn", (G,), drops="block{next}", when="ring next_to_last"),
    TensorStep("attn", (G,), reads="found q g_o come block0", work="own_back", when="ring last"),
    TensorStep("attn", (H,), reads="g_block{part} sum{before}", when="-first"),
    TensorStep("attn", (H,), makes="sum{next}=block", sent=True),
    TensorStep("attn", (E,), reads="sum{end} sum{near}", work="rounding"),
    TensorStep("attn", (E,), makes="going=there", reads="g_own g_q"),
    TensorStep("attn", (Z,), reads="going come", work="there", when="exchanged"),
    TensorStep("attn", (Z,), work="turning_back", when="exchanged"),
    TensorStep("attn", (Z,), reads="sum{end} sum{near}", work="rounding", when="-exchanged"),
    TensorStep("attn", (Z,), reads="g_own g_q", work="turning_back", when="-exchanged"),
    TensorStep("attn", (Z,), makes="g_z=z"),
    TensorStep("attn", (Z,), reads="z", when="within"),
    # Backward through first weights and norms; gradients of weights.
    TensorStep("", (C,), makes="g_n=full", when="first"),
    TensorStep("", (C,), makes="g_shard=stream", when="scattered", sent=True),
    TensorStep("both", (C,), reads="g_z", when="last"),
    TensorStep("head", (C,), reads="g_logits", when="last"),
    TensorStep("both", (W,), reads="o g_full|g_y|g", work="second_product", when="of_second"),
    TensorStep("both", (W,), reads="g_z full|n", work="first_product", when="of_first"),
    TensorStep("head", (W,), reads="g_logits full|n", work="product"),
    TensorStep("embed", (W,), reads="g_full g_y|g", work="scattering"),
    TensorStep("experts", (D,), makes="going=routed"),
    TensorStep("experts", (U,), makes="g_rows=routed", reads="going come", work="routed"),
    TensorStep("experts", (U,), makes="g_z=z weighted=o", reads="saved z o row_weights x", work="core_back"),
    TensorStep("experts", (U,), makes="going=packed", work="packing", when="exchanged"),
    TensorStep("experts", (U,), makes="going=packed_back", work="packing", when="-exchanged"),
    TensorStep("experts", (U,), makes="come=packed_back", sent=True),
    TensorStep("experts", (O,), makes="g_scores=logits", reads="logits n full", work="scoring_back"),
    TensorStep("experts", (C,), reads="going come g_scores chosen order places", work="summing_back", when="first"),
    TensorStep("experts", (W,), reads="g_rows weighted", work="second_product", when="of_second"),
    TensorStep("experts", (W,), reads="g_z x", work="first_product", when="of_first"),
    TensorStep("experts", (J,), reads="counts all_counts load rows"),
    TensorStep("", (J,), reads="n_saved", work="norm_back"),
    TensorStep("up", (J,), makes="down.g_skip=stream", when="-apart"),
    TensorStep("up", (J,), makes="down.g_skip!=stream", when="apart"),
    TensorStep("", (J,), work="dropping", when="joins dropped"),
    TensorStep("", (J,), makes="<g=came", when="-ends"),
    TensorStep("", (J,), makes="<g!=came", when="ends"),
    TensorStep("", (J,), makes="<g_y=came", when="joins dropped"),
    TensorStep("", (J,), reads="h g_n g_shard n g pairs g_skip", when="-leaves"),
    TensorStep("up", (J,), reads="skip"),
    TensorStep("", (J,), makes="<g_full=full", sent=True),
)
BRANCH_OWN = frozenset(("z", "o", "saved", "g_z"))
"""Tensor names of which each of two parallel paths has its own."""


class BranchStep(NamedTuple):
    """A row for one path. number: 1 for the MLP of a parallel block, else 0. when: flags, each with
    the value it must have."""

    branch: Path
    number: int
    row: TensorStep
    when: tuple[tuple[str, bool], ...]


@cache
def tensor_steps(site: str, kind: Kind, *, sent: bool = False, selective: bool = False) -> tuple[BranchStep, ...]:
    """Return the rows of a segment's ops of a kind, or of the start of their collective, in order.
    selective: True under selective recomputation, which repeats only cheap cores."""
    own, runs = paths_of(site), F if kind == Kind.COLUMN_RECOMPUTE else kind
    only = selective and kind == Kind.COLUMN_RECOMPUTE
    runs_again = [branch for branch in own if not only or branch == "experts" or steps_of(branch, kind, selective=True)]
    found = list[BranchStep]()
    for row in TENSORS:
        if (runs in row.kinds or kind in row.kinds) and row.sent == sent and not (only and row.projects):
            of: tuple[Path, ...] = ("attn", "mlp") if row.branch == "both" else (row.branch,)
            when = tuple((word.removeprefix("-"), word[0] != "-") for word in row.when.split())
            found += [
                BranchStep(branch, own.index(branch) if branch else 0, row, when)
                for branch in of
                if branch in ("", *runs_again)
            ]
    return tuple(found)
