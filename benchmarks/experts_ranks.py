"""One rank of ``experts.py``: times forward and backward of every variant, in turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import as_rank, interleaved, timed_together
from torch import Tensor
from typical import typical_costs

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.core.step.orders.segment_costs import SegmentCosts
from plait.train.comm.wire import Exchanger, NullWire, open_wire
from plait.train.engine.executor import RankContext, make_executor
from plait.train.engine.gradients import Gradients
from plait.train.engine.inflight import MicroBatch
from plait.train.machine.gpu import device_of
from plait.train.model import formulas, router
from plait.train.model.expert_layer import ExpertGroup, ExpertLayer
from plait.train.model.grouped import RowGroups
from plait.train.model.transformer import ModelCut, Transformer
from plait.train.record.recorder import Recorder

EP = 2


def measured(rank: int, text: str) -> dict[str, Any]:
    """Seconds of every variant."""
    setup: dict[str, Any] = json.loads(text)
    spec, size, device = ModelSpec.from_dict(setup["model"]), setup["batch"], device_of(None)
    assert spec.experts is not None
    recorder, wire = Recorder(device), open_wire("gloo")
    held = range(rank * spec.experts.count // EP, (rank + 1) * spec.experts.count // EP)
    logged = cast("Exchanger", recorder.over(wire, range(EP), "ep"))
    models = {
        name: Transformer(spec, Strategy(ep=EP), ModelCut(experts=ExpertGroup(over, over, NullWire(), 0, held)))
        for name, over in (("recorded", logged), ("bare", wire))
    }
    gradients = {name: Gradients(model) for name, model in models.items()}
    tokens = torch.randint(0, spec.vocab, (size, spec.max_sequence), generator=torch.Generator().manual_seed(rank))
    scale = 1.0 / (EP * tokens.numel())
    batch = MicroBatch(tokens, tokens.roll(-1, 1), torch.arange(size), scale, 0, token_share=scale)

    def step(name: str, strategy: Strategy, costs: SegmentCosts | None = None) -> Callable[[], object]:
        here = RankContext(device, recorder if name == "recorded" else None)
        load = Load(size, spec.max_sequence, costs)
        executor = make_executor(models[name], strategy, NullWire(), load, here, gradients=gradients[name])

        def run() -> None:
            gradients[name].zero()
            executor.run(batch)

        return run

    costs = typical_costs(step("recorded", Strategy(ep=EP, overlap="sync")), recorder)
    plain = Plain(models["bare"])

    def timed(name: str) -> Callable[[int], float]:
        strategy = Strategy(ep=EP, **setup["variants"][name])
        run = (lambda: plain.step(batch)) if name == "plain" else step("bare", strategy, costs)
        return lambda _: timed_together(run)

    return {"seconds": interleaved({name: timed(name) for name in setup["variants"]}, setup["rounds"], turned=True)}


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows whose gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, into: list[int], out: list[int]) -> Tensor:
        ctx.sizes = into, out
        result = rows.new_empty((sum(into), rows.shape[1]))
        dist.all_to_all_single(result, rows.contiguous(), into, out)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        into, out = ctx.sizes
        return _Exchange.apply(gradient, out, into), None, None  # type: ignore[return-value]


class Plain:
    """The same model in the usual form: modules' functions, autograd, exchanges awaited inside."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.spec = model, model.spec
        self.weights = {name: one.detach().clone().requires_grad_() for name, one in model.named.items()}

    def step(self, batch: MicroBatch) -> None:
        """Forward and backward, gradients anew."""
        for weight in self.weights.values():
            weight.grad = None
        logits = self.logits(batch.tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
        (loss * batch.scale).backward()

    def logits(self, tokens: Tensor) -> Tensor:
        """[B, S] -> [B, S, V]."""
        w, spec = self.weights, self.spec
        h, rope = w["embedding.weight"][tokens], self.model.rope
        assert rope is not None
        cos, sin = rope.first(tokens.shape[1])
        for at in range(spec.num_layers):
            n = F.rms_norm(h, (spec.hidden,), w[f"layers.{at}.attn.norm.weight"], spec.norm_eps)
            z = F.linear(n, w[f"layers.{at}.attn.column.weight"])
            q, k, v = z.view(*z.shape[:2], 3, spec.num_heads, spec.head_size).unbind(2)
            q, k = (one.transpose(0, 1) for one in formulas.rotate(q.transpose(0, 1), k.transpose(0, 1), cos, sin))
            q, k, v = (one.transpose(1, 2) for one in (q, k, v))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + F.linear(o.transpose(1, 2).flatten(2), w[f"layers.{at}.attn.row.weight"])
            n = F.rms_norm(h, (spec.hidden,), w[f"layers.{at}.moe.norm.weight"], spec.norm_eps)
            h = h + self._experts(at, n.flatten(0, 1)).view_as(h)
        return F.linear(F.rms_norm(h, (spec.hidden,), w["norm.weight"], spec.norm_eps), w["head.weight"])

    def _experts(self, at: int, rows: Tensor) -> Tensor:
        layer, w, settings = cast("ExpertLayer", self.model.moe[str(at)]), self.weights, self.spec.experts
        assert settings is not None
        held, each = len(layer.held), settings.per_token
        scores = router.scores_of(F.linear(rows, w[f"layers.{at}.moe.router.weight"]), settings)
        chosen = router.chosen_experts(scores.detach(), settings)
        weights = router.expert_weights(scores, chosen, settings)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=settings.count)
        every = counts.new_empty((EP, settings.count))
        dist.all_gather_single(every, counts[None]) if hasattr(dist, "all_gather_single") else (
            dist.all_gather_into_tensor(every, counts[None])
        )
        out = counts.view(EP, held).sum(1).tolist()
        own = every[:, layer.held.start : layer.held.stop]
        into = own.sum(1).tolist()
        come = _Exchange.apply(rows[order // each], into, out)
        sort = (torch.arange(own.numel()) % held).repeat_interleave(own.flatten()).argsort(stable=True)
        ends = RowGroups.of(own.sum(0).tolist(), rows.device).ends
        first = w[f"layers.{at}.moe.experts.column.weight"].view(held, -1, rows.shape[1])
        second = w[f"layers.{at}.moe.experts.row.weight"].view(held, rows.shape[1], -1)
        z = F.grouped_mm(cast("Tensor", come)[sort], first.transpose(1, 2), offs=ends)
        y = F.grouped_mm(formulas.swiglu(z), second.transpose(1, 2), offs=ends)
        back = cast("Tensor", _Exchange.apply(torch.empty_like(y).index_copy(0, sort, y), out, into))
        rows_of = torch.empty_like(back).index_copy(0, order, back).view(-1, each, rows.shape[1])
        return (rows_of * weights[..., None]).sum(1)


if __name__ == "__main__":
    as_rank(measured, lambda _: True)
