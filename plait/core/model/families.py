"""Hugging Face's names for models: for each ``model_type`` the keys of ``config.json``, read and
written, and the names of tensors.

Each key of a shape is in one table (``_GPT2``, ``_LLAMA``), which serves both directions. Names of
tensors belong to Plait's families: models with equal layers share them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from operator import attrgetter
from typing import Any, cast

from plait.core.base.codec.data import decode
from plait.core.base.errors import CheckpointError, JobError, nearest
from plait.core.base.numbers import shown
from plait.core.model.spec import Family, ModelSpec, RopeScaling

# ---- names of tensors ----

HEAD, EMBEDDING = "lm_head.weight", {"gpt": "wte.weight", "llama": "embed_tokens.weight"}
PREFIX: dict[Family, str] = {"gpt": "transformer.", "llama": "model."}
LAYER: dict[Family, str] = {"gpt": "h", "llama": "layers"}
NAMES: dict[Family, dict[str, str]] = {
    "gpt": {
        "embedding": "wte",
        "positions": "wpe",
        "norm": "ln_f",
        "head": "lm_head",
        "attn.norm": "ln_1",
        "attn.q": "attn.c_attn",
        "attn.k": "attn.c_attn",
        "attn.v": "attn.c_attn",
        "attn.o": "attn.c_proj",
        "mlp.norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    "llama": {
        "embedding": "embed_tokens",
        "norm": "norm",
        "head": "lm_head",
        "attn.norm": "input_layernorm",
        "attn.q": "self_attn.q_proj",
        "attn.k": "self_attn.k_proj",
        "attn.v": "self_attn.v_proj",
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
        "attn.o": "self_attn.o_proj",
        "mlp.norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "moe.norm": "post_attention_layernorm",
        "moe.router": "mlp.gate",
        "moe.shared.gate": "mlp.shared_expert.gate_proj",
        "moe.shared.up": "mlp.shared_expert.up_proj",
        "moe.shared.down": "mlp.shared_expert.down_proj",
        "moe.shared_gate": "mlp.shared_expert_gate",
        "moe.experts.{}.gate": "mlp.experts.{}.gate_proj",
        "moe.experts.{}.up": "mlp.experts.{}.up_proj",
        "moe.experts.{}.down": "mlp.experts.{}.down_proj",
    },
}
_MIXTRAL_NAMES = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Parts of names in Mixtral's files, and the names of these parts in files of others."""
CONSTANTS: dict[Family, re.Pattern[str]] = {
    "gpt": re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),
    "llama": re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
}
"""Constants that older files keep among the weights. Plait computes them anew, as transformers
does."""

# ---- keys of config.json ----

_GPT2 = {
    "num_layers": "n_layer", "hidden": "n_embd", "num_heads": "n_head", "vocab": "vocab_size",
    "max_sequence": "n_positions", "ffn_hidden": "n_inner", "tied_embeddings": "tie_word_embeddings",
    "norm_eps": "layer_norm_epsilon", "dropout": "resid_pdrop", "attention_dropout": "attn_pdrop",
}  # fmt: skip
_LLAMA = {
    "num_layers": "num_hidden_layers", "hidden": "hidden_size", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "head_size": "head_dim", "ffn_hidden": "intermediate_size",
    "vocab": "vocab_size", "max_sequence": "max_position_embeddings", "tied_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps", "rope_theta": "rope_theta", "attention_dropout": "attention_dropout",
}  # fmt: skip
"""Keys of Hugging Face's ``config.json`` for Llama models, by the field of ``ModelSpec``."""
_MIXTRAL = _LLAMA | {"experts.count": "num_local_experts", "experts.per_token": "num_experts_per_tok"}
_QWEN3_MOE = _LLAMA | {
    "experts.count": "num_experts", "experts.per_token": "num_experts_per_tok",
    "experts.ffn_hidden": "moe_intermediate_size", "experts.norm_topk_prob": "norm_topk_prob",
}  # fmt: skip
_QWEN2_MOE = _QWEN3_MOE | {
    "experts.shared_ffn_hidden": "shared_expert_intermediate_size", "qkv_bias": "qkv_bias"
}  # fmt: skip
"""The same for models with experts; ``experts.count`` is a field of ``Experts``."""
_LLAMA3 = {
    "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
}  # fmt: skip
_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
"""Keys of the rotary table, besides the keys of Llama 3's scaling."""
MAY_DIFFER = (
    "max_sequence", "tied_embeddings", "dropout", "attention_dropout", "levels", "parallel_block",
    "experts.capacity", "experts.balance", "experts.balance_loss", "experts.z_loss",
)  # fmt: skip
"""Fields in which a folder and a job may differ: settings of training, and those that the tensors
show. Features that no folder has are refused elsewhere."""


