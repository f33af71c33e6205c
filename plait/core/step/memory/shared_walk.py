"""What attention that is shared with other ranks takes of memory: its ops (``core.step.attention_ops``),
walked with the tensors that ``plait.train.engine.attention`` makes and lets go of; and the bookkeeping of all
walks."""

from __future__ import annotations

from plait.core.model.precision import MASTER
from plait.core.step.memory.segment_sizes import Shared, Sizes
from plait.core.step.ops import send_of
from plait.core.step.segments import Kind, SegmentGraph, SegmentOp, SharedAttention

NOTHING = 0
"""A size that is known to be none, of any column."""


class Bookkeeping:
    """Which tensors are there, how large, and who holds them; a tensor is there as long as anybody does."""

    _most = staticmethod(max)

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.graph = sizes, sizes.graph
        self._live: dict[tuple[str, int, int, str], tuple[int, set[str]]] = {}
        self.now = self.peak = 0
        self._rises = False

    def _hold(self, op: SegmentOp, name: str, size: int, *holders: str) -> None:
        self._live[op.site, op.layer, op.slice, name] = size, set(holders or ("",))
        if size is not NOTHING:
            self.now = self.now + size  # not in place: sizes may be columns, one walk for many strategies
            self._rises = True

    def _free(self, op: SegmentOp, *names: str, holder: str = "") -> None:
        for name in names:
            key = op.site, op.layer, op.slice, name
            found = self._live.get(key)
            if found is None:
                continue
            size, holders = found
            holders.discard(holder)
            if not holders:
                del self._live[key]
                if size is not NOTHING:
                    self._top()
                    self.now = self.now - size

    def _spike(self, size: int) -> None:
        self.peak = self._most(self.peak, self.now + size)
        self._rises = False

    def _top(self) -> None:
        """Remember what there is, if it has grown since: it is about to be less."""
        if self._rises:
            self.peak = self._most(self.peak, self.now)
            self._rises = False


