"""Flags of Megatron-LM that a script leaves to its run: named, and asked for by the key that says them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from plait.core.base.errors import JobError
from plait.plan.megatron_flags import (
    DEGREES,
    EXPERTS,
    MORE_SHAPES,
    SEVERAL,
    SHAPES,
    SWITCHES,
    VALUES,
    known_flag,
    takes_none,
)
from plait.plan.read_shell import EITHER, Argument, is_unknown, source_text
from plait.plan.shell_syntax import UNKNOWN
from plait.plan.told import Told

NUMBERS: Mapping[str, str] = {
    **DEGREES, **EXPERTS, **{flag: f"model.{key}" for flag, key in {**SHAPES, **MORE_SHAPES}.items()},
}  # fmt: skip
"""Flags whose value is that of a job's key."""
_PRECISION = ("bf16", "fp16", "fp8-format", "fp8", "fp8-recipe", "fp4-format", "fp4-recipe")
_SHARD = ("use-distributed-optimizer", "use-megatron-fsdp", "use-torch-fsdp2", "data-parallel-sharding-strategy",
          "num-distributed-optimizer-instances")  # fmt: skip
_RECOMPUTE = ("recompute-granularity", "recompute-method", "recompute-num-layers", "recompute-activations",
              "recompute-modules")  # fmt: skip
_VIRTUAL = ("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage",
            "pipeline-model-parallel-layout")  # fmt: skip
KEYS: Mapping[str, str] = {
    **NUMBERS, **dict.fromkeys(_PRECISION, "train.precision"), **dict.fromkeys(_SHARD, "strategy.shard"),
    **dict.fromkeys(_RECOMPUTE, "strategy.recompute"), **dict.fromkeys(_VIRTUAL, "strategy.virtual_stages"),
    "sequence-parallel": "strategy.sequence_parallel", "cp-comm-type": "strategy.cp_comm_type",
    "hierarchical-context-parallel-sizes": "strategy.cp_comm_type", "overlap-grad-reduce": "strategy.overlap",
    "overlap-param-gather": "strategy.overlap", "group-query-attention": "model.num_kv_heads",
    "make-vocab-size-divisible-by": "model.vocab", "untie-embeddings-and-output-weights": "model.tied_embeddings",
    "qk-layernorm": "model.qk_norm", "window-size": "model.window", "fp8-param-gather": "recipe.fp8_param_gather",
    "grad-reduce-in-bf16": "recipe.grad_reduce_in_bf16", "exp-avg-dtype": "recipe.exp_avg_dtype",
    "exp-avg-sq-dtype": "recipe.exp_avg_sq_dtype", "moe-token-dispatcher-type": "recipe.moe_token_dispatcher",
    "ds-sequence-parallel-size": "strategy.cp", "zero-stage": "strategy.shard",
    "optimizer-offload-fraction": "recipe.optimizer_offload_fraction",
}  # fmt: skip
"""Flags, and the keys of a job that say what they say."""
PRECISIONS: Mapping[str, Sequence[Argument]] = {
    "fp32": (), "bf16-mixed": (Argument("bf16", ()),),
    "fp8": (Argument("bf16", ()), Argument("fp8-format", ("hybrid",))),
    "mxfp8": (Argument("bf16", ()), Argument("fp8-format", ("hybrid",)), Argument("fp8-recipe", ("mxfp8",))),
    "nvfp4": (Argument("bf16", ()), Argument("fp4-format", ("e2m1",))),
}  # fmt: skip
"""The flags of a job's precision."""
NAMES = frozenset(["ckpt-format", "tokenizer-type", "vocab-file", "rope-type", "nproc-per-node", "nnodes"])
"""Flags without whose values the vocabulary and the ranks are asked for anyway."""
MINOR = frozenset(
    ["rampup-batch-size", "step-batch-size-schedule", "rotary-base", "rope-scaling-factor", "norm-epsilon",
     "attention-dropout"]
)  # fmt: skip
"""Flags that change neither degrees nor sizes nor precision."""
DEFAULTS: Mapping[str, tuple[Sequence[str], str]] = {
    **{key: ((flag,), "1") for flag, key in list(DEGREES.items())[:3]},
    **{key: ((flag,), "...") for flag, key in list(DEGREES.items())[3:]},
    "train.precision": (_PRECISION, "fp32"), "strategy.shard": (_SHARD, "ddp"),
    "strategy.recompute": (_RECOMPUTE, "none"), "model.preset": (("num-layers",), "..."),
}  # fmt: skip
"""Keys that flags nobody knows may say: by which flags, and what holds without these."""
_PLURAL = re.compile(r"[@*]|ARG|OPT|FLAG|PARAM|EXTRA", re.IGNORECASE)
"""Sources of a value that look like several words."""