@dataclass(frozen=True)
class ModelType:
    """Form of one ``model_type``. names: Hugging Face's keys, by Plait's field. only: switches,
    with the value that Plait computes. same: other names of keys. more: other keys that are read.
    architectures: classes with this model's weights; the first is written."""

    read: Callable[[dict[str, Any]], ModelSpec]
    names: Mapping[str, str]
    only: Mapping[str, Any]
    same: Mapping[str, str]
    more: tuple[str, ...]
    architectures: tuple[str, ...]


def _from_gpt2(config: dict[str, Any]) -> ModelSpec:
    activation = config.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh"):
        raise JobError(f"activation {shown(activation)} is not supported", key="activation_function",
                       fix="Supported: gelu_new, gelu_pytorch_tanh")  # fmt: skip
    habits = {"tied_embeddings": True, "norm_eps": 1e-5, "dropout": 0.1, "attention_dropout": 0.1, "ffn_hidden": None}
    taken = _own_fields(config, _GPT2, habits)
    embedding = config.get("embd_pdrop", 0.1)
    if taken["dropout"] != embedding:
        raise JobError(f"{shown(taken['dropout'])} differs from embd_pdrop = {shown(embedding)}, and Plait has one "
                       "probability for both", key="resid_pdrop", fix="Make the two equal")  # fmt: skip
    return ModelSpec.from_dict({"family": "gpt"} | taken)


def _from_llama(config: dict[str, Any]) -> ModelSpec:
    return _like_llama(config, {"num_kv_heads": None, "head_size": None})


def _from_mistral(config: dict[str, Any]) -> ModelSpec:
    spec = _like_llama(config, {"num_kv_heads": 8, "head_size": None})
    return replace(spec, window=_window(config, 4096))


def _from_mixtral(config: dict[str, Any]) -> ModelSpec:
    habits = {"num_kv_heads": 8, "head_size": None, "norm_eps": 1e-5, "rope_theta": 1e6}
    return replace(_like_llama(config, habits, _MIXTRAL), window=_window(config, 0))


def _window(config: dict[str, Any], habit: int) -> int:
    """Return the window of all layers; 0: none. habit: the window of a file that has no key."""
    if config.get("sliding_window", habit or None) is None:
        return 0
    if config.get("sliding_window") == 0:
        raise JobError("0 means in transformers that no token sees another", key="sliding_window",
                       fix="Supported: null for no window, or at least 1")  # fmt: skip
    return _whole(config, "sliding_window", habit)


def _from_qwen2(config: dict[str, Any]) -> ModelSpec:
    spec = _like_llama(config, {"num_kv_heads": 32, "head_size": None})
    return _with_windows(replace(spec, qkv_bias=True), config)


def _from_qwen3(config: dict[str, Any]) -> ModelSpec:
    spec = _like_llama(config, {"num_kv_heads": 32, "head_size": 128})
    return _with_windows(replace(spec, qk_norm=True), config)


def _from_qwen3_moe(config: dict[str, Any]) -> ModelSpec:
    spec = _like_llama(config, {"num_kv_heads": 4, "head_size": None}, _QWEN3_MOE)
    return _with_windows(_placed(replace(spec, qk_norm=True), config), config)


