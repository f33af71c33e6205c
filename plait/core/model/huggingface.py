"""Hugging Face's ``config.json``, read as a ModelSpec: a file from anywhere, with anything in it.

| keys | what becomes of them |
|---|---|
| shapes, epsilons, dropout, rotary positions | read (``_GPT2``, ``_LLAMA``, ``_ROPE``) |
| two names of one thing | refused where they differ |
| switches of what a layer computes (``only``) | refused by name, except with the value that Plait computes |
| dtypes, token numbers, generation, labels (``_NO_NUMBERS``) | passed over, counted |
| any other key | refused by name, unless it is null |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from plait.core.base.codec.data import decode
from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import JobError, nearest
from plait.core.base.files import reason_of
from plait.core.base.numbers import shown
from plait.core.base.passed_over import PassedOver
from plait.core.model.spec import ModelSpec, RopeScaling

LARGEST = 2 << 20
"""Bytes of a config.json: with names of a thousand labels one has some 50,000."""
PASSED_OVER = "keys of config.json that change nothing of what is computed"
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
"""What Hugging Face calls our fields."""
_LLAMA3 = {
    "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
}  # fmt: skip
_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
"""Keys of the rotary table, beside those of Llama 3's scaling."""
_ONLY: dict[str, Any] = {
    "is_encoder_decoder": False, "add_cross_attention": False, "cross_attention_hidden_size": None,
    "pruned_heads": {}, "quantization_config": None, "per_layer_config": None, "auto_map": None,
}  # fmt: skip
"""Switches of every family: the one value that Plait computes. null, or the key left out, is always that."""
_ORIGIN = """
transformers_version _name_or_path name_or_path _commit_hash _from_model_config unsloth_version unsloth_fixed
is_llama_config transformers.js_config tokenizer_class prefix
"""
_SAME_NUMBERS = """
torch_dtype dtype use_bfloat16 torchscript gradient_checkpointing initializer_range pretraining_tp
chunk_size_feed_forward attn_implementation _attn_implementation _attn_implementation_autoset
_attn_implementation_internal _flash_attn_2_enabled experts_implementation tf_legacy_loss use_cache return_dict
use_return_dict output_hidden_states output_attentions output_past tie_last_hidden_states is_decoder
tie_encoder_decoder
"""
_OTHER_HEADS = """
id2label label2id num_labels _num_labels problem_type finetuning_task task_specific_params summary_type
summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout n_special n_ctx
predict_special_tokens
"""
_GENERATION = """
bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id max_length max_new_tokens
min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p min_p
typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty length_penalty
no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
exponential_decay_length_penalty suppress_tokens begin_suppress_tokens assistant_confidence_threshold
assistant_lookbehind num_assistant_tokens num_assistant_tokens_schedule target_lookbehind
"""
_NO_NUMBERS = frozenset(" ".join((_ORIGIN, _SAME_NUMBERS, _OTHER_HEADS, _GENERATION)).split())
"""Keys that cannot change what a model computes of tokens."""


@dataclass(frozen=True)
class _Family:
    """How one ``model_type`` is written. only: switches, and the value that Plait computes. same: other names
    of keys. architectures: the classes whose weights are this model's."""

    read: Callable[[dict[str, Any]], ModelSpec]
    names: Mapping[str, str]
    only: Mapping[str, Any]
    same: Mapping[str, str]
    more: tuple[str, ...]
    architectures: tuple[str, ...]


def read_config(path: Path, over: PassedOver | None = None) -> ModelSpec:
    """The spec in a ``config.json`` (``gpt2`` or ``llama``), or in a folder with one; ``over`` counts what
    was passed over. Raises JobError, with the file and its own key, for what is wrong or cannot be run."""
    file = path / "config.json" if path.is_dir() else path
    try:
        values = read_table(file, LARGEST, unique=True)
    except (OSError, ValueError) as error:
        fix = "Name a folder of transformers' save_pretrained, or its config.json"
        raise JobError(
            f"cannot be read as a Hugging Face config: {reason_of(error)}", file=str(file), fix=fix
        ) from None
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise JobError(f"model_type {shown(kind)} is not supported", file=str(file),
                       key="model_type", fix=f"Supported: {', '.join(_FAMILIES)}")  # fmt: skip
    family = _FAMILIES[kind]
    try:
        plain = _one_name_each(values, family.same)
        _refuse_others(plain, family, over if over is not None else PassedOver())
        return family.read(plain)
    except JobError as error:
        key = (error.key or "").removeprefix("model.")
        raise JobError(error.problem, file=str(file), key=family.names.get(key, key), fix=error.fix) from None


