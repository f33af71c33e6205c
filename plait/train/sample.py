"""Generate text with a trained model: in one process, with the whole model, without a KV cache.

Every token takes one forward pass over the tokens before it, at most ``max_sequence`` of them. This
serves to inspect what a run has learned, not for serving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.core.base.errors import JobError
from plait.core.base.numbers import MOST_SEED, shown
from plait.core.job.spec import Job
from plait.core.runs.folder import check_started
from plait.core.step.segments import SegmentGraph
from plait.train.checkpoint.whole import load_whole
from plait.train.data.tokenizer import Tokenizer, load_tokenizer
from plait.train.model.basics import SliceContext
from plait.train.model.expert_layer import ExpertLayer
from plait.train.model.sublayers import ParallelBlock, Sublayer
from plait.train.model.transformer import Transformer

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # stands for a character some of whose bytes are missing


@dataclass(frozen=True)
class Sampler:
    """A whole model and its tokenizer. warnings: a line for each damaged checkpoint that was
    skipped.

    sampler = Sampler.of_run(Path("runs/quickstart"))
    print("".join(sampler.generate("def ", tokens=100)))
    """

    model: Transformer
    tokenizer: Tokenizer
    warnings: tuple[str, ...] = ()

    @staticmethod
    def of_run(run: Path, step: int | None = None) -> Sampler:
        """Load the model of a run's checkpoint of ``step``, or of its newest checkpoint.

        Raises DataError for a folder without a run, CheckpointError for a run without such a
        checkpoint.
        """
        check_started(run)
        tokenizer = load_tokenizer(Job.read(run / "job.toml").data.tokenizer)
        whole = load_whole(run, step)
        return Sampler(whole.model, tokenizer, whole.warnings)

    def generate(self, prompt: str, *, tokens: int, temperature: float = 0.0, seed: int = 0) -> Iterator[str]:
        """Return an iterator over the text that follows ``prompt``, in pieces of whole characters.
        The text ends early at the end-of-text token.

        temperature: 0 selects the most likely token. Raises JobError for a prompt that is empty or
        too long, and for numbers out of range.
        """
        if not -MOST_SEED - 1 <= seed <= MOST_SEED:
            raise JobError(f"{shown(seed)} is no seed", key="--seed", fix=f"Allowed: {-MOST_SEED - 1} to {MOST_SEED}")
        ids = self._checked(prompt, tokens, temperature)
        return self._pieces(ids, tokens, temperature, torch.Generator().manual_seed(seed))

    def _checked(self, prompt: str, tokens: int, temperature: float) -> list[int]:
        if tokens < 1:
            raise JobError(f"{tokens} tokens are no text", key="--tokens", fix="Use at least 1")
        if not 0 <= temperature < float("inf"):
            raise JobError(f"{temperature} is no temperature", key="--temperature", fix="Use 0 or more")
        ids: list[int] = self.tokenizer.encode(prompt).tolist()
        longest = self.model.spec.max_sequence
        if not ids:
            raise JobError("is empty", key="--prompt", fix="Give at least one character to go on from")
        if len(ids) > longest:
            problem = f"has {len(ids)} tokens, and the model sees at most {longest}"
            raise JobError(problem, key="--prompt", fix="Give a shorter one")
        return ids

    def _pieces(self, ids: list[int], tokens: int, temperature: float, random: torch.Generator) -> Iterator[str]:
        told = self.tokenizer.decode(ids)
        for _ in range(tokens):
            seen = ids[-self.model.spec.max_sequence :]
            logits = next_logits(self.model, seen)[: self.tokenizer.vocab]
            ids.append(_pick(logits, temperature, random))
            if ids[-1] == self.tokenizer.end_of_text:
                break
            text = self.tokenizer.decode(ids)
            if not text.endswith(_BROKEN):  # else the next token may complete the character
                yield text[len(told) :]
                told = text
        yield self.tokenizer.decode(ids)[len(told) :]


@torch.no_grad()
def next_logits(model: Transformer, tokens: Sequence[int]) -> Tensor:
    """Return the logits [V] of the token after ``tokens``: the forward pass of a whole model,
    segment by segment."""
    spec, size = model.spec, len(tokens)
    padded = -(-size >> spec.levels) << spec.levels  # attention is causal; every level must halve the length exactly
    ids = torch.tensor([*tokens, *[0] * (padded - size)])
    graph = SegmentGraph.of(spec, model.strategy, model.stage, backward=False)
    skips: dict[int, Tensor] = {}
    h = torch.empty(0)
    for site, layer in graph.segments:
        positions = torch.arange(padded >> graph.level(spec, site, layer))
        turns = model.rope and model.rope.first(len(positions))
        context = SliceContext(torch.zeros(1), positions, None, turns)
        match site:
            case "embed":
                h = model.embedding.join(model.embedding.words.weight[ids][:, None], context)
            case "down":
                skips[layer] = h
                h = model.downs[layer](h)
            case "up":
                h = model.ups[layer](h, skips.pop(layer))
            case "head":
                return (model.norm(h)[size - 1, 0] @ model.head.weight.t())[: spec.vocab]
            case _:
                h = _sublayer(model.sublayers[site, layer], h, context)
    raise AssertionError("a whole model ends with its head")


def _sublayer(sublayer: Sublayer | ParallelBlock, h: Tensor, context: SliceContext) -> Tensor:
    """Return the residual stream after a sublayer: attention, an MLP, both in parallel, or
    experts."""
    n = sublayer.norm(h)
    y = sublayer.routed(n) if isinstance(sublayer, ExpertLayer) else torch.zeros_like(h)
    for branch in sublayer.branches:
        z = F.linear(n, branch.column.weight, branch.column.bias)
        y = y + F.linear(branch.core(z, context), branch.row.weight)
    return sublayer.join(h, y[None], context)


def _pick(logits: Tensor, temperature: float, random: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    scaled = (logits.double() - logits.double().max()) / temperature  # no overflow at low temperatures
    return int(torch.multinomial(scaled.softmax(0), 1, generator=random))
