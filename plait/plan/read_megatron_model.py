"""A model in Megatron-LM's flags: its shapes, its vocabulary and its experts. What lies between Plait's
families is counted as the nearest, and said."""

from __future__ import annotations

import re
from math import inf
from typing import Any

from plait.plan.megatron_flags import EXPERTS, FRACTIONS, LATENT, MORE_SHAPES, ROPE_ORIGINAL, SHAPES
from plait.plan.megatron_rules import Flags
from plait.plan.told import Told, number, whole_number

TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "Llama3Tokenizer": 128256}
"""Tokens of those that have one vocabulary alone."""
GROUPS = 1
"""Groups of queries where none are said (``TransformerConfig.num_query_groups``)."""


def whole_flag(told: Told, flags: Flags, name: str, default: int | None = None) -> int | None:
    """A flag's number. Raises JobError for one that is none."""
    return whole_number(told, f"--{name}", flags[name][0]) if name in flags else default


def read_model(told: Told, flags: Flags) -> None:
    """Shapes. A family has them all or nothing: what lies between is counted as the nearest."""
    if "num-layers" not in flags:
        return
    shapes: dict[str, Any] = {}
    for name, key in {**SHAPES, **MORE_SHAPES}.items():
        if name in flags:
            shapes[key] = _shape(told, name, flags[name][0])
    for name in ("hidden-size", "num-attention-heads"):
        if SHAPES[name] not in shapes:
            raise told.refuse(f"--{name}", "is missing", "Give every shape, or name a model in a job of your own")
    if "group-query-attention" in flags and "num_kv_heads" not in shapes:
        shapes["num_kv_heads"] = GROUPS
        told.notes.append(f"--group-query-attention without --num-query-groups has {GROUPS} group, its default.")
    if "group-query-attention" not in flags and shapes.pop("num_kv_heads", 1) not in (1, shapes["num_heads"]):
        told.notes.append("--num-query-groups counts beside --group-query-attention alone: all heads have keys.")
    gated = "swiglu" in flags
    rotary = _positions(told, flags) == "rope" or "multi-latent-attention" in flags
    grouped = shapes.get("num_kv_heads", shapes["num_heads"]) != shapes["num_heads"]
    hidden = shapes["hidden"]
    ffn = shapes.get("ffn_hidden") or (int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
    shapes["ffn_hidden"] = ffn
    shapes["family"] = "llama" if gated or rotary or grouped else "gpt"
    if shapes["family"] == "llama":
        _like_llama(told, flags, shapes, gated=gated)
    else:
        shapes.pop("rope_theta", None)
    shapes.setdefault("dropout", 0.1)
    if shapes.pop("attention_dropout", 0.1):
        told.notes.append("Dropout of attention weights is part of its fused kernel, and counted as free.")
    shapes["tied_embeddings"] = "untie-embeddings-and-output-weights" not in flags
    shapes.setdefault("max_sequence", told.get("data.sequence_length", 0))
    _vocabulary(told, flags, shapes)
    for key, value in shapes.items():
        told.set(f"model.{key}", value)


def _shape(told: Told, name: str, text: str) -> float:
    """A size, or a share. Raises JobError for a number that is none."""
    if name not in FRACTIONS:
        return positive(told, name, whole_number(told, f"--{name}", text))
    share = number(told, f"--{name}", text)
    if not 0 <= share < inf:
        problem = f"{text} is negative" if share < 0 else f"{text} is not finite"
        raise told.refuse(f"--{name}", problem, "Use at least 0")
    return share


def positive(told: Told, name: str, value: int) -> int:
    """The value of a flag. Raises JobError for one below 1."""
    if value < 1:
        raise told.refuse(f"--{name}", f"{value} is not positive", "Use at least 1")
    return value


def _positions(told: Told, flags: Flags) -> str:
    kind = flags.get("position-embedding-type", ("learned_absolute",))[0]
    if "use-rotary-position-embeddings" in flags:
        kind = "rope"
    if kind not in ("rope", "learned_absolute", "none"):
        told.notes.append(f"--position-embedding-type {kind} is counted as rotary.")
        kind = "rope"
    return kind


def _like_llama(told: Told, flags: Flags, shapes: dict[str, Any], *, gated: bool) -> None:
    """What of a model with rotary positions, a gate or shared keys is not as Llama's."""
    if not gated:
        ffn = shapes["ffn_hidden"]
        shapes["ffn_hidden"] = told.round_up("ffn_hidden", -(-2 * ffn // 3), 1)
        told.notes.append(
            f"An MLP of {ffn:,} without a gate is counted as a gated one of {shapes['ffn_hidden']:,}: as many "
            "parameters, FLOPs and kept bytes."
        )
    if flags.get("normalization", ("LayerNorm",))[0] != "RMSNorm":
        told.notes.append("LayerNorm is counted as RMSNorm.")
    if "disable-bias-linear" not in flags or "add-qkv-bias" in flags:
        told.notes.append("Biases are not counted.")
    if "use-rope-scaling" in flags:
        factor = number(told, "--rope-scaling-factor", flags.get("rope-scaling-factor", ("8.0",))[0])
        shapes["rope_scaling"] = {"factor": factor, **ROPE_ORIGINAL}
    if "multi-latent-attention" in flags:
        _latent(told, flags, shapes)
    elif "qk-layernorm" in flags:
        shapes["qk_norm"] = True
    if "window-size" in flags:
        _window(told, flags, shapes)


def _latent(told: Told, flags: Flags, shapes: dict[str, Any]) -> None:
    """Latent attention, whose heads have one size for values and for what of queries has no position."""
    sizes = {name: whole_flag(told, flags, name, default) or 0 for name, (_, default) in LATENT.items()}
    if not sizes["q-lora-rank"]:
        told.unmodelled.append("--multi-latent-attention without --q-lora-rank (counted as heads of their own)")
        return
    if sizes["qk-head-dim"] != sizes["v-head-dim"]:
        told.unmodelled.append(f"--qk-head-dim {sizes['qk-head-dim']} (counted as {sizes['v-head-dim']})")
    shapes |= {LATENT[name][0]: size for name, size in sizes.items()}
    shapes["num_kv_heads"] = shapes["num_heads"]


def _window(told: Told, flags: Flags, shapes: dict[str, Any]) -> None:
    shapes["window"] = whole_number(told, "--window-size", flags["window-size"][0].strip("(").partition(",")[0]) + 1
    some = "".join(flags.get("window-attn-skip-freq", ("",)))
    if some.isdigit():
        shapes["full_every"] = int(some)
    elif re.fullmatch(r"\[0(,0)*(,1)*\]", some):
        shapes["full_first"] = some.count("0")
    elif some:
        told.unmodelled.append(f"--window-attn-skip-freq {some}")


def _vocabulary(told: Told, flags: Flags, shapes: dict[str, Any]) -> None:
    """As many as the tokenizer has, padded to a multiple."""
    kind, file = flags.get("tokenizer-type", ("",))[0], flags.get("vocab-file", ("",))[0]
    known = "GPT2BPETokenizer" if "gpt2" in file or (file and not kind) else kind
    if "vocab" not in shapes and known in TOKENIZERS:
        shapes["vocab"] = TOKENIZERS[known]
        told.notes.append(f"The vocabulary is that of {known}, {TOKENIZERS[known]:,} tokens, padded.")
    if "vocab" not in shapes or "padded-vocab-size" in flags:
        return
    each = whole_flag(told, flags, "make-vocab-size-divisible-by", 128) or 1
    shapes["vocab"] = told.round_up("vocab", shapes["vocab"], each)


def read_experts(told: Told, flags: Flags) -> None:
    """Routed experts, which layers have them, and which ranks share them out. A recipe may leave the experts
    to a model that is named elsewhere."""
    if "num-experts" not in flags:
        name = "expert-model-parallel-size"
        ep = positive(told, name, whole_flag(told, flags, name, 1) or 0)
        if ep > 1 and "num-layers" in flags:
            raise told.refuse(f"--{name}", f"{ep} stands without --num-experts", "Give both")
        if ep > 1:
            told.set(EXPERTS[name], ep)
        return
    for name, key in EXPERTS.items():
        if (value := whole_flag(told, flags, name)) is not None:
            told.set(key, value)
    if told.get("model.experts.per_token") is None:
        told.set("model.experts.per_token", 2)
    if (shared := whole_flag(told, flags, "moe-shared-expert-intermediate-size")) is not None:
        told.set("model.experts.shared", 1)
        told.set("model.experts.shared_ffn_hidden", shared)
    some = "".join(flags.get("moe-layer-freq", ("1",))).replace(" ", "")
    if some.isdigit():
        told.set("model.experts.every", int(some))
    elif match := re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", some):
        told.set("model.experts.first_dense", int(match[1]))
    else:
        told.unmodelled.append(f"--moe-layer-freq {some}")
    if "moe-expert-capacity-factor" in flags:
        key = "--moe-expert-capacity-factor"
        told.set("model.experts.capacity", number(told, key, flags[key.removeprefix("--")][0]))
    _experts_travel(told, flags)


def _experts_travel(told: Told, flags: Flags) -> None:
    """How tokens reach their experts, and whether tensor parallelism cuts these."""
    width, tp = whole_flag(told, flags, "expert-tensor-parallel-size"), told.get("strategy.tp", 1)
    if width == 1 and tp > 1:
        told.set("recipe.expert_tensor_parallel_size", 1)
    elif width not in (None, tp):
        told.unmodelled.append(f"--expert-tensor-parallel-size {width} (counted as {tp})")
    kind = flags.get("moe-token-dispatcher-type", ("allgather",))[0]
    if "moe-enable-deepep" in flags or kind == "flex":
        told.set("recipe.moe_token_dispatcher", "deepep")
    elif kind == "allgather":
        told.notes.append("Tokens that are gathered (--moe-token-dispatcher-type allgather) are counted as exchanged.")
    if "overlap-moe-expert-parallel-comm" in flags:
        told.set("recipe.overlap_moe_expert_parallel_comm", True)
