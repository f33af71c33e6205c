"""ModelSpec: the shapes of a decoder-only transformer, and what follows from them (parameters,
FLOPs).

Three families. ``gpt``: learned positions, LayerNorm, GELU, biases, tied embeddings (Radford 2019;
Brown 2020, arXiv 2005.14165). ``llama``: rotary positions, RMSNorm, SwiGLU, grouped-query heads, no
biases (Touvron 2023, arXiv 2307.09288; Llama 3, arXiv 2407.21783). ``utransformer``: gpt's layers
in the shape of a U (Ronneberger 2015, arXiv 1505.04597; Petit 2021, arXiv 2103.06104), in one
dimension and causal: a down path that halves the sequence ``levels`` times, a bottleneck, and an up
path that doubles it again; each level of the up path adds the down path's stream of that level.
Shapes in comments: S sequence, B batch, H hidden, N heads, D head size, F feed-forward, V
vocabulary.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from annotated_types import Ge, Gt, Lt

from plait.core.base.codec.data import Count, Natural, Positive, Texts, check_limits, decode
from plait.core.base.errors import JobError, nearest
from plait.core.model.check import ROPE_THETA, check_parts, check_sizes
from plait.core.model.experts import Experts
from plait.core.model.weights import MLP, Dimensions, Sublayer, count, matrices_of, normed, weights_of

Family = Literal["gpt", "llama", "utransformer"]
Probability = Annotated[float, Ge(0), Lt(1)]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
RARE_FIELDS = ("without", "qkv_bias", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")
"""Fields that a plan's file has only if they are not empty or zero."""
MOST_PARAMETERS = 10**15
"""Most parameters of a model, a thousand times the largest models: all numbers computed from it fit
into 64 bits."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1 frequency scaling (arXiv 2407.21783; the ``llama3`` rope type of Hugging Face
    configs)."""

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
    """Shapes of one model. Raises JobError naming the field if they contradict each other.

    >>> ModelSpec(family="gpt", num_layers=2, hidden=8, num_heads=2, vocab=16, max_sequence=4).num_parameters
    1920
    """

    family: Family
    """``gpt``: learned positions, LayerNorm, GELU, biases. ``llama``: rotary positions, RMSNorm,
    SwiGLU. ``utransformer``: gpt's layers in the shape of a U."""
    num_layers: Count
    """Transformer blocks."""
    hidden: Count
    """Width of the residual stream."""
    num_heads: Count
    """Attention heads."""
    vocab: Count
    """Size of the vocabulary. A job may leave it out: then the tokenizer's."""
    max_sequence: Count
    """Number of positions of a learned embedding. A job may leave it out: then
    ``data.sequence_length``."""
    num_kv_heads: Natural = 0
    """Key/value heads, for grouped-query attention (llama). 0: as many as ``num_heads``."""
    ffn_hidden: Natural = 0
    """Width of the MLP. 0: 4 x ``hidden``, but not for llama, which needs a width."""
    head_size: Natural = 0
    """Size of an attention head. 0: ``hidden`` / ``num_heads``."""
    tied_embeddings: bool | None = None
    """Share the word embedding's weights with the head. Left out: true, but false for llama."""
    norm_eps: Annotated[float, Gt(0), Lt(1)] = 1e-5
    """Epsilon of the norms."""
    rope_theta: Positive = ROPE_THETA
    """Base of the rotary positions' frequencies."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's frequency scaling."""
    dropout: Probability = 0.0
    """Dropout probability after the embedding and on every sublayer's output."""
    attention_dropout: Probability = 0.0
    """Dropout probability of the attention weights. Above 0, attention does not use fused
    kernels."""
    levels: Natural = 0
    """Number of times that the down path of a utransformer halves the sequence."""
    parallel_block: bool = False
    """Parallel blocks: attention and MLP read the same norm, and their outputs are added at once
    (Wang 2021, GPT-J)."""
    qk_norm: bool = False
    """Normalise queries and keys head by head before their rotation (llama; Qwen3, arXiv
    2505.09388)."""
    qkv_bias: bool = False
    """Biases of queries, keys and values, in a model without other biases (llama; Qwen2, arXiv
    2407.10671)."""
    window: Natural = 0
    """Sliding window: number of tokens that a query sees, its own included (llama; Mistral, arXiv
    2310.06825). 0: no window, a query sees all tokens before it."""
    full_first: Natural = 0
    """Number of first layers without a window."""
    full_every: Natural = 0
    """Interval of layers without a window, counted after the first ``full_first`` layers (Gemma 3:
    6, so the sixth and the twelfth have none). 0: all of them have a window."""
    experts: Experts | None = None
    """Mixture-of-experts layers, in a table of their own."""
    q_lora_rank: Natural = 0
    """Rank of the latent from which queries are made, in multi-head latent attention (DeepSeek-V2,
    arXiv
    2405.04434), which can be planned, not trained."""
    kv_lora_rank: Natural = 0
    """Rank of the latent from which keys and values are made. 0: no latent attention."""
    qk_rope_head_dim: Natural = 0
    """Rotated dimensions of a head's queries and keys in latent attention, in addition to
    ``head_size`` others."""
    without: Texts = ()
    """Parts of the published model that Plait cannot describe, in words: the model is planned
    without them, and not trained. Empty: train the model as described."""

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
        """True if linear layers and norms have biases, and norms are LayerNorms."""
        return self.family != "llama"

    @property
    def gated(self) -> bool:
        """True if the MLP has a gate besides its up projection (SwiGLU)."""
        return self.family == "llama"

    @property
    def learned_positions(self) -> bool:
        """True if positions are a trained embedding, not rotary."""
        return self.family != "llama"

    @property
    def resampling(self) -> tuple[tuple[int, Literal["down", "up"], int], ...]:
        """(layer, direction, level) of every change of the sequence's length, just before that
        layer. level: the finer of the two levels.

        >>> shape = dict(num_layers=5, hidden=8, num_heads=1, vocab=9, max_sequence=8)
        >>> ModelSpec(family="utransformer", levels=2, **shape).resampling
        ((1, 'down', 0), (2, 'down', 1), (3, 'up', 1), (4, 'up', 0))
        """
        each, levels = self.num_layers // (2 * self.levels + 1), self.levels
        down = tuple((each * (level + 1), "down", level) for level in range(levels))
        up = tuple((each * (2 * levels - level), "up", level) for level in reversed(range(levels)))
        return cast("tuple[tuple[int, Literal['down', 'up'], int], ...]", (*down, *up))

    def level(self, layer: int) -> int:
        """Return how often the sequence has been halved at ``layer``."""
        part = layer // (self.num_layers // (2 * self.levels + 1))
        return min(part, 2 * self.levels - part)

    @property
    def uniform_layers(self) -> bool:
        """True if all layers have the same ops on tensors of the same sizes."""
        return not self.levels and self.num_expert_layers in (0, self.num_layers)

    # ---- counts ----

    def window_at(self, layer: int) -> int:
        """Return the number of keys that a query sees in a layer, its own token included; 0: all
        keys before it.

        >>> shape = dict(num_layers=6, hidden=8, num_heads=1, ffn_hidden=8, vocab=9, max_sequence=8)
        >>> model = ModelSpec(family="llama", window=4, full_every=3, **shape)
        >>> [model.window_at(layer) for layer in range(6)]
        [4, 4, 0, 4, 4, 0]
        """
        number = layer - self.full_first + 1
        return 0 if number < 1 or (self.full_every and number % self.full_every == 0) else self.window

    @property
    def window_share(self) -> float:
        """Share of the layers that have a window."""
        return sum(map(bool, map(self.window_at, range(self.num_layers)))) / self.num_layers

    def mean_keys(self, sequence: int) -> float:
        """Return the mean number of keys of a query, over queries and layers; the causal half is
        not deducted."""
        return mean_keys(sequence, self.window, self.window_share)

    @property
    def normed_within(self) -> int:
        """Elements of a token that norms within attention's core normalise."""
        return int(normed(self.letters)[0])

    @cached_property
    def letters(self) -> Dimensions:
        """Sizes of the model, for the rows of ``weights``."""
        return Dimensions(
            H=self.hidden, Q=self.num_heads * self.head_size, K=self.num_kv_heads * self.head_size, F=self.ffn_hidden,
            V=self.vocab, P=self.max_sequence, biased=int(self.has_bias), gated=int(self.gated),
            learned=int(self.learned_positions), tied=int(bool(self.tied_embeddings)), block=int(self.parallel_block),
            D=self.head_size, qk_norm=int(self.qk_norm), qkv_bias=int(self.qkv_bias), A=self.q_lora_rank,
            B=self.kv_lora_rank, R=self.qk_rope_head_dim, latent=int(self.kv_lora_rank > 0), **self._expert_letters,
        )  # fmt: skip

    @property
    def _expert_letters(self) -> dict[str, int]:
        experts = self.experts
        if experts is None:
            return {}
        return {"E": experts.count, "I": experts.ffn_hidden, "G": experts.shared_width,
                "shared_gate": int(experts.shared_gate)}  # fmt: skip

    def parameters_of(self, *sites: Sublayer) -> int:
        """Return the number of parameters of one of each of these sublayers, norms included."""
        return count(weights_of(*sites), self.letters)

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with experts in place of one MLP."""
        return sum(map(self.experts.at, range(self.num_layers))) if self.experts else 0

    def expert_parameters(self, ffn_hidden: int) -> int:
        """Return the number of parameters of one expert of width ``ffn_hidden``: an MLP without a
        norm."""
        return count(MLP, replace(self.letters, F=ffn_hidden))

    @property
    def routed_parameters(self) -> int:
        """Number of parameters of all routed experts of a layer."""
        return self.experts.count * self.expert_parameters(self.experts.ffn_hidden) if self.experts else 0

    def expert_mlp_parameters(self, routed: int) -> int:
        """Return the number of parameters of one expert sublayer: ``routed`` routed experts, the
        shared experts, router and norm."""
        if self.experts is None:
            return 0
        experts = self.experts
        shared = experts.shared * self.expert_parameters(experts.shared_ffn_hidden)
        norm = self.parameters_of("mlp") - count(MLP, self.letters)
        logits = experts.count + experts.shared_gate
        return routed * self.expert_parameters(experts.ffn_hidden) + shared + logits * self.hidden + norm

    @property
    def num_parameters(self) -> int:
        """Exact number of trainable parameters, without padding of the vocabulary for tensor
        parallelism."""
        routed = self.experts.count if self.experts else 0
        layers = self.num_layers * self.parameters_of("attn")
        layers += (self.num_layers - self.num_expert_layers) * self.parameters_of("mlp")
        layers += self.num_expert_layers * self.expert_mlp_parameters(routed)
        return layers + self.levels * self.parameters_of("down", "up") + self.parameters_of("embed", "head")

    @property
    def largest_matrix(self) -> int:
        """Number of elements of the largest matrix of a layer, experts left out."""
        return max(weight.numel(self.letters) for weight in matrices_of("attn", "mlp", "down", "up"))

    def scores(self, sequence: int, layer: int) -> int:
        """Return the number of (query, key) pairs in a layer's attention over one sequence. The
        causal half is not deducted; of a window both sides count."""
        window = self.window_at(layer)
        return sequence * sequence - (max(0, sequence - window) ** 2 if window else 0)

    def attention_flops(self, sequence: int, layer: int = 0) -> int:
        """Return the forward FLOPs of one attention sublayer for one sequence: 2 per multiply-add,
        causal half not deducted.

        Convention of Narayanan 2021 (arXiv 2104.04473), appendix: norms, softmax and biases are not
        counted.
        """
        return self.product_flops(sequence, "attn") + 4 * self.scores(sequence, layer) * self.core_width

    @property
    def core_width(self) -> int:
        """Mean of the width of queries and the width of values, each over all heads: queries of
        latent attention have rotated dimensions in addition."""
        return self.letters.Q + self.num_heads * self.qk_rope_head_dim // 2

    def product_flops(self, tokens: int, *sites: Sublayer) -> int:
        """Return the forward FLOPs of ``tokens`` tokens times the matrices of one of each of these
        sublayers."""
        return 2 * tokens * count(matrices_of(*sites), self.letters)

    def expert_mlp_flops(self, sequence: int) -> int:
        """Return the forward FLOPs of one expert sublayer for one sequence: the experts that tokens
        go to, and the router."""
        if self.experts is None:
            return 0
        experts = count(matrices_of("mlp"), replace(self.letters, F=self.experts.active_width))
        return 2 * sequence * (experts + self.experts.count * self.hidden)

    def step_flops(self, sequence: int, batch: int) -> int:
        """Return the forward and backward FLOPs of one step: the backward costs twice the
        forward."""
        lengths = [sequence >> self.level(layer) for layer in range(self.num_layers)]
        attention = sum(self.attention_flops(length, layer) for layer, length in enumerate(lengths))
        forward = attention + 2 * sequence * self.hidden * self.vocab
        routed = self.num_expert_layers  # models with experts have layers of one length
        forward += self.product_flops(sum(lengths[routed:]), "mlp") + routed * self.expert_mlp_flops(sequence)
        forward += sum(self.product_flops(sequence >> level + 1, "down", "up") for level in range(self.levels))
        return 3 * forward * batch

    def causal_step_flops(self, sequence: int, batch: int) -> int:
        """Return ``step_flops`` with only the half of attention's scores that the causal mask
        leaves. Utilisation uses this number, so that it cannot exceed 1."""
        lengths = [sequence >> self.level(layer) for layer in range(self.num_layers)]
        scores = sum(self.scores(length, layer) for layer, length in enumerate(lengths))
        return self.step_flops(sequence, batch) - 6 * scores * self.core_width * batch

    # ---- reading ----

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; ``from_dict`` reads them back. Fields of ``RARE_FIELDS``
        are left out if they are empty or zero."""
        return {key: value for key, value in asdict(self).items() if key not in RARE_FIELDS or value}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> ModelSpec:
        """Return the spec in plain values (a job file's [model] table, a plan). Raises JobError for
        unknown or missing keys."""
        needed = ("family", "num_layers", "hidden", "num_heads", "vocab", "max_sequence")
        missing = [key for key in needed if key not in values]
        if missing and not any(nearest(key, missing) for key in values if key not in ModelSpec.__dataclass_fields__):
            raise JobError(
                "is missing", key=f"model.{missing[0]}", fix="Name a preset (model.preset) or give every shape"
            )
        return decode(ModelSpec, values, "model")

    @staticmethod
    def from_huggingface(path: str | Path) -> ModelSpec:
        """Return the spec in a Hugging Face ``config.json`` of a type in ``families.MODEL_TYPES``.
        Raises JobError for a model that Plait cannot run."""
        from plait.core.model.huggingface import read_config  # a module that imports this one

        return read_config(Path(path))

    @staticmethod
    def preset(name: str, folder: Path) -> ModelSpec:
        """Return the spec in ``folder/NAME.toml``."""
        return ModelSpec.from_dict(ModelSpec.preset_values(name, folder))

    @staticmethod
    def preset_values(name: str, folder: Path) -> dict[str, Any]:
        """Return the values in ``folder/NAME.toml`` before defaults are derived from them, so that
        a job may still change a shape. Raises JobError for an unknown name."""
        known = sorted(file.stem for file in folder.glob("*.toml"))
        if name not in known:
            raise _unknown_preset(name, known)
        return tomllib.loads((folder / f"{name}.toml").read_text())


