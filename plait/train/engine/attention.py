"""Attention over a sequence that ranks share: the ops of ``core.step.attention_ops`` on one slice,
and the buffers of their collectives.

No op here waits for or starts a collective. An op leaves outgoing data in a buffer, and reads
received data because the list has awaited it. A communication buffer is freed by an op that needs
the end of its collective, directly or through another op.

``SublayerCore`` is the core on one rank alone: an activation, or attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from plait.train.engine.segment import Buffers
from plait.train.model import sublayers
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
    sum_dtype,
)
from plait.train.model.sublayers import Attention


@dataclass(eq=False, repr=False)
class SublayerCore:
    """The tensors of one sublayer's core (attention, or the MLP's activation) on a rank that shares
    its sequences with no other. z: output of the first weight, [S, b, ...]. o: input of the second
    weight; o and gradients are [S * b, ...].

    repeats: whether op A runs the core again.
    """

    module: sublayers.Sublayer
    repeats: bool
    z: Tensor = field(init=False)
    o: Tensor = field(init=False)
    o_graph: Tensor = field(init=False)  # o with its autograd graph, if a gradient will be taken
    g_z: Tensor = field(init=False)
    g_inner: Sequence[Tensor] = field(init=False)  # gradients of the core's own parameters

    def project(self, full: Tensor) -> None:
        """Multiply by the first weight."""
        self.z = linear(full, self.module.column.weight, self.module.column.bias)

    def activate(self, context: SliceContext, *, train: bool) -> None:
        """Run the core. train: whether this run's autograd graph is kept for the backward pass."""
        with torch.set_grad_enabled(train):
            o = self.module.core(self.z.requires_grad_(train), context)
        if train:
            self.o_graph = o
        self.o = o.detach().flatten(0, 1)

    def forget_first(self) -> None:
        """Free the first weight's output, which is computed again or never needed for a
        gradient."""
        del self.z

    def unpack_output(self) -> None:
        """Do nothing: ``o`` is ready to be read, as no other rank has a part of it."""

    def backward(self, gradient: Tensor) -> Tensor:
        """Run the backward pass from the gradient of the second weight's output; return o and free
        the core's tensors."""
        g_o = (gradient @ self.module.row.weight).view(self.o_graph.shape)
        g_z, *self.g_inner = gradients_of(self.o_graph, [self.z, *self.module.inner], g_o)
        self.g_z, o = g_z.flatten(0, 1), self.o
        del self.z, self.o, self.o_graph
        return o