def _from_qwen2_moe(config: dict[str, Any]) -> ModelSpec:
    habits = {"num_kv_heads": 16, "head_size": None, "qkv_bias": True}
    spec = _like_llama(config, habits, _QWEN2_MOE, shared=1, shared_gate=True)
    return _with_windows(_placed(spec, config), config)


def _placed(spec: ModelSpec, config: dict[str, Any]) -> ModelSpec:
    """Return the spec with experts in the layers that have them."""
    layers, step = spec.num_layers, _whole(config, "decoder_sparse_step", 1)
    dense: Any = config.get("mlp_only_layers") or []
    key = "mlp_only_layers" if dense else "decoder_sparse_step"
    if isinstance(dense, list) and step:
        assert spec.experts
        routed = [layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense]
        for first, every in product(range(layers), range(1, layers + 1)):
            experts = replace(spec.experts, first_dense=first, every=every)
            if routed and routed == list(filter(experts.at, range(layers))):
                return replace(spec, experts=experts)
    fix = "Leave it out. Experts are in all layers after the first few, or in every Nth layer from layer 0"
    raise JobError(f"{shown(config[key])} is not supported", key=key, fix=fix)


def _with_windows(spec: ModelSpec, config: dict[str, Any]) -> ModelSpec:
    """Return the spec with a sliding window in the layers that have one."""
    layers, first = spec.num_layers, _whole(config, "max_window_layers", 28)
    window = _whole(config, "sliding_window", 4096)
    slides = config.get("use_sliding_window") or False
    if not isinstance(slides, bool):
        raise JobError(f"{shown(slides)} is not true or false", key="use_sliding_window", fix="Supported: true, false")
    slides = slides and config.get("sliding_window", window) is not None
    default = [_KINDS[bool(slides and layer >= first)] for layer in range(layers)]
    kinds: Any = config.get("layer_types") or default
    if not slides and kinds == [_KINDS[False]] * layers:
        return spec
    for number in range(layers + 1):  # the first full_first and full_every with these layer types
        for every in (0, *range(2, layers + 1)):
            found = replace(spec, window=window, full_first=number, full_every=every)
            if kinds == _layer_types(found) and slides:
                return found
    problem = f"{shown(kinds)} is not supported beside use_sliding_window = {_json(slides)}"
    raise JobError(problem, key="layer_types", fix=f"Supported: {', '.join(_KINDS)}, each so-manieth layer another")


_KINDS = "full_attention", "sliding_attention"


def _layer_types(spec: ModelSpec) -> list[str]:
    return [_KINDS[bool(spec.window_at(layer))] for layer in range(spec.num_layers)]


def _json(value: bool) -> str:
    return str(value).lower()


def _whole(config: dict[str, Any], key: str, habit: int) -> int:
    """Return a number of tokens or layers; null counts as left out, which means ``habit``."""
    value = config.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise JobError(f"{shown(value)} is not a whole number", key=key, fix=f"Leave it out for {habit}")
    return habit if value is None else value


