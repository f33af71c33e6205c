"""Reader and writer of a model in Megatron-LM's flags: shapes, vocabulary and experts. A model
between Plait's families is counted as the nearest family, with a note."""

from __future__ import annotations

import re
from typing import Any

from plait.core.model.spec import ROPE_THETA
from plait.formats.base.parsed_config import ParsedConfig, whole_number
from plait.formats.base.rows import Settings, WriterContext
from plait.formats.megatron.flags import LATENT, LLAMA, ROPE_ORIGINAL

TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "Llama3Tokenizer": 128256}
"""Vocabulary sizes of tokenizers with one fixed vocabulary."""
GROUPS = 1
"""Default number of query groups (``TransformerConfig.num_query_groups``)."""


def read_model(parsed: ParsedConfig, flags: Settings) -> None:
    """Set the model's shapes that no row sets. A model with features of two families is counted as
    the nearest family. Raises JobError for missing shapes."""
    shapes = parsed.values.pop("model")
    if "experts" in shapes:
        parsed.set("model.experts", shapes["experts"])
    if "num-layers" not in flags:
        return
    for name in ("hidden-size", "num-attention-heads"):
        if name not in flags:
            raise parsed.refuse(f"--{name}", "is missing", "Give every shape, or name a model in a job of your own")
    hidden, heads, latent = shapes["hidden"], shapes["num_heads"], "multi-latent-attention" in flags
    if "kv-channels" in flags:
        shapes["head_size"] = flags["kv-channels"]
    groups = _groups(parsed, flags, heads)
    if groups:
        shapes["num_kv_heads"] = groups
    gated = "swiglu" in flags
    shapes.setdefault("ffn_hidden", int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
    rotary = _positions(parsed, flags) == "rope" or latent
    shapes["family"] = "llama" if gated or rotary or (groups or heads) != heads else "gpt"
    if shapes["family"] == "gpt" or latent:
        del shapes["qk_norm"], shapes["qkv_bias"]
    if shapes["family"] == "llama":
        _like_llama(parsed, flags, shapes)
    if shapes.pop("attention_dropout"):
        parsed.notes.append("Dropout of attention weights is part of its fused kernel, and counted as free.")
    shapes.setdefault("max_sequence", parsed.get("data.sequence_length", 0))
    _vocabulary(parsed, flags, shapes)
    for key, value in shapes.items():
        parsed.set(f"model.{key}", value)


def _groups(parsed: ParsedConfig, flags: Settings, heads: int) -> int:
    """Return the number of query groups; 0 if there is no such flag."""
    groups = flags["num-query-groups"] or 0
    if "group-query-attention" in flags and not groups:
        parsed.notes.append(f"--group-query-attention without --num-query-groups has {GROUPS} group, its default.")
        return GROUPS
    if "group-query-attention" not in flags and groups:
        if groups not in (1, heads):
            parsed.notes.append("--num-query-groups counts beside --group-query-attention alone: all heads have keys.")
        return 0
    return groups


def _positions(parsed: ParsedConfig, flags: Settings) -> str:
    kind = "rope" if "use-rotary-position-embeddings" in flags else flags["position-embedding-type"]
    if kind not in ("rope", "learned_absolute", "none"):
        parsed.notes.append(f"--position-embedding-type {kind} is counted as rotary.")
        return "rope"
    return kind


def _like_llama(parsed: ParsedConfig, flags: Settings, shapes: dict[str, Any]) -> None:
    """Set and note how a model of the llama family differs from Llama."""
    if "rotary-base" in flags:
        shapes["rope_theta"] = flags["rotary-base"]
    if "swiglu" not in flags:
        ffn = shapes["ffn_hidden"]
        shapes["ffn_hidden"] = parsed.round_up("ffn_hidden", -(-2 * ffn // 3), 1)
        parsed.notes.append(
            f"An MLP of {ffn:,} without a gate is counted as a gated one of {shapes['ffn_hidden']:,}: as many "
            "parameters, FLOPs and kept bytes."
        )
    if flags["normalization"] != "RMSNorm":
        parsed.notes.append("LayerNorm is counted as RMSNorm.")
    if "disable-bias-linear" not in flags:
        parsed.notes.append("Biases are not counted, but for those of --add-qkv-bias.")
    if "use-rope-scaling" in flags:
        shapes["rope_scaling"] = {"factor": flags["rope-scaling-factor"], **ROPE_ORIGINAL}
    if "multi-latent-attention" in flags:
        _latent(parsed, flags, shapes)
    if "window-size" in flags:
        _window(parsed, flags, shapes)


def _latent(parsed: ParsedConfig, flags: Settings, shapes: dict[str, Any]) -> None:
    """Set multi-latent attention; values and the queries' part without position share one head
    size."""
    if not flags["q-lora-rank"]:
        parsed.unmodelled.append("--multi-latent-attention without --q-lora-rank (counted as heads of their own)")
        return
    if flags["qk-head-dim"] != flags["v-head-dim"]:
        parsed.unmodelled.append(f"--qk-head-dim {flags['qk-head-dim']} (counted as {flags['v-head-dim']})")
    shapes |= {key: flags[name] for name, key in LATENT.items()} | {"num_kv_heads": shapes["num_heads"]}


def _window(parsed: ParsedConfig, flags: Settings, shapes: dict[str, Any]) -> None:
    size = flags["window-size"][0].strip("(").partition(",")[0]
    shapes["window"] = whole_number(parsed, "--window-size", size) + 1
    some = "".join(flags["window-attn-skip-freq"])
    if some.isdigit():
        shapes["full_every"] = int(some)
    elif re.fullmatch(r"\[0(,0)*(,1)*\]", some):
        shapes["full_first"] = some.count("0")
    elif some:
        parsed.unmodelled.append(f"--window-attn-skip-freq {some}")


def _vocabulary(parsed: ParsedConfig, flags: Settings, shapes: dict[str, Any]) -> None:
    """Set the vocabulary: the tokenizer's size, padded to a multiple."""
    if "padded-vocab-size" in flags:
        shapes["vocab"] = flags["padded-vocab-size"]
        return
    kind, file = flags["tokenizer-type"], flags["vocab-file"]
    known = "GPT2BPETokenizer" if "gpt2" in file or (file and not kind) else kind
    size = flags["vocab-size"]
    if not size and (size := TOKENIZERS.get(known)):
        parsed.notes.append(f"The vocabulary is that of {known}, {size:,} tokens, padded.")
    if size:
        shapes["vocab"] = parsed.round_up("vocab", size, flags["make-vocab-size-divisible-by"] or 1)


def read_experts(parsed: ParsedConfig, flags: Settings) -> None:
    """Set routed experts, their layers and the token dispatcher, beyond the values set by rows. A
    recipe may leave the experts to a model that is named elsewhere. Raises JobError for expert
    parallelism without experts."""
    if "num-experts" not in flags:
        name = "expert-model-parallel-size"
        parsed.values.get("model", {}).pop("experts", None)
        parsed.values["recipe"].pop("overlap_moe_expert_parallel_comm")
        if (flags[name] or 1) > 1 and "num-layers" in flags:
            raise parsed.refuse(f"--{name}", f"{flags[name]} is set without --num-experts", "Give both")
        return
    if "moe-router-topk" not in flags:
        parsed.set("model.experts.per_token", 2)
    if (shared := flags["moe-shared-expert-intermediate-size"]) is not None:
        parsed.set("model.experts.shared", 1)
        parsed.set("model.experts.shared_ffn_hidden", shared)
    some = "".join(flags["moe-layer-freq"]).replace(" ", "")
    if some.isdigit():
        parsed.set("model.experts.every", int(some))
    elif match := re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", some):
        parsed.set("model.experts.first_dense", int(match[1]))
    else:
        parsed.unmodelled.append(f"--moe-layer-freq {some}")
    width, tp = flags["expert-tensor-parallel-size"], parsed.get("strategy.tp", 1)
    if width == 1 and tp > 1:
        parsed.set("strategy.etp", 1)
    elif width not in (None, tp):
        parsed.unmodelled.append(f"--expert-tensor-parallel-size {width} (counted as {tp})")
    kind = flags["moe-token-dispatcher-type"]
    if "moe-enable-deepep" in flags or kind == "flex":
        parsed.set("recipe.moe_token_dispatcher", "deepep")
    elif kind == "allgather":
        parsed.notes.append(
            "Tokens that are gathered (--moe-token-dispatcher-type allgather) are counted as exchanged."
        )


def write_model(words: WriterContext) -> dict[str, Any]:
    """Return the flags of the model's shapes that no row writes."""
    model, found = words.model, dict[str, Any]()
    if model.kv_lora_rank:
        found |= {"multi-latent-attention": True} | {flag: getattr(model, name) for flag, name in LATENT.items()}
        found |= {} if model.rope_scaling else {"rope-type": "rope"}
    elif model.head_size * model.num_heads != model.hidden:
        found["kv-channels"] = model.head_size
    if model.num_kv_heads != model.num_heads:
        found |= {"group-query-attention": True, "num-query-groups": model.num_kv_heads}
    if model.family == "llama":
        found |= dict(LLAMA) | _write_rotation(words)
    if model.window:
        found["window-size"] = f"{model.window - 1},0"
    if model.window and model.full_first:
        within = [int(bool(model.window_at(layer))) for layer in range(model.num_layers)]
        found["window-attn-skip-freq"] = str(within).replace(" ", "")
    elif model.window and model.full_every:
        found["window-attn-skip-freq"] = model.full_every
    words.note_unsupported("the vocabulary (it is its tokenizer's, padded by make-vocab-size-divisible-by)")
    return found


def _write_rotation(words: WriterContext) -> dict[str, Any]:
    model, found = words.model, dict[str, Any]()
    if model.rope_theta != ROPE_THETA:
        found["rotary-base"] = round(model.rope_theta)
    if model.rope_scaling:
        found |= {"use-rope-scaling": True, "rope-scaling-factor": model.rope_scaling.factor}
        other = {name: getattr(model.rope_scaling, name) for name in ROPE_ORIGINAL}
        if other != ROPE_ORIGINAL:
            words.note_unsupported(f"model.rope_scaling beyond its factor ({other}; it takes {ROPE_ORIGINAL})")
    return found


def write_experts(words: WriterContext) -> dict[str, Any]:
    """Return the flags of routed experts and their token dispatcher that no row writes."""
    experts, recipe = words.model.experts, words.job.recipe
    if experts is None:
        return {}
    found: dict[str, Any] = {"moe-grouped-gemm": True, "moe-token-dispatcher-type": "alltoall"}
    if experts.shared:
        found["moe-shared-expert-intermediate-size"] = experts.shared_width
    if experts.first_dense:
        dense, sparse = experts.first_dense, words.model.num_layers - experts.first_dense
        found["moe-layer-freq"] = f"([0]*{dense}+[1]*{sparse})"
    elif experts.every > 1:
        found["moe-layer-freq"] = experts.every
    if recipe.moe_token_dispatcher == "deepep":
        found |= {"moe-token-dispatcher-type": "flex", "moe-flex-dispatcher-backend": "deepep"}
    if words.job.strategy.etp:
        found["expert-tensor-parallel-size"] = 1
    return found
