"""A recipe of Megatron-Bridge as a job: the last part of each setting's name is a flag's of Megatron-LM, with
``_`` for ``-``; what it leaves out is the default of its model's class (``bridge_providers``)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from plait.core.base.errors import JobError
from plait.plan.bridge_providers import PROVIDERS, SIZES
from plait.plan.megatron_flags import BRIDGE, PUBLISHED, SWITCHES, UNDERSTOOD, known_flag
from plait.plan.megatron_rules import OF_RECIPES
from plait.plan.read_literals import Called, LiteralSettings
from plait.plan.read_megatron import megatron_told
from plait.plan.read_shell import Argument
from plait.plan.shell_words import unknown
from plait.plan.told import Told


def read_recipe(file: str, settings: LiteralSettings, overrides: Mapping[str, str]) -> Told:
    """Return the job of a recipe. overrides: keys of the command line. Raises JobError for what may change
    degrees, sizes or precision and is not understood."""
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
    told = megatron_told(file, given, rules=OF_RECIPES, said=overrides)
    told.unknown += [f"{one} (computed)" for one in settings.computed]
    told.notes += settings.unseen
    told.rounds = 0
    _model(told, settings, overrides)
    return told


def _unknown_settings(settings: LiteralSettings) -> Iterator[Argument]:
    """Settings that nobody knows: those that are computed, and what functions of other modules set."""
    called = {key: f"{value}()" for key, value in settings.values.items() if isinstance(value, Called)}
    for key, text in {**called, **settings.open}.items():
        if key.startswith("**"):
            yield Argument("", (unknown(text),))
        last = key.rpartition(".")[2]
        flag = INVERSE.get(last, BRIDGE.get(last, last.replace("_", "-")))
        if flag in UNDERSTOOD:
            yield Argument(flag, (unknown(text),))
    for name in settings.bases:
        if not name.endswith("_common"):  # Megatron-Bridge's own: neither a model nor degrees
            yield Argument("", (unknown(f"{name}()"),))


def _check_class(file: str, provider: str, plain: Mapping[str, Any], overrides: Mapping[str, str]) -> None:
    """Raise JobError for a class of models whose defaults are not read, where a recipe leaves sizes to it."""
    left_out = [name for name in SIZES if name not in plain]
    if provider and provider not in PROVIDERS and left_out and not PRESETS & overrides.keys():
        problem = f"{provider} has defaults of its own, and nobody knows here which: {', '.join(left_out)}"
        fix = "Say them in the recipe, or add model.preset=... to the command"
        raise JobError(problem, file=file, key="model", fix=fix)


def _model(told: Told, settings: LiteralSettings, overrides: Mapping[str, str]) -> None:
    """The model that the command line, or the recipe, names."""
    model = next((first for name, first in settings.calls if name.endswith("from_hf_pretrained")), "")
    if PRESETS & overrides.keys():
        told.values.pop("model", None)
    elif "num_layers" not in told.values.get("model", {}) and model:
        told.values.pop("model", None)
        if model in PUBLISHED:
            told.set("model.preset", PUBLISHED[model])
        else:
            told.unknown.append(f"the model {model}")


PRESETS = {"model.preset", "model.huggingface"}
"""Keys that name a whole model."""
INVERSE = {
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "add_bias_linear": "disable-bias-linear",
}
"""Settings of Megatron's core that are on where nothing is overrides, and the flags that put them off."""
MIXED = re.compile(r"(bf16|fp16|fp32|nemotron_h_bf16|w16a16)\w*")
"""Names of Megatron-Bridge's recipes of precision, and the functions that give them."""
SCALED = {"mxfp8": "mxfp8", "delayed": "delayed", "current": "tensorwise", "subchannel": "blockwise"}
"""Words of such names, and what --fp8-recipe says."""


def _mixed(settings: LiteralSettings) -> tuple[dict[str, Any], list[Argument]]:
    """Flags of the recipe of precision, bf16 where none is given; and of a recipe that nobody knows."""
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
    """Settings of a mapping as flags: True is a flag alone, null is none; tables within are gone through.
    False is none of a flag that is known, the flag against what is on where nothing is said, and a value that
    is not understood of any other name."""
    if not isinstance(values, Mapping):
        return
    for key, value in cast("Mapping[str, Any]", values).items():
        name = str(key).lstrip("-").replace("_", "-")
        if isinstance(value, Mapping):
            yield from arguments_of(value)
        elif value is True and key not in INVERSE:
            yield Argument(name, ())
        elif value is False:
            if key in INVERSE or not known_flag(name):
                yield Argument(INVERSE[key], ()) if key in INVERSE else Argument(name, ("false",))
        elif value is not None and value is not True:
            some: list[Any] = cast("list[Any]", value) if isinstance(value, list | tuple) else [value]
            yield Argument(name, () if name in SWITCHES and not isinstance(value, str) else tuple(map(str, some)))