def _like_llama(
    config: dict[str, Any], shapes: dict[str, Any], names: Mapping[str, str] = _LLAMA, **experts: Any
) -> ModelSpec:
    """Return the spec of a model with llama's layers. shapes: fields that may be left out, with
    their defaults. experts: further fields of experts."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise JobError(f"{shown(activation)} is not supported", key="hidden_act", fix="Supported: silu, swish")
    theta, scaling = _rope(config)
    habits = {"tied_embeddings": False, "norm_eps": 1e-6, "rope_theta": 10000.0, "attention_dropout": 0.0}
    taken = _own_fields(config | theta, names, habits | shapes)
    experts |= {ours.removeprefix("experts."): taken.pop(ours) for ours in names if "." in ours}
    parts = {"experts": experts} if experts else {}
    return ModelSpec.from_dict({"family": "llama", "rope_scaling": scaling} | taken | parts)


def _rope(config: dict[str, Any]) -> tuple[dict[str, Any], RopeScaling | None]:
    """Return the base of the rotary frequencies, if the rotary table has it, and Llama 3's scaling.

    Newer files have everything under ``rope_parameters``; older ones split it over ``rope_theta``
    and ``rope_scaling``. If a file has both tables they must agree.
    """
    tables = dict[str, dict[str, Any]]()
    for name in ("rope_parameters", "rope_scaling"):
        if table := config.get(name):
            if not isinstance(table, dict):
                raise JobError(f"{shown(table)} is not a table", key=name, fix="Leave it out for plain positions")
            tables[name] = cast("dict[str, Any]", table)
    if len(tables) == 2 and tables["rope_parameters"] != tables["rope_scaling"]:
        raise JobError("differs from rope_parameters, its newer name", key="rope_scaling", fix="Keep one of the two")
    where, rope = next(iter(tables.items()), ("rope_scaling", dict[str, Any]()))
    _check_rope(config, where, rope)
    theta, own = rope.get("rope_theta"), config.get("rope_theta")
    if None not in (theta, own) and theta != own:
        raise JobError(f"{shown(theta)} differs from rope_theta = {shown(own)} outside of it",
                       key=f"{where}.rope_theta", fix="Keep one of the two")  # fmt: skip
    found: dict[str, Any] = {} if theta is None else {"rope_theta": theta}
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        return found, None
    for theirs in _LLAMA3.values():
        if rope.get(theirs) is None:
            raise JobError("is missing", key=f"{where}.{theirs}", fix="rope type llama3 needs it")
    try:
        scaling = {ours: rope[theirs] for ours, theirs in _LLAMA3.items()}
        return found, decode(RopeScaling, scaling, "model.rope_scaling")
    except JobError as error:
        name = _LLAMA3[(error.key or "").removeprefix("model.rope_scaling.")]
        raise JobError(error.problem, key=f"{where}.{name}", fix=error.fix) from None


def _check_rope(config: dict[str, Any], where: str, rope: dict[str, Any]) -> None:
    """Raise JobError for a kind of rotary positions, or a part of a kind, that Plait does not
    compute."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise JobError(f"rope type {shown(kind)} is not supported", key=where, fix="Supported: default, llama3")
    if rope.get("type", kind) != kind:
        raise JobError(f"type {shown(rope['type'])} differs from rope_type", key=where, fix="Keep one of the two")
    known = (*_ROPE, *(_LLAMA3.values() if kind == "llama3" else ()))
    if unknown := next((key for key in rope if key not in known and rope[key] is not None), None):
        raise JobError(f"unknown key{nearest(unknown, known)} for rope type {kind}", key=f"{where}.{unknown}",
                       fix=f"Known here: {', '.join(known)}")  # fmt: skip
    for name, partial in (("partial_rotary_factor", config), (f"{where}.partial_rotary_factor", rope)):
        if (part := partial.get("partial_rotary_factor")) not in (None, 1):
            raise JobError(f"{shown(part)} is not supported", key=name, fix="Supported: 1.0")


def _own_fields(config: dict[str, Any], names: Mapping[str, str], habits: dict[str, Any]) -> dict[str, Any]:
    """Return Plait's fields from Hugging Face's keys. habits: defaults of keys that may be left
    out. Raises JobError for a missing key without a default, and for a null or a zero where
    transformers would not take the default."""
    found: dict[str, Any] = {}
    for ours, theirs in names.items():
        if theirs not in config and ours not in habits:
            raise JobError("is missing", key=theirs, fix="Write it, as transformers does")
        value = config.get(theirs, habits.get(ours))
        if value is None and ours in habits and habits[ours] is None:
            continue
        own = "." in ours or (ours in habits and habits[ours] is None)  # here a zero means a default to Plait
        if value is None or (own and _is_zero(value)):
            fix = "Leave it out for the default" if ours in habits else "Give the model's own"
            raise JobError(f"{'null' if value is None else value} is not allowed", key=theirs, fix=fix)
        found[ours] = value
    return found


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def check_family(spec: ModelSpec) -> None:
    """Raise CheckpointError for a model that Hugging Face has no type for."""
    if spec.levels or spec.parallel_block:
        kind = "U-Transformer" if spec.levels else f"{spec.family} model with parallel blocks"
        raise CheckpointError(
            f"Hugging Face has no {kind}, so its weights come from and go to checkpoints of runs only"
        )