def resolve(
    told: Told, given: Sequence[Argument], settings: Mapping[str, str], why: Mapping[str, str]
) -> list[Argument]:
    """Return arguments whose values are known. settings: keys of the command line, which say what a script
    does not; why: what decides a value. Raises JobError, naming words and keys, for what may change degrees,
    sizes or precision and is not said."""
    found, asked, words = list[Argument](), list[Argument](), list[Argument]()
    for one in given:
        values, behind = _split_values(one)
        words += [Argument(one.name, (word,), one.line) for word in behind if is_unknown(word)]
        told.unknown += [f"{word} (behind {one})" for word in behind if not is_unknown(word)]
        one = one._replace(values=values)
        if not one.name:
            continue
        if not any(map(is_unknown, values)) or one.name not in {*SWITCHES, *VALUES, *NUMBERS}:
            found.append(one)
        elif one.name in NAMES:
            found.append(one._replace(values=tuple(map(source_text, values))))
        elif one.name in MINOR:
            told.unknown.append(str(one))
        elif (key := KEYS.get(one.name, "")) in settings:
            found += _override(one, settings[key])
            if settings[key] == "auto":  # so that the file's own strategy has no prediction
                told.ask(key, str(one))
            told.notes.append(f"{one} is not known{_reason([one], why)}: {key} is the command's.")
        else:
            asked.append(one)
    if asked:
        raise _refusal(told, asked, why)
    precision = [one for one in given if one.name in _PRECISION and any(map(is_unknown, one.values))]
    if precision and (flags := PRECISIONS.get(settings.get("train.precision", ""))) is not None:
        found = [*(one for one in found if one.name not in _PRECISION), *flags]
    _check_words(told, words, {one.name for one in found}, settings, why)
    return found


def _split_values(one: Argument) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The values of a flag, and words that stand behind these."""
    if not one.name:
        return (), tuple(filter(is_unknown, one.values))
    if takes_none(one.name):
        either = one.values[:1] if source_text("".join(one.values[:1])) == EITHER or not one.line else ()
        return either, one.values[len(either) :]
    end = 1
    if one.name in SEVERAL or not known_flag(one.name):
        pairs = zip(one.values, one.values[1:], strict=False)
        end += next((at for at, pair in enumerate(pairs) if all(map(is_unknown, pair))), len(one.values))
    if not known_flag(one.name) and _PLURAL.search("".join(one.values[:1])):
        end = 0
    return one.values[:end], one.values[end:]


def _override(one: Argument, text: str) -> list[Argument]:
    """A flag as the command line says it; none where it says nothing, or leaves it to the planner."""
    if one.name in NUMBERS and text != "auto":
        return [one._replace(values=(text,))]
    return [one._replace(values=())] if one.name in SWITCHES and text == "true" else []


def _reason(some: Sequence[Argument], why: Mapping[str, str]) -> str:
    sources = [source for one in some for text in one.values for source in text.split(UNKNOWN)[1::2]]
    reasons = dict.fromkeys(why[source] for source in sources if source in why)
    return f" ({'; '.join(map(source_text, reasons))})" if reasons else ""


def _refusal(told: Told, asked: Sequence[Argument], why: Mapping[str, str]) -> JobError:
    keys = dict.fromkeys(KEYS.get(one.name, "") for one in asked)
    others = f", {', '.join(map(str, asked[1:]))}" if asked[1:] else ""
    text = " ".join(map(source_text, asked[0].values))
    problem = f"'{text}'{others}: nobody knows {'these' if others else 'it'} before a run{_reason(asked, why)}"
    fix = f"Set {'them' if others else 'it'} in the file"
    if "" not in keys:
        fix += f", or add {' '.join(f'{key}=...' for key in keys)} to the command"
    return told.refuse(f"{_line(asked[0])}--{asked[0].name}", problem, fix)


def _line(one: Argument) -> str:
    return f"line {one.line}: " if one.line else ""


def _check_words(
    told: Told, words: Sequence[Argument], flags: Collection[str], settings: Mapping[str, str], why: Mapping[str, str]
) -> None:
    """Raise JobError for words that may be flags, unless the command line says what these may say."""
    if not words:
        return
    texts = ", ".join(filter(None, dict.fromkeys(source_text(one.values[0]) for one in words)))
    asked = {
        key: otherwise for key, (names, otherwise) in DEFAULTS.items()
        if key not in settings and not any(name in flags for name in names)
        and not (key == "model.preset" and any(one.startswith("model.") for one in settings))
    }  # fmt: skip
    if asked:
        keys = " ".join(f"{key}={otherwise}" for key, otherwise in asked.items())
        problem = f"stands for flags that nobody knows before a run{_reason(words, why)}"
        fix = f"Write them into the file, or add to the command what they say; where they say none of these: {keys}"
        raise told.refuse(f"{_line(words[0])}{texts}", problem, fix)
    for key in DEFAULTS:
        if settings.get(key) == "auto":
            told.ask(key, texts)
    told.unknown.append(texts)
    told.notes.append(f"{texts}: flags that nobody knows before a run are not in the prediction{_reason(words, why)}.")
