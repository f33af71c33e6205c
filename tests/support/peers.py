"""transformers' own models as the unsharded answer, in fp64 throughout: where its code asks for
fp32 (norms, rotations), it gets fp64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

from plait.core.model.families import PREFIX, huggingface_config
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.checkpoint.weight_files import stored_piece
from plait.train.model.pieces import initialise, pieces
from tests.support.reference import mean_loss


class Peer:
    """Weights by our names, the very parameters of a model that is made from the ``config.json`` we
    write; a stand-in for ``Reference``."""

    def __init__(self, spec: ModelSpec, seed: int = 0) -> None:
        assert spec.family == "llama", "the others keep their weights transposed"
        written = huggingface_config(spec, "float64")
        config = {key: value for key, value in written.items() if key not in ("architectures", "torch_dtype")}
        self.model: Any = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config), attn_implementation="eager"
        ).double()
        self.model.model.rotary_emb = _Rotary(spec)
        theirs = {name.removeprefix(PREFIX["llama"]): value for name, value in self.model.named_parameters()}
        own = pieces(spec, Strategy(), 0)
        self.weights: dict[str, nn.Parameter] = {piece.name: theirs[stored_piece(spec, piece).name] for piece in own}
        assert len(self.weights) == len(theirs), "they have parameters that we have not"
        with torch.no_grad():
            for piece in own:
                self.weights[piece.name].copy_(initialise(spec, piece, seed))

    def perturb(self, seed: int = 1) -> None:
        """Make norms differ from their trivial initial values."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.weights.values():
                weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.05)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        starts: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """Mean over targets that are not -100, weighted. starts: [B, S], where each token's
        document begins; the model sees every document alone."""
        with mock.patch.object(torch, "float32", torch.float64):
            if starts is None:
                logits = self.model(input_ids=tokens, use_cache=False).logits
            else:
                logits = torch.stack([self._apart(*each) for each in zip(tokens, starts, strict=True)])
        return mean_loss(logits, targets, weights)

    def _apart(self, tokens: Tensor, starts: Tensor) -> Tensor:
        """[S], documents of one sequence -> [S, V]."""
        _, lengths = starts.unique_consecutive(return_counts=True)
        documents = tokens.split(lengths.tolist())
        return torch.cat([self.model(input_ids=each[None], use_cache=False).logits[0] for each in documents])


class _Rotary(nn.Module):
    """Theirs in fp64: what they compute has fp32 inside."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, x: Tensor, position_ids: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        size = self.spec.head_size
        frequencies = self.spec.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = position_ids[..., None] * frequencies
        both = torch.cat((angles, angles), dim=-1)
        return both.cos(), both.sin()
