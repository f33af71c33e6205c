"""Reader of Hugging Face's ``config.json`` into a ModelSpec. The file may have any origin and
content.

| keys | treatment |
|---|---|
| shapes, epsilons, dropout, rotary positions | read (``core.model.families``) |
| two names of one key | refused if their values differ |
| switches of what a layer computes (``only``) | refused by name, except with the value that Plait computes |
| dtypes, token numbers, generation, labels (``_NO_NUMBERS``) | ignored, counted |
| ``router_aux_loss_coef`` | ignored, counted: see below |
| any other key | refused by name, unless it is null |

transformers adds a balancing loss only with ``output_router_logits``, which is refused: its loss is
one over the tokens of all layers at once. Plait's is one of each layer, and a job sets its
coefficient (``model.experts.balance_loss``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import JobError, nearest
from plait.core.base.files import reason_of
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.numbers import shown
from plait.core.model.families import MODEL_TYPES, ModelType
from plait.core.model.spec import ModelSpec

LARGEST = 2 << 20
"""Most bytes of a config.json: with the names of a thousand labels a file has some 50,000."""
PASSED_OVER = "keys of config.json that change nothing of what is computed"
_ONLY: dict[str, Any] = {
    "is_encoder_decoder": False, "add_cross_attention": False, "cross_attention_hidden_size": None,
    "pruned_heads": {}, "quantization_config": None, "per_layer_config": None, "auto_map": None,
}  # fmt: skip
"""Switches of every family, with the one value that Plait computes. null, or a missing key, means
that value."""
_ORIGIN = """
transformers_version _name_or_path name_or_path _commit_hash _from_model_config unsloth_version unsloth_fixed
is_llama_config transformers.js_config tokenizer_class prefix
"""
_SAME_NUMBERS = """
torch_dtype dtype use_bfloat16 torchscript gradient_checkpointing initializer_range pretraining_tp
chunk_size_feed_forward attn_implementation _attn_implementation _attn_implementation_autoset
_attn_implementation_internal _flash_attn_2_enabled experts_implementation tf_legacy_loss use_cache return_dict
use_return_dict output_hidden_states output_attentions output_past tie_last_hidden_states is_decoder
tie_encoder_decoder router_aux_loss_coef
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
"""Keys that cannot change what a model computes for tokens."""


def without_a_key(name: str) -> str:
    """Return why a job's [model] has no key for a key of config.json; empty for any other name."""
    switches = {key: value for kind in MODEL_TYPES.values() for key, value in kind.only.items()}
    if name in _NO_NUMBERS or name == "architectures":
        return "changes nothing of what the model computes of tokens"
    if name in switches or name in _ONLY:
        return f"is always {_json((switches | _ONLY)[name])} here"
    if name in ("hidden_act", "activation_function"):
        return "follows from model.family: gpt has gelu_new, llama silu"
    if name == "partial_rotary_factor":
        return "is always 1 here"
    return ""


def number_type(values: Mapping[str, Any]) -> str:
    """Return the number type in a configuration, such as ``bfloat16``; empty if there is none."""
    inner = values.get("text_config")
    for table in (values, cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else dict[str, Any]()):
        for key in ("dtype", "torch_dtype"):
            if table.get(key) is not None:
                return str(table[key]).removeprefix("torch.")
    return ""


def read_values(path: Path) -> dict[str, Any]:
    """Return the keys of a ``config.json``. path: the file or its folder. Raises JobError if it
    cannot be read."""
    file = path / "config.json" if path.is_dir() else path
    try:
        return read_table(file, LARGEST, unique=True)
    except (OSError, ValueError) as error:
        fix = "Name a folder of transformers' save_pretrained, or its config.json (nothing is downloaded)"
        raise JobError(
            f"cannot be read as a Hugging Face config: {reason_of(error)}", file=str(file), fix=fix
        ) from None


def read_config(path: Path, over: IgnoredInput | None = None) -> ModelSpec:
    """Return the spec in a ``config.json`` (of a type in ``MODEL_TYPES``). path: the file or its
    folder. over: counts ignored keys. Raises JobError, with the file and the file's own key, for
    values that are wrong or that Plait cannot run."""
    file, values = path / "config.json" if path.is_dir() else path, read_values(path)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise JobError(f"model_type {shown(kind)} is not supported", file=str(file),
                       key="model_type", fix=f"Supported: {', '.join(MODEL_TYPES)}")  # fmt: skip
    family = MODEL_TYPES[kind]
    try:
        plain = _one_name_each(values, family.same)
        _refuse_unknown(plain, family, over if over is not None else IgnoredInput())
        return family.read(plain)
    except JobError as error:
        key = (error.key or "").removeprefix("model.")
        raise JobError(error.problem, file=str(file), key=family.names.get(key, key), fix=error.fix) from None


def _one_name_each(values: dict[str, Any], same: Mapping[str, str]) -> dict[str, Any]:
    """Return the values under the names that transformers writes. Raises JobError if two names of a
    key disagree."""
    plain = dict(values)
    for other, name in same.items():
        if other in plain:
            value = plain.pop(other)
            if plain.setdefault(name, value) != value:
                raise JobError(f"{shown(value)} differs from {name} = {shown(plain[name])}, another name of it",
                               key=other, fix="Keep one of the two")  # fmt: skip
    return plain


def _refuse_unknown(values: dict[str, Any], family: ModelType, over: IgnoredInput) -> None:
    """Raise JobError for a switch or a key that would change what is computed; count keys that
    change nothing."""
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
                f"unknown key{nearest(key, known)}, which may change what the model computes",
                key=key, fix="Take it out if the weights are of a model without it",
            )  # fmt: skip


def _check_architectures(value: Any, family: ModelType) -> None:
    """Raise JobError for a class whose weights may have another meaning."""
    listed: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    for one in listed:
        if one not in family.architectures:
            raise JobError(f"{shown(one)} is not supported", key="architectures",
                           fix=f"Supported: {', '.join(family.architectures)}")  # fmt: skip


def _json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