def huggingface_config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """Return the ``config.json`` of ``spec``, which ``ModelSpec.from_huggingface`` reads back.
    dtype: type of the weights, in torch's words. Raises CheckpointError if Hugging Face has no such
    model."""
    check_family(spec)
    kind = model_type(spec)
    written = MODEL_TYPES[kind]
    config: dict[str, Any] = {"architectures": [written.architectures[0]], "model_type": kind, "torch_dtype": dtype}
    config |= {"bos_token_id": None, "eos_token_id": None} | _fields(spec, written.names)
    config |= _gpt2_extra_keys(spec) if kind == "gpt2" else _llama_extra_keys(spec, kind)
    for name, (ours, _) in differences(spec, written.read(config)).items():
        raise CheckpointError(f"Hugging Face transformers has no {kind} with {name} = {shown(ours)}")
    return config


def model_type(spec: ModelSpec) -> str:
    """Return Hugging Face's type of models whose layers are most like the spec's."""
    if spec.family == "gpt":
        return "gpt2"
    if spec.experts:
        return "qwen3_moe" if spec.qk_norm else "qwen2_moe" if spec.experts.shared_gate else "mixtral"
    return "qwen3" if spec.qk_norm else "qwen2" if spec.qkv_bias else "mistral" if spec.window_share else "llama"


def differences(spec: ModelSpec, other: ModelSpec) -> dict[str, tuple[Any, Any]]:
    """Return the values of both models in fields that decide what is computed of tokens, where they
    differ, by name (``experts.count``)."""
    values = [asdict(spec), asdict(other)]
    for plain in values:
        experts = cast("dict[str, Any]", plain.pop("experts") or {"count": None})
        plain |= {f"experts.{key}": value for key, value in experts.items()}
    free = {*MAY_DIFFER} - ({"max_sequence"} if spec.learned_positions else set[str]())
    pairs = {name: (values[0][name], values[1][name]) for name in values[0].keys() & values[1].keys() - free}
    return {name: pairs[name] for name in values[0] if name in pairs and pairs[name][0] != pairs[name][1]}


def usual_name(name: str) -> str:
    """Return a tensor's name in files of most model types.

    >>> usual_name("layers.0.block_sparse_moe.experts.3.w1.weight")
    'layers.0.mlp.experts.3.gate_proj.weight'
    """
    return ".".join(_MIXTRAL_NAMES.get(part, part) for part in name.split("."))


def file_name(name: str, kind: str) -> str:
    """Return a tensor's name in files of a model type, from the name in files of most."""
    own = {usual: own for own, usual in _MIXTRAL_NAMES.items()} if kind == "mixtral" else {}
    return ".".join(own.get(part, part) for part in name.split("."))


def _fields(of: ModelSpec | RopeScaling, names: Mapping[str, str]) -> dict[str, Any]:
    """Return fields under Hugging Face's names. Floats stay floats, although a job may have a whole
    number in their place."""
    floats = {field.name for field in fields(of) if field.type == "float"}
    found = {theirs: (ours in floats, attrgetter(ours)(of)) for ours, theirs in names.items()}
    return {theirs: float(value) if wide else value for theirs, (wide, value) in found.items()}


def _gpt2_extra_keys(spec: ModelSpec) -> dict[str, Any]:
    """Return GPT-2's keys that are not fields of ModelSpec. Raises CheckpointError for heads that
    do not divide the hidden size."""
    if spec.head_size * spec.num_heads != spec.hidden:
        problem = f"{spec.num_heads} heads of size {spec.head_size} with hidden = {spec.hidden}"
        raise CheckpointError(f"Hugging Face has no GPT-2 of {problem}: there the heads share out the hidden size")
    return {"activation_function": "gelu_new", "embd_pdrop": spec.dropout}