@dataclass(eq=False, repr=False)
class SharedCore(SublayerCore):
    """The attention core of one slice, shared with other ranks. going, come: source and result of
    an all-to-all; both only if ranks exchange heads.

    blocks: keys and values by their distance in the ring, [2, b, N_kv, S, D]; 0 is this rank's own
    block. partial_result: attention output and log-sum-exp over the blocks so far.
    """

    context: SliceContext
    trains: bool
    going: Tensor = field(init=False)
    come: Tensor = field(init=False)
    leaf: Tensor = field(init=False)  # queries, keys and values as received, an autograd leaf (no ring)
    q: Tensor = field(init=False)  # of this rank's heads, [b, N, S, D] (ring)
    blocks: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    partial_result: list[Tensor] = field(default_factory=list[Tensor])
    g_o: Tensor = field(init=False)  # gradient of attention, [b, N, S, D] (ring)
    g_q: Tensor = field(init=False)
    g_own: Tensor = field(init=False)  # gradient of this rank's own block
    g_block: Tensor = field(init=False)  # gradient of the block that was attended to last
    g_going: Tensor = field(init=False)  # a block's gradient, summed over the ranks it has passed: being sent
    g_come: Tensor = field(init=False)  # a block's gradient: being received

    @property
    def attention(self) -> Attention:
        """The attention module."""
        return cast("Attention", self.module)

    @property
    def ulysses(self) -> int:
        """Number of ranks that exchange heads (Ulysses)."""
        return self.attention.sequence.ulysses.size

    @property
    def ring(self) -> int:
        """Number of ranks of an attention ring."""
        return self.attention.sequence.ring.size

    # ---- forward ----

    def activate(self, context: SliceContext, *, train: bool) -> None:
        """Run F or A after the first weight: apply rotary positions, and pack the heads for the
        all-to-all."""
        q, k, v = self.attention.rotated_qkv(self.z, context)
        if not (self.trains and self.attention.inner):
            del self.z
        if self.ulysses > 1:
            self.going = for_heads(q, k, v, self.ulysses)
        else:
            self._take_in(*(t.permute(1, 2, 0, 3) for t in (q, k, v)))

    def forget_first(self) -> None:
        """Free z if ``activate`` kept it: with norms of queries and keys, whose gradient reads
        z."""
        if self.trains and self.attention.inner:
            del self.z

    def heads_exchange_buffers(self) -> Buffers:
        """Return (result, source) of the all-to-all of heads after op F, A, K, X, D, G or E
        (``core.step.ops.Kind`` names them)."""
        self.come = torch.empty_like(self.going)
        return self.come, self.going

    def _take_in(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.q, self.blocks = q.contiguous(), {0: torch.stack((k, v))}

    def _unpack(self) -> None:
        """Unpack queries, keys and values received from all ranks."""
        heads = self.attention.num_heads, self.attention.num_kv_heads
        self._take_in(*split_heads(self.come, self.ulysses, *heads))
        del self.going, self.come

    def ring_send(self, part: int) -> None:
        """Run one part of op T: the newest block of keys and values is sent on; free the previous
        block."""
        if part == 0 and self.ulysses > 1:
            self._unpack()
        self._drop(part - 1)

    def ring_send_buffers(self, part: int) -> Buffers:
        """Return (result, source) of the transfer to the ring's next rank after op T or S (sending
        keys and values)."""
        self.blocks[part + 1] = torch.empty_like(self.blocks[part])
        return self.blocks[part + 1], self.blocks[part]

    def _drop(self, number: int) -> None:
        """Free block ``number`` if it came from another rank."""
        if number > 0:
            self.blocks.pop(number, None)

    def attention_core(self, part: int) -> None:
        """Run one part of op K: attention to one block; the last part leaves the result."""
        if self.ring == 1:
            self._attend_whole(train=self.trains and not self.repeats)
            return
        self._drop(part - 1)
        attend_block(self.partial_result, self.q, self.blocks[part], self.attention.ring_step(part, self.context))
        if part < self.ring - 1:
            return
        self._drop(part)
        self.partial_result[0] = self.partial_result[0].to(self.q.dtype)
        self._give()
        if self.repeats or not self.trains:
            del self.q
            self.blocks.clear()
        if not self.trains:
            self.partial_result = []

    def _attend_whole(self, *, train: bool) -> None:
        """Run attention over all tokens with one kernel. train: keep the autograd graph for the
        backward pass."""
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
        """Pack the attention output of the ring for the all-to-all back to the ranks that own its
        tokens."""
        o = self.partial_result[0]
        if self.ulysses > 1:
            self.going = for_tokens(o, self.ulysses)
        else:
            self.o = o.permute(2, 0, 1, 3).flatten(2).flatten(0, 1)

    def unpack_output(self) -> None:
        """Unpack ``o`` from the all-to-all of attention's output, for the second weight (op R, Y or
        D)."""
        if self.ulysses > 1:
            self.o = from_tokens(self.come)
            del self.going, self.come

    def core_recompute(self) -> None:
        """Run op X, after A: attention again; with a ring, only its kept result is packed again."""
        if self.ring == 1:
            self._attend_whole(train=True)
            return
        if self.ulysses > 1:
            self._unpack()
        self._give()

    # ---- backward ----

    def backward(self, gradient: Tensor) -> Tensor:
        """Run op D: the gradient of attention's output, packed for the ranks of the same heads;
        return o."""
        if "o" not in self.__dict__:  # attention ran again, and no Y has unpacked its output since
            self.unpack_output()
        o, (size, b) = self.o, (self.attention.spec.head_size, len(self.context.samples))
        del self.o
        g_o = (gradient @ self.module.row.weight).view(-1, b, self.attention.num_heads, size)
        if self.ulysses > 1:
            self.going = g_o.unflatten(2, (self.ulysses, -1)).permute(2, 0, 1, 3, 4).contiguous()
        else:
            self.g_o = g_o.permute(1, 2, 0, 3)
        return o

    def ring_send_backward(self, part: int) -> None:
        """Run one part of op S: send the newest block of keys and values on for the backward pass;
        free the previous block."""
        self._drop(part - 1)

    def core_backward(self, part: int) -> None:
        """Run one part of op G: the gradient of the newest block; of this rank's own block last;
        without a ring, of all tokens."""
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
            self.g_q = torch.zeros_like(self.q, dtype=sum_dtype(self.q.dtype))
        self._drop(part)
        block, turn = self.blocks[0 if last else number], self.attention.ring_step(0 if last else number, self.context)
        # A gradient that is sent is rounded once per rank: fp32 would double the bytes.
        into = torch.zeros_like(block, dtype=sum_dtype(self.q.dtype) if last else None)
        block_gradient(self.g_o, self.q, block, self.partial_result, (self.g_q, into), turn)
        if last:
            self.g_own, self.partial_result = into, []
            self.blocks.clear()
            del self.q, self.g_o
        else:
            self.g_block = into
            if part == self.ring - 2:
                self._drop(number)

    def ring_send_grad(self, part: int) -> None:
        """Run one part of op H: add this rank's gradient of a block to that received, to be sent
        on."""
        if part:
            self.g_going = self.g_come.add_(self.g_block)
            del self.g_come
        else:
            self.g_going = self.g_block
        del self.g_block

    def ring_send_grad_buffers(self) -> Buffers:
        """Return (result, source) of the ring step that sends gradients of keys and values on,
        after op H."""
        self.g_come = torch.empty_like(self.g_going)
        return self.g_come, self.g_going

    def _home(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the complete gradients of queries, keys and values of this rank's heads, [S, b, N,
        D]."""
        dtype = self.g_come.dtype
        k, v = self.g_own.add_(self.g_come).to(dtype).permute(0, 3, 1, 2, 4)
        q = self.g_q.to(dtype).permute(2, 0, 1, 3)
        del self.g_own, self.g_come, self.g_going, self.g_q
        return q, k, v

    def heads_exchange_grad(self) -> None:
        """Run op E: pack the gradients of queries, keys and values for the all-to-all."""
        self.going = torch.cat(self._home(), dim=2).unflatten(0, (self.ulysses, -1)).contiguous()

    def column_output_grad(self) -> None:
        """Run op Z: the gradient of the first weight's output."""
        if self.ulysses > 1:
            gradients = from_heads(self.come, self.attention.num_heads, self.attention.num_kv_heads)
            del self.going, self.come
        else:
            gradients = self._home()
        z = self.__dict__.pop("z", None)
        g_z, self.g_inner = self.attention.rotated_qkv_grad(*gradients, z, self.context)
        self.g_z = g_z.flatten(0, 1)
