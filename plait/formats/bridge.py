"""Reader of a Megatron-Bridge recipe as a job. The last part of a setting's name is a flag of
Megatron-LM, with ``_`` for ``-``. A missing setting has the default of the model's class
(``PROVIDERS``), from Megatron-Bridge's ``megatron/bridge/models`` (2025). For any other class the
user is asked for missing sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from plait.core.base.errors import JobError
from plait.formats.base.literals import Called, LiteralSettings
from plait.formats.base.parsed_config import ParsedConfig
from plait.formats.base.shell import Argument, unknown
from plait.formats.megatron.flags import FLAGS, SWITCHES
from plait.formats.megatron.read import parse_megatron
from plait.formats.megatron.rules import RECIPE_RULES

BRIDGE: Mapping[str, str] = {
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank", "gated_linear_unit": "swiglu",
    "layernorm_epsilon": "norm-epsilon", "seq_length": "seq-length", "rope_scaling": "use-rope-scaling",
    "qk_layernorm": "qk-layernorm", "num_moe_experts": "num-experts",
}  # fmt: skip
"""Flags of recipe settings whose name is not the flag's with ``_`` for ``-``."""
PUBLISHED: Mapping[str, str] = {
    "meta-llama/Meta-Llama-3-8B": "llama3-8b", "meta-llama/Llama-3.1-8B": "llama3-8b",
    "meta-llama/Meta-Llama-3.1-8B": "llama3-8b", "meta-llama/Meta-Llama-3-70B": "llama3-70b",
    "meta-llama/Llama-3.1-70B": "llama3-70b", "meta-llama/Meta-Llama-3.1-70B": "llama3-70b",
    "meta-llama/Llama-3.1-405B": "llama3-405b", "meta-llama/Meta-Llama-3.1-405B": "llama3-405b",
    "meta-llama/Llama-2-7b-hf": "llama2-7b", "Qwen/Qwen3-8B": "qwen3-8b", "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b", "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
}  # fmt: skip
"""Presets by the model's name on Hugging Face."""
_LLAMA = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "position_embedding_type": "rope", "add_bias_linear": False,
    "seq_length": 4096, "attention_dropout": 0.0, "hidden_dropout": 0.0, "share_embeddings_and_output_weights": False,
}  # fmt: skip
_LLAMA3 = _LLAMA | {"num_query_groups": 8, "layernorm_epsilon": 1e-5}
_LONG = _LLAMA3 | {"rotary_base": 500_000, "seq_length": 131_072}


def _sizes(layers: int, hidden: int, heads: int, groups: int, ffn: int) -> dict[str, int]:
    return {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_query_groups": groups,
            "ffn_hidden_size": ffn}  # fmt: skip


_7B, _13B, _70B = _sizes(32, 4096, 32, 32, 11008), _sizes(40, 5120, 40, 40, 13824), _sizes(80, 8192, 64, 8, 28672)
_8B, _405B = _sizes(32, 4096, 32, 8, 14336), _sizes(126, 16384, 128, 8, 53248)
_SHORT = {"rotary_base": 500_000, "seq_length": 8192}
_CODE = {"rotary_base": 1_000_000, "seq_length": 16_384}
_SMALL = _LONG | {"share_embeddings_and_output_weights": True}
PROVIDERS: Mapping[str, Mapping[str, Any]] = {
    "GPTModelProvider": {}, "LlamaModelProvider": _LLAMA, "Llama2ModelProvider7B": _LLAMA | _7B,
    "Llama2ModelProvider13B": _LLAMA | _13B, "Llama2ModelProvider70B": _LLAMA | _70B,
    "Llama3ModelProvider": _LLAMA3, "Llama31ModelProvider": _LLAMA3,
    "Llama3ModelProvider8B": _LLAMA3 | _SHORT | _8B, "Llama3ModelProvider70B": _LLAMA3 | _SHORT | _70B,
    "Llama31ModelProvider8B": _LONG | _8B, "Llama31ModelProvider70B": _LONG | _70B,
    "Llama31ModelProvider405B": _LONG | _405B,
    "Llama32ModelProvider1B": _SMALL | _sizes(16, 2048, 32, 8, 8192),
    "Llama32ModelProvider3B": _SMALL | _sizes(28, 3072, 24, 8, 8192),
    "CodeLlamaModelProvider7B": _LLAMA | _7B | _CODE, "CodeLlamaModelProvider13B": _LLAMA | _13B | _CODE,
    "CodeLlamaModelProvider34B": _LLAMA | _sizes(48, 8192, 64, 8, 22016) | _CODE,
    "CodeLlamaModelProvider70B": _LLAMA | _70B,
}  # fmt: skip
"""Default fields by model class; any other field has Megatron-LM's default."""
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size",
         "gated_linear_unit", "position_embedding_type", "share_embeddings_and_output_weights", "add_bias_linear",
         "hidden_dropout")  # fmt: skip
"""Fields that change a model's size, and whose default in a class may differ from Megatron-LM's."""


