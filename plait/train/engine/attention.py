"""Attention that is shared with other ranks, piece by piece: the ops of ``core.step.attention_ops`` on one
slice, and the buffers of what travels between them.

No op here waits or sends: it leaves what goes out, and reads what has come because the list says so. A
buffer that travels is freed by an op that needs its collective's end, or needs an op that does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from plait.train.engine.cores import SublayerCore
from plait.train.engine.segment import Buffers
from plait.train.model.basics import SliceContext
from plait.train.model.kernels import gradients_of
from plait.train.model.sequence import (
    attend_block,
    block_gradient,
    for_heads,
    for_tokens,
    from_heads,
    from_tokens,
    split_heads,
    sums,
)
from plait.train.model.sublayers import Attention


@dataclass(eq=False, repr=False)
class SharedCore(SublayerCore):
    """One slice's. going, come: source and result of an all-to-all; ``come`` takes the place of ``going``
    where heads are not exchanged.

    blocks: keys and values by how far they have come round the ring, [2, b, N_kv, S, D]; 0 is its own.
    found: attention and log-sum-exp over the blocks so far.
    """

    context: SliceContext
    trains: bool
    going: Tensor = field(init=False)
    come: Tensor = field(init=False)
    leaf: Tensor = field(init=False)  # queries, keys and values as they have come, for autograd (no ring)
    q: Tensor = field(init=False)  # of this rank's heads, [b, N, S, D] (ring)
    blocks: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    found: list[Tensor] = field(default_factory=list[Tensor])
    g_o: Tensor = field(init=False)  # gradient of attention, [b, N, S, D] (ring)
    g_q: Tensor = field(init=False)
    g_own: Tensor = field(init=False)  # of the own block
    g_block: Tensor = field(init=False)  # of the block that was attended to last
    g_going: Tensor = field(init=False)  # of a block, from all ranks that it has passed: on its way
    g_come: Tensor = field(init=False)

    @property
    def attention(self) -> Attention:
        """The module."""
        return cast("Attention", self.module)

    @property
    def ulysses(self) -> int:
        """Ranks that exchange heads."""
        return self.attention.sequence.ulysses.size

    @property
    def ring(self) -> int:
        """Ranks of a ring."""
        return self.attention.sequence.ring.size

    # ---- forward ----

    def activate(self, context: SliceContext, *, train: bool) -> None:
        """F and A after the first weight: rotary positions, and heads are packed for those who attend to
        them."""
        q, k, v = self.attention.turned(self.z, context)
        if not (self.trains and self.attention.inner):
            del self.z
        if self.ulysses > 1:
            self.going = for_heads(q, k, v, self.ulysses)
        else:
            self._take_in(*(t.permute(1, 2, 0, 3) for t in (q, k, v)))

    def forget_first(self) -> None:
        """``activate`` has, unless a norm within needs it."""
        if self.trains and self.attention.inner:
            del self.z

    def exchange(self) -> Buffers:
        """After F, A, K, X, D, G and E: heads go."""
        self.come = torch.empty_like(self.going)
        return self.come, self.going

    def _take_in(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.q, self.blocks = q.contiguous(), {0: torch.stack((k, v))}

    def _unpack(self) -> None:
        """Queries, keys and values have come from all ranks."""
        heads = self.attention.num_heads, self.attention.num_kv_heads
        self._take_in(*split_heads(self.come, self.ulysses, *heads))
        del self.going, self.come

    def turn(self, part: int) -> None:
        """T: the block goes on that has come last; the one before is done with."""
        if part == 0 and self.ulysses > 1:
            self._unpack()
        self._drop(part - 1)

    def rotate_block(self, part: int) -> Buffers:
        """After T and S."""
        self.blocks[part + 1] = torch.empty_like(self.blocks[part])
        return self.blocks[part + 1], self.blocks[part]

    def _drop(self, number: int) -> None:
        """A block that came from another rank is read no more."""
        if number > 0:
            self.blocks.pop(number, None)

    def attend(self, part: int) -> None:
        """K: attention to a block; the last leaves the result."""
        if self.ring == 1:
            self._attend_whole(train=self.trains and not self.repeats)
            return
        self._drop(part - 1)
        attend_block(self.found, self.q, self.blocks[part], self.attention.turn(part, self.context))
        if part < self.ring - 1:
            return
        self._drop(part)
        self.found[0] = self.found[0].to(self.q.dtype)
        self._give()
        if self.repeats or not self.trains:
            del self.q
            self.blocks.clear()
        if not self.trains:
            self.found = []

    def _attend_whole(self, *, train: bool) -> None:
        """Over all tokens, by one kernel."""
        attention, leaf = self.attention, self.come
        del self.going, self.come
        with torch.set_grad_enabled(train):
            leaf.requires_grad_(train)
            o = attention.attend(
                *split_heads(leaf, self.ulysses, attention.num_heads, attention.num_kv_heads), self.context
            )
        if train:
            self.leaf, self.o_graph = leaf, o
        self.going = for_tokens(o.detach(), self.ulysses)

    def _give(self) -> None:
        """A ring's result, to whoever has its tokens."""
        o = self.found[0]
        if self.ulysses > 1:
            self.going = for_tokens(o, self.ulysses)
        else:
            self.o = o.permute(2, 0, 1, 3).flatten(2).flatten(0, 1)

    def arrive(self) -> None:
        """R, Y and D: attention of all heads has come."""
        if self.ulysses > 1:
            self.o = from_tokens(self.come)
            del self.going, self.come

    def again(self) -> None:
        """X, after A."""
        if self.ring == 1:
            self._attend_whole(train=True)
            return
        if self.ulysses > 1:
            self._unpack()
        self._give()

    # ---- backward ----

    def back(self, gradient: Tensor) -> Tensor:
        """D: the gradient of attention's output, of the heads that others attend to as well."""
        if "o" not in self.__dict__:  # it ran again, and no Y has read it since
            self.arrive()
        o, (size, b) = self.o, (self.attention.spec.head_size, len(self.context.samples))
        del self.o
        g_o = (gradient @ self.module.row.weight).view(-1, b, self.attention.num_heads, size)
        if self.ulysses > 1:
            self.going = g_o.unflatten(2, (self.ulysses, -1)).permute(2, 0, 1, 3, 4).contiguous()
        else:
            self.g_o = g_o.permute(1, 2, 0, 3)
        return o

    def turn_back(self, part: int) -> None:
        """S: as T."""
        self._drop(part - 1)

    def block_gradient(self, part: int) -> None:
        """G: of the block that has come last; in the end of the own one, and, without a ring, of all
        tokens."""
        if part == 0 and self.ulysses > 1:
            self.g_o = self.come.flatten(0, 1).permute(1, 2, 0, 3)
            del self.going, self.come
        if self.ring == 1:
            (found,) = gradients_of(self.o_graph, [self.leaf], self.g_o)
            self.going = found.contiguous()
            del self.leaf, self.o_graph, self.g_o
            return
        last, number = part == self.ring - 1, part + 1
        if part == 0:
            self.g_q = torch.zeros_like(self.q, dtype=sums(self.q.dtype))
        self._drop(part)
        block, turn = self.blocks[0 if last else number], self.attention.turn(0 if last else number, self.context)
        # Rounded once a rank where it travels: in fp32 it would be twice as long.
        into = torch.zeros_like(block, dtype=sums(self.q.dtype) if last else None)
        block_gradient(self.g_o, self.q, block, self.found, (self.g_q, into), turn)
        if last:
            self.g_own, self.found = into, []
            self.blocks.clear()
            del self.q, self.g_o
        else:
            self.g_block = into
            if part == self.ring - 2:
                self._drop(number)

    def hand_on(self, part: int) -> None:
        """H: what other ranks have added to the gradient of a block, and this one."""
        if part:
            self.g_going = self.g_come.add_(self.g_block)
            del self.g_come
        else:
            self.g_going = self.g_block
        del self.g_block

    def rotate_gradient(self) -> Buffers:
        """After H."""
        self.g_come = torch.empty_like(self.g_going)
        return self.g_come, self.g_going

    def _home(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values of this rank's heads, [S, b, N, D]."""
        dtype = self.g_come.dtype
        k, v = self.g_own.add_(self.g_come).to(dtype).permute(0, 3, 1, 2, 4)
        q = self.g_q.to(dtype).permute(2, 0, 1, 3)
        del self.g_own, self.g_come, self.g_going, self.g_q
        return q, k, v

    def send_gradients(self) -> None:
        """E."""
        self.going = torch.cat(self._home(), dim=2).unflatten(0, (self.ulysses, -1)).contiguous()

    def finish(self) -> None:
        """Z: the gradient of what the first weight gave."""
        if self.ulysses > 1:
            gradients = from_heads(self.come, self.attention.num_heads, self.attention.num_kv_heads)
            del self.going, self.come
        else:
            gradients = self._home()
        z = self.__dict__.pop("z", None)
        g_z, self.g_inner = self.attention.turned_back(*gradients, z, self.context)
        self.g_z = g_z.flatten(0, 1)
