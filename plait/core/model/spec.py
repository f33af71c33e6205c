"""ModelSpec: the shapes of a decoder-only transformer, and what follows from them (parameters, FLOPs).

Three families. ``gpt``: learned positions, LayerNorm, GELU, biases, tied embeddings (Radford 2019; Brown
2020, arXiv 2005.14165). ``llama``: rotary positions, RMSNorm, SwiGLU, grouped-query heads, no biases (Touvron
2023, arXiv 2307.09288; Llama 3, arXiv 2407.21783). ``utransformer``: gpt's layers in the shape of a U
(Ronneberger 2015, arXiv 1505.04597; Petit 2021, arXiv 2103.06104), in one dimension and causal: a down path
that halves the sequence ``levels`` times, a bottleneck, an up path that doubles it again, each of its levels
adding what the down path had there. Shapes in comments: S sequence, B batch, H hidden, N heads, D head size,
F feed-forward, V vocabulary.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from annotated_types import Ge, Gt, Lt

from plait.core.base.codec.data import Count, Natural, Positive, Texts, check_limits, decode
from plait.core.base.errors import JobError, nearest
from plait.core.model.check import ROPE_THETA, check_parts, check_sizes
from plait.core.model.experts import Experts
from plait.core.model.weights import MLP, Letters, Site, count, matrices_of, normed, weights_of

Family = Literal["gpt", "llama", "utransformer"]
Probability = Annotated[float, Ge(0), Lt(1)]
RARE = ("without", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")
"""Fields that a plan has only where they say something."""
MOST_PARAMETERS = 10**15
"""A thousand times the largest models; all that is computed from it fits into 64 bits."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1 frequency scaling (arXiv 2407.21783; the ``llama3`` rope type of Hugging Face configs)."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_positions: Count

    def __post_init__(self) -> None:
        check_limits(self, "model.rope_scaling")
        if self.low_freq_factor >= self.high_freq_factor:
            problem = f"{self.low_freq_factor} is not below high_freq_factor = {self.high_freq_factor}"
            raise JobError(problem, key="model.rope_scaling.low_freq_factor", fix="Llama 3 has 1 and 4")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shapes of one model. Raises JobError naming the field when they contradict each other.

    >>> ModelSpec(family="gpt", num_layers=2, hidden=8, num_heads=2, vocab=16, max_sequence=4).num_parameters
    1920
    """

    family: Family
    """``gpt``: learned positions, LayerNorm, GELU, biases. ``llama``: rotary positions, RMSNorm, SwiGLU.
    ``utransformer``: gpt's layers in the shape of a U."""
    num_layers: Count
    """Transformer blocks."""
    hidden: Count
    """Width of the residual stream."""
    num_heads: Count
    """Attention heads."""
    vocab: Count
    """Tokens of the vocabulary. A job may leave it out: the tokenizer's."""
    max_sequence: Count
    """Positions of a learned embedding. A job may leave it out: ``data.sequence_length``."""
    num_kv_heads: Natural = 0
    """Key/value heads, for grouped-query attention (llama). 0: as many as ``num_heads``."""
    ffn_hidden: Natural = 0
    """Width of the MLP. 0: 4 x ``hidden``; llama needs it."""
    head_size: Natural = 0
    """0: ``hidden`` / ``num_heads``."""
    tied_embeddings: bool | None = None
    """Whether the head shares the word embedding's weights. Left out: gpt does, llama does not."""
    norm_eps: Annotated[float, Gt(0), Lt(1)] = 1e-5
    """Epsilon of the norms."""
    rope_theta: Positive = ROPE_THETA
    """Base of the rotary positions' frequencies."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's frequency scaling."""
    dropout: Probability = 0.0
    """After the embedding and on every sublayer's output."""
    attention_dropout: Probability = 0.0
    """On the attention weights; forgoes the fused attention kernels."""
    levels: Natural = 0
    """Of a utransformer: how often the down path halves the sequence."""
    parallel_block: bool = False
    """Attention and MLP read one norm, and their outputs are added at once (Wang 2021, GPT-J)."""
    qk_norm: bool = False
    """Queries and keys are normalised head by head before their rotation (llama; Qwen3, arXiv 2505.09388)."""
    window: Natural = 0
    """Tokens that a query sees, its own included: a sliding window (llama; Mistral, arXiv 2310.06825). 0: all
    before it."""
    full_first: Natural = 0
    """So many first layers have no window."""
    full_every: Natural = 0
    """Of the others, every so-manieth has none (Gemma 3: 6, the sixth and the twelfth). 0: all have one."""
    experts: Experts | None = None
    """Mixture-of-experts layers, in a table of their own. They can be planned for, not trained yet."""
    q_lora_rank: Natural = 0
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): size of what queries are made from.
    Planned, not trained."""
    kv_lora_rank: Natural = 0
    """Size of what keys and values are made from. 0: attention is not latent."""
    qk_rope_head_dim: Natural = 0
    """Numbers of a head's queries and keys that are rotated, beside ``head_size`` others."""
    without: Texts = ()
    """Parts of the published model that Plait cannot describe, in words: it is planned without them, and not
    trained. Empty to train what is described."""

    def __post_init__(self) -> None:
        check_sizes(self)
        set_ = object.__setattr__
        set_(self, "head_size", self.head_size or self.hidden // self.num_heads)
        set_(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        set_(self, "ffn_hidden", self.ffn_hidden or 4 * self.hidden)
        if self.tied_embeddings is None:
            set_(self, "tied_embeddings", self.has_bias)
        check_parts(self)
        if self.experts:
            set_(self, "experts", self.experts.filled(self.ffn_hidden))
        if self.num_parameters > MOST_PARAMETERS:
            problem = f"the model would have {self.num_parameters:.3g} parameters"
            raise JobError(problem, key="model.hidden", fix=f"Allowed: at most {MOST_PARAMETERS:.0g}")

    # ---- what the family decides ----

    @property
    def has_bias(self) -> bool:
        """Whether linear layers and norms have biases, and norms are LayerNorms."""
        return self.family != "llama"

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection (SwiGLU)."""
        return self.family == "llama"

    @property
    def learned_positions(self) -> bool:
        """Whether positions are a trained embedding (rotary otherwise)."""
        return self.family != "llama"

    @property
    def resampling(self) -> tuple[tuple[int, Literal["down", "up"], int], ...]:
        """(layer, direction, level) of every change of the sequence's length, just before that layer; level:
        the finer one.

        >>> shape = dict(num_layers=5, hidden=8, num_heads=1, vocab=9, max_sequence=8)
        >>> ModelSpec(family="utransformer", levels=2, **shape).resampling
        ((1, 'down', 0), (2, 'down', 1), (3, 'up', 1), (4, 'up', 0))
        """
        each, levels = self.num_layers // (2 * self.levels + 1), self.levels
        down = tuple((each * (level + 1), "down", level) for level in range(levels))
        up = tuple((each * (2 * levels - level), "up", level) for level in reversed(range(levels)))
        return cast("tuple[tuple[int, Literal['down', 'up'], int], ...]", (*down, *up))

    def level(self, layer: int) -> int:
        """How often the sequence has been halved where ``layer`` works."""
        part = layer // (self.num_layers // (2 * self.levels + 1))
        return min(part, 2 * self.levels - part)

    # ---- counts ----

    def window_at(self, layer: int) -> int:
        """Keys that a query sees in a layer, its own token included; 0: all before it.

        >>> shape = dict(num_layers=6, hidden=8, num_heads=1, ffn_hidden=8, vocab=9, max_sequence=8)
        >>> model = ModelSpec(family="llama", window=4, full_every=3, **shape)
        >>> [model.window_at(layer) for layer in range(6)]
        [4, 4, 0, 4, 4, 0]
        """
        number = layer - self.full_first + 1
        return 0 if number < 1 or (self.full_every and number % self.full_every == 0) else self.window

    @property
    def windowed(self) -> float:
        """Of the layers, the part that has a window."""
        return sum(map(bool, map(self.window_at, range(self.num_layers)))) / self.num_layers

    def keys_seen(self, sequence: int) -> float:
        """Keys of a query, on the mean of queries and layers; causal half not deducted."""
        return keys_seen(sequence, self.window, self.windowed)

    @property
    def normed_within(self) -> int:
        """Numbers of a token that norms within attention's core normalise."""
        return int(normed(self.letters)[0])

    @cached_property
    def letters(self) -> Letters:
        """Sizes, for the rows of ``weights``."""
        return Letters(
            H=self.hidden, Q=self.num_heads * self.head_size, K=self.num_kv_heads * self.head_size, F=self.ffn_hidden,
            V=self.vocab, P=self.max_sequence, biased=int(self.has_bias), gated=int(self.gated),
            learned=int(self.learned_positions), tied=int(bool(self.tied_embeddings)), block=int(self.parallel_block),
            D=self.head_size, qk_norm=int(self.qk_norm), A=self.q_lora_rank, B=self.kv_lora_rank,
            R=self.qk_rope_head_dim, latent=int(self.kv_lora_rank > 0),
        )  # fmt: skip

    def numbers_of(self, *sites: Site) -> int:
        """Parameters of one segment of each of these sites, norms included."""
        return count(weights_of(*sites), self.letters)

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts in place of one MLP."""
        return sum(map(self.experts.at, range(self.num_layers))) if self.experts else 0

    def expert_parameters(self, ffn_hidden: int) -> int:
        """Parameters of one expert of this width: an MLP without a norm."""
        return count(MLP, replace(self.letters, F=ffn_hidden))

    @property
    def routed_parameters(self) -> int:
        """Parameters of all routed experts of a layer."""
        return self.experts.count * self.expert_parameters(self.experts.ffn_hidden) if self.experts else 0

    def expert_mlp_parameters(self, routed: int) -> int:
        """Parameters of one sublayer of experts: ``routed`` of these, the shared ones, router and norm."""
        if self.experts is None:
            return 0
        experts = self.experts
        shared = experts.shared * self.expert_parameters(experts.shared_ffn_hidden)
        norm = self.numbers_of("mlp") - count(MLP, self.letters)
        return routed * self.expert_parameters(experts.ffn_hidden) + shared + experts.count * self.hidden + norm

    @property
    def num_parameters(self) -> int:
        """All trainable parameters, exactly (vocabulary padding for tensor parallelism not counted)."""
        routed = self.experts.count if self.experts else 0
        layers = self.num_layers * self.numbers_of("attn")
        layers += (self.num_layers - self.num_expert_layers) * self.numbers_of("mlp")
        layers += self.num_expert_layers * self.expert_mlp_parameters(routed)
        return layers + self.levels * self.numbers_of("down", "up") + self.numbers_of("embed", "head")

    @property
    def largest_matrix(self) -> int:
        """Numbers of the largest matrix of a layer, experts left out."""
        return max(weight.numbers(self.letters) for weight in matrices_of("attn", "mlp", "down", "up"))

    def scores(self, sequence: int, layer: int) -> int:
        """Pairs of a query and a key in a layer's attention over one sequence; causal half not deducted: of a
        window both sides."""
        window = self.window_at(layer)
        return sequence * sequence - (max(0, sequence - window) ** 2 if window else 0)

    def attention_flops(self, sequence: int, layer: int = 0) -> int:
        """Forward FLOPs of one attention sublayer for one sequence: 2 per multiply-add, causal half not
        deducted.

        The convention of Narayanan 2021 (arXiv 2104.04473), appendix: norms, softmax and biases are not
        counted.
        """
        return self.product_flops(sequence, "attn") + 4 * self.scores(sequence, layer) * self.core_width

    @property
    def core_width(self) -> int:
        """Mean of a query's and a value's width over all heads: latent queries have a rotated part beside."""
        return self.letters.Q + self.num_heads * self.qk_rope_head_dim // 2

    def product_flops(self, tokens: int, *sites: Site) -> int:
        """Forward FLOPs of ``tokens`` times the matrices of one segment of each of these sites."""
        return 2 * tokens * count(matrices_of(*sites), self.letters)

    def expert_mlp_flops(self, sequence: int) -> int:
        """Forward FLOPs of one sublayer of experts for one sequence: of the experts that tokens go to, and of
        the router."""
        if self.experts is None:
            return 0
        experts = count(matrices_of("mlp"), replace(self.letters, F=self.experts.active_width))
        return 2 * sequence * (experts + self.experts.count * self.hidden)

    def step_flops(self, sequence: int, batch: int) -> int:
        """Forward and backward FLOPs of one step: the backward costs twice the forward."""
        lengths = [sequence >> self.level(layer) for layer in range(self.num_layers)]
        attention = sum(self.attention_flops(length, layer) for layer, length in enumerate(lengths))
        forward = attention + 2 * sequence * self.hidden * self.vocab
        routed = self.num_expert_layers  # of a model whose layers are all as long
        forward += self.product_flops(sum(lengths[routed:]), "mlp") + routed * self.expert_mlp_flops(sequence)
        forward += sum(self.product_flops(sequence >> level + 1, "down", "up") for level in range(self.levels))
        return 3 * forward * batch

    def causal_step_flops(self, sequence: int, batch: int) -> int:
        """``step_flops`` with the half of attention's scores that the causal mask leaves: what utilisation
        counts, so that it cannot exceed 1."""
        lengths = [sequence >> self.level(layer) for layer in range(self.num_layers)]
        scores = sum(self.scores(length, layer) for layer, length in enumerate(lengths))
        return self.step_flops(sequence, batch) - 6 * scores * self.core_width * batch

    # ---- reading ----

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; ``from_dict`` reads them back. What few models have is left out where it is
        nothing."""
        return {key: value for key, value in asdict(self).items() if key not in RARE or value}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> ModelSpec:
        """A spec from plain values (a job file's [model] table, a plan). Refuses unknown keys."""
        needed = ("family", "num_layers", "hidden", "num_heads", "vocab", "max_sequence")
        missing = [key for key in needed if key not in values]
        if missing and not any(nearest(key, missing) for key in values if key not in ModelSpec.__dataclass_fields__):
            raise JobError(
                "is missing", key=f"model.{missing[0]}", fix="Name a preset (model.preset) or give every shape"
            )
        return decode(ModelSpec, values, "model")

    @staticmethod
    def from_huggingface(path: str | Path) -> ModelSpec:
        """The spec a Hugging Face ``config.json`` (``gpt2`` or ``llama``) describes. Raises JobError for what
        we cannot run."""
        from plait.core.model.huggingface import read_config  # which makes a ModelSpec

        return read_config(Path(path))

    @staticmethod
    def preset(name: str, folder: Path) -> ModelSpec:
        """The spec in ``folder/NAME.toml``."""
        return ModelSpec.from_dict(ModelSpec.preset_values(name, folder))

    @staticmethod
    def preset_values(name: str, folder: Path) -> dict[str, Any]:
        """What ``folder/NAME.toml`` says, before anything is derived from it, so that a job may still change
        a shape."""
        known = sorted(file.stem for file in folder.glob("*.toml"))
        if name not in known:
            raise JobError(
                f"no model preset '{name}'{nearest(name, known)}",
                key="model.preset",
                fix=f"Known presets: {', '.join(known)}",
            )
        return tomllib.loads((folder / f"{name}.toml").read_text())


def keys_seen(sequence: Any, window: Any, windowed: Any) -> Any:
    """Keys of a query, on the mean of queries and layers; causal half not deducted. windowed: of the layers,
    the part that has a window. All may be columns.

    >>> float(keys_seen(8, 4, 1.0)), float(keys_seen(8, 4, 0.5)), float(keys_seen(8, 0, 0.0))
    (6.0, 7.0, 8.0)
    """
    beyond = (sequence - window) * (sequence > window)
    return sequence - windowed * beyond * beyond / sequence