def _one_name_each(values: dict[str, Any], same: Mapping[str, str]) -> dict[str, Any]:
    """The values under the names that transformers writes. Raises JobError where two names disagree."""
    plain = dict(values)
    for other, name in same.items():
        if other in plain:
            value = plain.pop(other)
            if plain.setdefault(name, value) != value:
                raise JobError(f"{shown(value)} differs from {name} = {shown(plain[name])}, another name of it",
                               key=other, fix="Keep one of the two")  # fmt: skip
    return plain


def _refuse_others(values: dict[str, Any], family: _Family, over: PassedOver) -> None:
    """Raise JobError for a switch or a key that would change what is computed; count what changes nothing."""
    only: dict[str, Any] = {**_ONLY, **family.only}
    read = {"model_type", *family.names.values(), *family.more}
    for key, value in values.items():
        if key in read or value is None:
            continue
        if key == "architectures":
            _check_architectures(value, family)
        elif key in only:
            allowed = only[key]
            if type(value) is not type(allowed) or value != allowed:
                fix = f"Supported: {'without it' if allowed is None else _json(allowed)}"
                raise JobError(f"{shown(value)} is not supported", key=key, fix=fix)
        elif key in _NO_NUMBERS:
            over.note(PASSED_OVER, key)
        else:
            known = [*read, *only, *_NO_NUMBERS]
            raise JobError(
                f"unknown key{nearest(key, known)}: nobody knows whether it changes what the model computes",
                key=key, fix="Take it out if the weights are of a model without it",
            )  # fmt: skip


def _check_architectures(value: Any, family: _Family) -> None:
    """Raise JobError for a class whose weights may mean something else."""
    listed: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    for one in listed:
        if one not in family.architectures:
            raise JobError(f"{shown(one)} is not supported", key="architectures",
                           fix=f"Supported: {', '.join(family.architectures)}")  # fmt: skip


def _json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _from_gpt2(config: dict[str, Any]) -> ModelSpec:
    activation = config.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh"):
        raise JobError(f"activation {shown(activation)} is not supported", key="activation_function",
                       fix="Supported: gelu_new, gelu_pytorch_tanh")  # fmt: skip
    habits = {"tied_embeddings": True, "norm_eps": 1e-5, "dropout": 0.1, "attention_dropout": 0.1, "ffn_hidden": None}
    taken = _taken(config, _GPT2, habits)
    embedding = config.get("embd_pdrop", 0.1)
    if taken["dropout"] != embedding:
        raise JobError(f"{shown(taken['dropout'])} differs from embd_pdrop = {shown(embedding)}, and Plait has one "
                       "probability for both", key="resid_pdrop", fix="Make the two equal")  # fmt: skip
    return ModelSpec.from_dict({"family": "gpt"} | taken)


def _from_llama(config: dict[str, Any]) -> ModelSpec:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise JobError(f"{shown(activation)} is not supported", key="hidden_act", fix="Supported: silu, swish")
    theta, scaling = _rope(config)
    habits = {"tied_embeddings": False, "norm_eps": 1e-6, "rope_theta": 10000.0, "attention_dropout": 0.0}
    shapes = {"num_kv_heads": None, "head_size": None}
    taken = _taken(config | theta, _LLAMA, habits | shapes)
    return ModelSpec.from_dict({"family": "llama", "rope_scaling": scaling} | taken)


def _rope(config: dict[str, Any]) -> tuple[dict[str, Any], RopeScaling | None]:
    """The base of the rotary frequencies, if the rotary table has it, and Llama 3's scaling.

    Newer files hold everything under ``rope_parameters``; older ones split it over ``rope_theta`` and
    ``rope_scaling``. Where both tables stand they must agree.
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
    """Raise JobError for a kind of rotary positions, or a part of one, that Plait does not compute."""
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


def _taken(config: dict[str, Any], names: dict[str, str], habits: dict[str, Any]) -> dict[str, Any]:
    """Our fields from theirs; what is left out is as habits have it. Raises JobError for what has no habit,
    and for a null or a zero where transformers would not take the habit."""
    found: dict[str, Any] = {}
    for ours, theirs in names.items():
        if theirs not in config and ours not in habits:
            raise JobError("is missing", key=theirs, fix="Write it, as transformers does")
        value = config.get(theirs, habits.get(ours))
        if value is None and ours in habits and habits[ours] is None:
            continue
        if value is None or (ours in habits and habits[ours] is None and _is_zero(value)):
            fix = "Leave it out for the default" if ours in habits else "Give the model's own"
            raise JobError(f"{'null' if value is None else value} is not allowed", key=theirs, fix=fix)
        found[ours] = value
    return found


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


_FAMILIES = {
    "gpt2": _Family(
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
    "llama": _Family(
        read=_from_llama,
        names=_LLAMA,
        only={"attention_bias": False, "mlp_bias": False, "rope_interleaved": False},
        same={},
        more=("hidden_act", "rope_parameters", "rope_scaling", "partial_rotary_factor"),
        architectures=("LlamaForCausalLM", "LLaMAForCausalLM", "LlamaModel"),
    ),
}