def _llama_extra_keys(spec: ModelSpec, kind: str) -> dict[str, Any]:
    """Return Llama's keys that are not fields of ModelSpec. Raises CheckpointError for a hidden
    size that the heads do not divide."""
    if spec.hidden % spec.num_heads:
        problem = f"a hidden size ({spec.hidden}) that its {spec.num_heads} heads do not divide, whatever their size"
        raise CheckpointError(f"Hugging Face transformers loads no Llama with {problem}, so this model has no export")
    scaling = spec.rope_scaling
    table = {"rope_type": "llama3", **_fields(scaling, _LLAMA3)} if scaling else None
    beside: dict[str, Any] = {"hidden_act": "silu", **MODEL_TYPES[kind].only, "rope_scaling": table}
    if spec.experts:
        dense = [layer for layer in range(spec.num_layers) if not spec.experts.at(layer)]
        beside |= {"mlp_only_layers": dense} if kind != "mixtral" else {}
    if kind in ("qwen2", "qwen3"):
        beside |= {"use_sliding_window": spec.window_share > 0, "layer_types": _layer_types(spec)}
        beside |= {"max_window_layers": spec.full_first}
    return beside | ({"sliding_window": spec.window or None} if kind != "llama" else {})


_ROTARY = ("hidden_act", "rope_parameters", "rope_scaling", "partial_rotary_factor")
_WINDOWS = ("sliding_window", "max_window_layers", "layer_types")
_PLACES = ("decoder_sparse_step", "mlp_only_layers")
MODEL_TYPES = {
    "gpt2": ModelType(
        read=_from_gpt2,
        names=_GPT2,
        only={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
        },
        same={
            "num_hidden_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
        more=("activation_function", "embd_pdrop"),
        architectures=("GPT2LMHeadModel", "GPT2Model"),
    ),
    "llama": ModelType(
        read=_from_llama,
        names=_LLAMA,
        only={"attention_bias": False, "mlp_bias": False, "rope_interleaved": False},
        same={},
        more=_ROTARY,
        architectures=("LlamaForCausalLM", "LLaMAForCausalLM", "LlamaModel"),
    ),
    "mistral": ModelType(
        read=_from_mistral,
        names=_LLAMA,
        only={"attention_bias": False, "mlp_bias": False},
        same={},
        more=(*_ROTARY, "sliding_window"),
        architectures=("MistralForCausalLM", "MistralModel"),
    ),
    "mixtral": ModelType(
        read=_from_mixtral,
        names=_MIXTRAL,
        only={"output_router_logits": False, "router_jitter_noise": 0.0},
        same={"num_experts": "num_local_experts"},
        more=(*_ROTARY, "sliding_window"),
        architectures=("MixtralForCausalLM", "MixtralModel"),
    ),
    "qwen2": ModelType(
        read=_from_qwen2,
        names=_LLAMA,
        only={"use_mrope": False},
        same={},
        more=(*_ROTARY, *_WINDOWS, "use_sliding_window"),
        architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    ),
    "qwen3": ModelType(
        read=_from_qwen3,
        names=_LLAMA,
        only={"attention_bias": False},
        same={},
        more=(*_ROTARY, *_WINDOWS, "use_sliding_window"),
        architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    ),
    "qwen2_moe": ModelType(
        read=_from_qwen2_moe,
        names=_QWEN2_MOE,
        only={"output_router_logits": False, "use_sliding_window": False},
        same={"num_local_experts": "num_experts"},
        more=(*_ROTARY, *_WINDOWS, *_PLACES),
        architectures=("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
    ),
    "qwen3_moe": ModelType(
        read=_from_qwen3_moe,
        names=_QWEN3_MOE,
        only={"attention_bias": False, "output_router_logits": False, "use_sliding_window": False},
        same={"num_local_experts": "num_experts"},
        more=(*_ROTARY, *_WINDOWS, *_PLACES),
        architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    ),
}