class SharedWalk(Bookkeeping):
    """Ops of shared attention. Names: going, come: of an all-to-all; block2: what has come two ranks far;
    found: attention and log-sum-exp."""

    graph: SegmentGraph

    def _shared(self, op: SegmentOp) -> tuple[SharedAttention, Shared]:
        shared = self.graph.shared(op.site)
        assert shared is not None
        return shared, self.sizes.shared(op)

    def _again(self, op: SegmentOp) -> bool:
        return Kind.CORE_AGAIN in self.graph.again(op.site, op.layer)

    def _sent(self, op: SegmentOp) -> None:
        """A collective of attention makes its result."""
        each = self.sizes.shared(op)
        if op.kind in (Kind.ROTATE, Kind.ROTATE_AGAIN):
            self._hold(op, f"block{op.part + 1}", each.block)
        elif op.kind == Kind.ROTATE_GRAD:
            self._hold(op, f"g_come{op.part}", each.block)
        else:
            self._hold(op, "come", each.there if send_of(op.site, op.kind).whole == "there" else each.query)

    def _leave(self, op: SegmentOp) -> None:
        """F and A after the first weight, whose result is ``z0``."""
        shared, each = self._shared(op)
        turning = each.turning + each.within
        self._spike(self.sizes.larger(turning, each.turned + each.there * (1 + (shared.ulysses > 1))))
        if shared.ulysses > 1:
            self._hold(op, "going", each.there)
        else:
            self._take_in(op, each)
        if not self._within or (self._again(op) and op.kind == Kind.FIRST):
            self._free(op, "z0")

    @property
    def _within(self) -> bool:
        """Whether norms within attention keep what they normalise."""
        return any(self.sizes.strategy.normed(self.sizes.spec))

    def _take_in(self, op: SegmentOp, each: Shared) -> None:
        self._hold(op, "q", each.query)
        self._hold(op, "block0", each.block)

    def _unpack(self, op: SegmentOp, each: Shared) -> None:
        self._take_in(op, each)
        self._free(op, "going", "come")

    def _T(self, op: SegmentOp) -> None:  # noqa: N802
        shared, each = self._shared(op)
        if op.part == 0 and shared.ulysses > 1:
            self._unpack(op, each)
        self._drop(op, op.part - 1)

    def _drop(self, op: SegmentOp, number: int) -> None:
        if number > 0:
            self._free(op, f"block{number}")

    def _K(self, op: SegmentOp) -> None:  # noqa: N802
        shared, each = self._shared(op)
        if shared.ring == 1:
            self._whole(op, each, keeps=self.graph.backward and not self._again(op))
            return
        self._drop(op, op.part - 1)
        sums = self.sizes.wide(each.query)  # what is found of each block is added up in fp32 at least
        if op.part == 0:
            self._spike(each.query + each.lse + self.sizes.larger(each.expanded, sums + each.lse))
            self._hold(op, "found", sums + each.lse)
        else:
            self._spike((each.query + each.lse) // 2 + self.sizes.larger(each.expanded, sums // 2))
        if op.part < shared.ring - 1:
            return
        self._spike(each.query)
        self._free(op, "found")
        self._hold(op, "found", each.query + each.lse)
        self._drop(op, op.part)
        self._hold(op, "going" if shared.ulysses > 1 else "o0", each.query)
        if self._again(op):
            self._free(op, "q", "block0")

    def _whole(self, op: SegmentOp, each: Shared, *, keeps: bool) -> None:
        """One kernel."""
        self._free(op, "going")
        self._hold(op, "kernel", each.lse + each.expanded)
        self._hold(op, "given", each.query, "sent", *(["kernel"] if keeps else []))
        self._spike(each.forward)
        self._free(op, "come")
        if keeps:
            self._hold(op, "leaf", each.there)
        else:
            self._spike(each.there)
            self._free(op, "kernel")

    def _arrive(self, op: SegmentOp) -> None:
        """What attention gave is here, of all heads."""
        shared, each = self._shared(op)
        if shared.ulysses > 1:
            self._hold(op, "o0", each.query)
            self._free(op, "given", holder="sent")
            self._free(op, "going", "come")

    def _X(self, op: SegmentOp) -> None:  # noqa: N802
        shared, each = self._shared(op)
        if shared.ring == 1:
            self._whole(op, each, keeps=True)
            return
        if shared.ulysses > 1:
            self._unpack(op, each)
        self._hold(op, "going" if shared.ulysses > 1 else "o0", each.query)

    def _back(self, op: SegmentOp) -> None:
        """D, of the shared core."""
        shared, each = self._shared(op)
        if self._again(op):
            self._arrive(op)
        self._spike(each.query * (1 + (shared.ulysses > 1)))
        self._hold(op, "going" if shared.ulysses > 1 else "g_o", each.query)

    def _S(self, op: SegmentOp) -> None:  # noqa: N802
        self._drop(op, op.part - 1)

    def _G(self, op: SegmentOp) -> None:  # noqa: N802
        shared, each = self._shared(op)
        if op.part == 0:
            self._free(op, "going")
        if shared.ring == 1:
            self._spike(self.sizes.larger(2 * each.there + each.expanded, each.there + each.backward))
            self._free(op, "leaf", "kernel", "come")
            self._free(op, "given", holder="kernel")
            self._hold(op, "going", each.there)
            return
        last = op.part == shared.ring - 1
        if op.part == 0:
            self._hold(op, "g_q", self.sizes.wide(each.query))
        self._drop(op, op.part)
        self._hold(op, "g_own" if last else f"g_block{op.part}", self.sizes.wide(each.block) if last else each.block)
        # Of another's block half of the queries see all, or all see half. Gradients are added up in fp32 at
        # least.
        keys = self.sizes.larger(each.block, each.expanded) + each.expanded
        self._spike(keys + (each.query + self.sizes.wide(each.query)) // (1 if last else 2))
        if last:
            self._free(op, "found", "q", "g_o", "come", "block0")
        elif op.part == shared.ring - 2:
            self._drop(op, op.part + 1)

    def _H(self, op: SegmentOp) -> None:  # noqa: N802
        """What has come is the sum from now on, and goes on."""
        if op.part:
            self._free(op, f"g_block{op.part}", "g_block0" if op.part == 1 else f"g_come{op.part - 2}")

    def _come_home(self, op: SegmentOp, each: Shared, ring: int) -> None:
        """The sums are rounded to what the model computes in."""
        if self.sizes.itemsize < MASTER:
            self._spike(2 * each.query + each.block)
        self._free(op, f"g_come{ring - 2}", "g_block0" if ring == 2 else f"g_come{ring - 3}")

    def _E(self, op: SegmentOp) -> None:  # noqa: N802
        shared, each = self._shared(op)
        self._come_home(op, each, shared.ring)
        self._hold(op, "going", each.there)
        self._free(op, "g_own", "g_q")

    def _Z(self, op: SegmentOp) -> None:  # noqa: N802
        shared, each = self._shared(op)
        turning = self.sizes.larger(each.turning, each.turned + each.first + each.tables)
        if self._within:  # computed again for their gradients
            turning = self.sizes.larger(turning, each.turned + each.within_kept + 4 * self.sizes.wide(each.query))
        if shared.ulysses > 1:
            self._spike(each.there)
            self._free(op, "going", "come")
            self._spike(each.there + turning)
        else:
            self._come_home(op, each, shared.ring)
            self._spike(turning)
            self._free(op, "g_own", "g_q")
        self._hold(op, "g_z0", each.first, "C", "operand")
        self._free(op, "z0")