def read_recipe(file: str, settings: LiteralSettings, overrides: Mapping[str, str]) -> ParsedConfig:
    """Return the job of a recipe. overrides: the user's keys on the command line. Raises JobError
    for unknown values that may change degrees, sizes or precision."""
    plain = {key.rpartition(".")[2]: value for key, value in settings.values.items() if not isinstance(value, Called)}
    provider = next(
        (last for name, _ in reversed(settings.calls) if "ModelProvider" in (last := name.split(".")[-1])), ""
    )
    _check_class(file, provider, plain, overrides)
    plain = {**PROVIDERS.get(provider, {}), **plain}
    named = {INVERSE[key]: not value for key, value in plain.items() if key in INVERSE and isinstance(value, bool)}
    for key, value in plain.items():
        if key not in INVERSE:
            named.setdefault(BRIDGE.get(key, key.replace("_", "-")), value)
    if named.get("grad-reduce-in-fp32") is False:
        named["grad-reduce-in-bf16"] = True
    named.pop("grad-reduce-in-fp32", None)
    if "num-query-groups" in named and "multi-latent-attention" not in named:
        named["group-query-attention"] = True
    named.pop("mixed-precision", None)
    mixed, strange = _mixed(settings)
    given = [*arguments_of(mixed | named), *strange, *_unknown_settings(settings)]
    told = parse_megatron(file, given, rules=RECIPE_RULES, overrides=overrides)
    told.unknown += [f"{one} (computed)" for one in settings.computed]
    told.notes += settings.foreign_notes
    told.rounds = 0
    _model(told, settings, overrides)
    return told


def _unknown_settings(settings: LiteralSettings) -> Iterator[Argument]:
    """Yield the settings of unknown value: computed settings, and functions of other modules."""
    called = {key: f"{value}()" for key, value in settings.values.items() if isinstance(value, Called)}
    for key, text in {**called, **settings.open}.items():
        if key.startswith("**"):
            yield Argument("", (unknown(text),))
        last = key.rpartition(".")[2]
        flag = INVERSE.get(last, BRIDGE.get(last, last.replace("_", "-")))
        if flag in FLAGS.named:
            yield Argument(flag, (unknown(text),))
    for name in settings.foreign_calls:
        if not name.endswith("_common"):  # Megatron-Bridge's own functions set neither model nor degrees
            yield Argument("", (unknown(f"{name}()"),))


def _check_class(file: str, provider: str, plain: Mapping[str, Any], overrides: Mapping[str, str]) -> None:
    """Raise JobError if a recipe leaves sizes to the defaults of an unknown model class."""
    left_out = [name for name in SIZES if name not in plain]
    if provider and provider not in PROVIDERS and left_out and not PRESETS & overrides.keys():
        problem = f"{provider} has defaults of its own, which are unknown here: {', '.join(left_out)}"
        fix = "Say them in the recipe, or add model.preset=... to the command"
        raise JobError(problem, file=file, key="model", fix=fix)


def _model(parsed: ParsedConfig, settings: LiteralSettings, overrides: Mapping[str, str]) -> None:
    """Set the model that the recipe names, unless the command line names one."""
    model = next((first for name, first in settings.calls if name.endswith("from_hf_pretrained")), "")
    if PRESETS & overrides.keys():
        parsed.values.pop("model", None)
    elif "num_layers" not in parsed.values.get("model", {}) and model:
        parsed.values.pop("model", None)
        if model in PUBLISHED:
            parsed.set("model.preset", PUBLISHED[model])
        else:
            parsed.unknown.append(f"the model {model}")


PRESETS = {"model.preset", "model.huggingface"}
"""Keys that name a whole model."""
INVERSE = {
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "add_bias_linear": "disable-bias-linear",
}
"""Settings of Megatron Core that are on by default, and the flags that turn them off."""
MIXED = re.compile(r"(bf16|fp16|fp32|nemotron_h_bf16|w16a16)\w*")
"""Names of Megatron-Bridge's precision recipes and of the functions that return them."""
SCALED = {"mxfp8": "mxfp8", "delayed": "delayed", "current": "tensorwise", "subchannel": "blockwise"}
"""Values of --fp8-recipe by a word in the precision recipe's name."""


def _mixed(settings: LiteralSettings) -> tuple[dict[str, Any], list[Argument]]:
    """Return the flags of the precision recipe (bf16 by default), and an argument for an unknown
    recipe."""
    given = next((one for key, one in settings.values.items() if key.rpartition(".")[2] == "mixed_precision"), "bf16")
    firsts = [first for name, first in settings.calls if name == given and first]
    name = next((str(one) for one in (*firsts, given) if MIXED.fullmatch(str(one))), "")
    known = name or str(given).endswith("Config")
    left_open = [text for key, text in settings.open.items() if key.rpartition(".")[2] == "mixed_precision"]
    given, known = (left_open[0], "") if left_open else (given, known)
    strange = [] if known else [Argument("fp8-format", (unknown(f"mixed_precision = {given}"),))]
    half = "fp16" if name.startswith("fp16") else "bf16"
    found: dict[str, Any] = {} if name.startswith("fp32") else {half: True}
    if "nvfp4" in name:
        found["fp4-format"] = "e2m1"
    elif "fp8" in name:
        recipe = next((kind for word, kind in SCALED.items() if word in name), "delayed")
        found |= {"fp8-format": "hybrid", "fp8-recipe": recipe, "fp8-param-gather": True}
    return found, strange


def arguments_of(values: Any) -> Iterator[Argument]:
    """Yield the settings of a mapping, and of tables within, as flags. True is a flag without
    value; None yields nothing. False yields nothing for a known flag, the inverse flag for a
    setting that is on by default, and an argument ``false`` for an unknown name."""
    if not isinstance(values, Mapping):
        return
    for key, value in cast("Mapping[str, Any]", values).items():
        name = str(key).lstrip("-").replace("_", "-")
        if isinstance(value, Mapping):
            yield from arguments_of(value)
        elif value is True and key not in INVERSE:
            yield Argument(name, ())
        elif value is False:
            if key in INVERSE or not FLAGS.knows(name):
                yield Argument(INVERSE[key], ()) if key in INVERSE else Argument(name, ("false",))
        elif value is not None and value is not True:
            some: list[Any] = cast("list[Any]", value) if isinstance(value, list | tuple) else [value]
            yield Argument(name, () if name in SWITCHES and not isinstance(value, str) else tuple(map(str, some)))
