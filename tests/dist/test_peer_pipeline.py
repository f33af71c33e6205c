"""A reference that shares nothing with Plait: transformers' models under
torch.distributed.pipelining's own schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from plait.core.model.families import huggingface_config
from plait.core.model.spec import ModelSpec
from plait.core.step.schedules import planned_shape
from plait.train.checkpoint.weight_files import stored_piece
from plait.train.engine.feed import micro_batches
from tests.dist.equality import SEED, SEQUENCE, Pool, relative_error, worst
from tests.dist.pipelining import BATCH, MICRO, Pipeline, opened
from tests.support.models import gpt, llama

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B, "zb-v": ScheduleZBVZeroBubble,
}  # fmt: skip
MODELS = {"gpt": gpt(num_layers=4, tied_embeddings=False), "llama": llama(num_layers=4, tied_embeddings=False)}
TOLERANCE = {"gpt": 1e-10, "llama": 1e-6}
"""transformers computes Llama's norms and rotations in fp32 whatever the dtype."""
PREFIX = {"gpt": "transformer.", "llama": "model."}


class Stage(nn.Module):
    """A range of a transformers model's layers, the embedding in front of the first and the head
    behind the last."""

    def __init__(self, whole: Any, family: str, index: int, stages: int) -> None:
        super().__init__()
        base = getattr(whole, PREFIX[family].rstrip("."))
        layers = base.h if family == "gpt" else base.layers
        each = len(layers) // stages
        self.layers = nn.ModuleList(layers[index * each : (index + 1) * each])
        first, last, gpt = index == 0, index == stages - 1, family == "gpt"
        self.words = (base.wte if gpt else base.embed_tokens) if first else None
        self.positions = base.wpe if first and gpt else None
        self.norm = (base.ln_f if gpt else base.norm) if last else None
        self.head = whole.lm_head if last else None
        self.rotary = None if gpt else base.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])[None]
        if self.words is not None:
            x = self.words(x)
        if self.positions is not None:
            x = x + self.positions(at)
        more = {} if self.rotary is None else {"position_embeddings": self.rotary(x, at)}
        for layer in self.layers:
            out = layer(x, **more)
            x = out[0] if isinstance(out, tuple) else out
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def worst_error(rank: int, spec: ModelSpec, name: str, pp: int) -> tuple[float, str]:
    """The largest relative difference between our gradients (and loss) and the peer's, of what this
    rank holds."""
    torch.manual_seed(SEED)
    config = transformers.AutoConfig.for_model(**_without_names(huggingface_config(spec, "float64")))
    whole = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().train()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in whole.parameters():  # biases and norms are trivial at first
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.05)
    tokens, targets = (torch.randint(0, spec.vocab, (BATCH, SEQUENCE), generator=generator) for _ in range(2))
    loss = _peer(rank, whole, spec, name, pp, tokens, targets)
    named = {key.removeprefix(PREFIX[spec.family]): parameter for key, parameter in whole.named_parameters()}

    with opened(rank, Pipeline(spec, [(1, 1)] * pp, name).plan) as part:
        with torch.no_grad():
            for piece in part.models.pieces:
                piece.view(part.models.named[piece.parameter]).copy_(_cut(spec, piece, named, gradient=False))
        part.gradients.zero()
        ours = part.pipeline.run(part.own(micro_batches(tokens, targets, torch.arange(BATCH), MICRO, 0)))
        errors = {"loss": abs(ours.item() / loss - 1)} if loss else {}
        for piece in part.models.pieces:
            found = piece.view(part.gradients.named[piece.parameter])
            errors[piece.name] = relative_error(found, _cut(spec, piece, named, gradient=True))
    return worst(errors)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_pipelines_agree_with_torch(pool: Pool, model: str, name: str) -> None:
    for error, what in pool(2).run(worst_error, MODELS[model], name, 2):
        assert error < TOLERANCE[model], f"{what} is off by {error:.1e}"


def _peer(rank: int, whole: Any, spec: ModelSpec, name: str, pp: int, tokens: Tensor, targets: Tensor) -> float:
    """A step of torch's schedule on this rank's stages of ``whole``; the mean loss where the head
    is, else
    0."""
    chunks = planned_shape(name, pp, 1, 2).chunks
    count = pp * chunks
    held = {"zb-v": [rank, count - 1 - rank], "interleaved": [rank + pp * chunk for chunk in range(chunks)]}.get(
        name, [rank]
    )
    between = torch.zeros(MICRO, SEQUENCE, spec.hidden, dtype=torch.float64, requires_grad=True)
    stages = []
    for index in held:
        module = Stage(whole, spec.family, index, count)
        entering = tokens[:MICRO] if index == 0 else between
        leaving = (
            torch.zeros(MICRO, SEQUENCE, spec.vocab, dtype=torch.float64, requires_grad=True)
            if index == count - 1
            else between
        )
        stages.append(
            PipelineStage(module, index, count, torch.device("cpu"), input_args=(entering,), output_args=(leaving,))
        )

    def mean(logits: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    given = stages if chunks > 1 else stages[0]
    schedule = SCHEDULES[name](given, BATCH // MICRO, loss_fn=mean, scale_grads=True)
    losses: list[Tensor] = []
    schedule.step(*((tokens,) if 0 in held else ()), target=targets, losses=losses)
    return torch.stack(losses).mean().item() if losses else 0.0


def _cut(spec: ModelSpec, piece: Any, named: dict[str, nn.Parameter], *, gradient: bool) -> Tensor:
    at = stored_piece(spec, piece)
    value = named[at.name].grad if gradient else named[at.name].detach()
    assert value is not None, f"{at.name} has no gradient on this rank"
    value = value[at.ranges(piece)]
    return value.t() if at.transposed else value


def _without_names(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("architectures", "torch_dtype")}