def _unknown_preset(name: str, known: Sequence[str]) -> JobError:
    """Return the error of a preset that does not exist. A hub's name, such as
    ``meta-llama/Llama-3.1-8B``, is answered with the preset of that family and size, if there is
    one."""
    key, fix = "model.preset", f"Known presets: {', '.join(known)}"
    if not _HUB_NAME.fullmatch(name):
        return JobError(f"no model preset '{name}'{nearest(name, known)}", key=key, fix=fix)
    plain = name.rpartition("/")[2].lower().removeprefix("meta-").replace("llama-2", "llama2")
    size = re.search(r"(?<![\d.])(\d+x)?\d+(\.\d+)?[bm](?![a-z])", plain)
    near = get_close_matches(plain, [one for one in known if size and one.endswith(f"-{size[0]}")], n=1, cutoff=0.5)
    problem = f"'{name}' is a name of a model hub, and nothing is downloaded"
    own = "name a downloaded folder with model.huggingface=FOLDER"
    return JobError(problem, key=key, fix=f"Use model.preset={near[0]}, or {own}" if near else f"N{own[1:]}. {fix}")


def mean_keys(sequence: Any, window: Any, windowed: Any) -> Any:
    """Return the mean number of keys of a query, over queries and layers; the causal half is not
    deducted. windowed: share of the layers that have a window. All arguments may be arrays.

    >>> float(mean_keys(8, 4, 1.0)), float(mean_keys(8, 4, 0.5)), float(mean_keys(8, 0, 0.0))
    (6.0, 7.0, 8.0)
    """
    beyond = (sequence - window) * (sequence > window)
    return sequence - windowed * beyond * beyond / sequence
