"""Megatron-LM's own rules on its flags, as data: what it refuses at its start, and where that is written.

Lines are those of commit d98e8a64 (22 August 2026). Command lines alone go through ``arguments.py`` of
``megatron/training``; the other files are of ``megatron/core``, which recipes go through, too. What a reader
checks while it reads (``read_megatron``) is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Flags = Mapping[str, Sequence[str]]
"""By name; a switch has no values."""


class Rule(NamedTuple):
    """A flag that is refused, why, what to do, where Megatron-LM says so, and of which flags. older: versions
    before take it, so that it is remarked on alone."""

    flag: str
    problem: str
    fix: str
    source: str
    broken: Callable[[Flags], bool]
    older: bool = False


def word(flags: Flags, name: str, default: str = "") -> str:
    """A flag's value."""
    return (flags.get(name) or (default,))[0]


def degree(flags: Flags, name: str) -> int:
    """Ranks along an axis; 1 where the script leaves it open, too."""
    text = word(flags, name)
    return int(text) if text.isdigit() else 1


def rounds(flags: Flags) -> bool:
    """Whether a rank has several stages of a pipeline, or may have."""
    several = "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"
    return any(name in flags for name in (*several, "pipeline-model-parallel-layout"))


TP, PP, EP = (f"{axis}-model-parallel-size" for axis in ("tensor", "pipeline", "expert"))
CP = "context-parallel-size"
OVERLAP = "overlap-moe-expert-parallel-comm"
FULL = "recompute-granularity"
SHARDED = {"use-distributed-optimizer", "use-megatron-fsdp", "use-torch-fsdp2"}
RULES: Sequence[Rule] = (
    Rule(
        "fp8-param-gather", "stands without --use-distributed-optimizer", "Give both", "arguments.py:1095",
        lambda flags: "fp8-param-gather" in flags and not SHARDED & flags.keys(),
    ),
    Rule(
        "optimizer-cpu-offload", "stands without --use-precision-aware-optimizer", "Give both", "arguments.py:1884",
        lambda flags: "optimizer-cpu-offload" in flags and "use-precision-aware-optimizer" not in flags,
    ),
    Rule(
        "optimizer-cpu-offload", "stands beside --fp8-param-gather of another recipe than delayed",
        "Leave out one of the two, or use --fp8-recipe delayed", "arguments.py:1889",
        lambda flags: {"optimizer-cpu-offload", "fp8-param-gather"} <= flags.keys()
        and word(flags, "fp8-recipe", "delayed") != "delayed",
    ),
    Rule(
        "use-precision-aware-optimizer", "stands without --use-distributed-optimizer", "Give both",
        "optimizer/__init__.py:1057",
        lambda flags: "use-precision-aware-optimizer" in flags and not SHARDED & flags.keys(),
    ),
    Rule(
        "tp-comm-overlap", "stands without --sequence-parallel over several tensor-parallel ranks",
        "Give both, or leave it out", "arguments.py:1442",
        lambda flags: "tp-comm-overlap" in flags
        and ("sequence-parallel" not in flags or degree(flags, TP) == 1),
    ),
    Rule(
        "multi-latent-attention", "stands beside --group-query-attention", "Keep one of the two", "arguments.py:1974",
        lambda flags: {"multi-latent-attention", "group-query-attention"} <= flags.keys(),
    ),
    Rule(
        "cross-entropy-fusion-impl", "te is refused since it was not stable", "Use native", "arguments.py:1697",
        lambda flags: "cross-entropy-loss-fusion" in flags and word(flags, "cross-entropy-fusion-impl") == "te",
        older=True,
    ),
    Rule(
        "fp8-format", "is neither e4m3 nor hybrid", "Use one of these", "transformer/transformer_config.py:587",
        lambda flags: word(flags, "fp8-format", "hybrid") not in ("e4m3", "hybrid"),
    ),
    Rule(
        FULL, "full stands without --recompute-num-layers", "Say how many",
        "transformer/transformer_config.py:1919",
        lambda flags: word(flags, FULL) == "full" and word(flags, "recompute-method") in ("uniform", "block")
        and not {"recompute-num-layers", "recompute-activations"} & flags.keys(),
    ),
    Rule(
        "recompute-num-layers", "stands beside selective recomputation", "Leave it out",
        "transformer/transformer_config.py:1926",
        lambda flags: "recompute-num-layers" in flags
        and (word(flags, FULL) == "selective" or "recompute-activations" in flags),
    ),
    Rule(
        "num-experts", "of several tensor-parallel ranks stand without --sequence-parallel", "Add it",
        "transformer/moe/moe_layer.py:636",
        lambda flags: "num-experts" in flags and degree(flags, TP) > 1 and "sequence-parallel" not in flags,
    ),
    Rule(
        OVERLAP, "stands without several stages a rank of its pipeline",
        "Add --num-virtual-stages-per-pipeline-rank", "transformer/transformer_config.py:3006",
        lambda flags: OVERLAP in flags and degree(flags, PP) > 1 and not rounds(flags),
    ),
    Rule(
        OVERLAP, "stands without ranks that share experts out", "Use --expert-model-parallel-size above 1",
        "transformer/transformer_config.py:3012",
        lambda flags: OVERLAP in flags and degree(flags, EP) == 1,
    ),
    Rule(
        OVERLAP, "stands beside full recomputation", "Leave out one of the two",
        "transformer/transformer_config.py:3020",
        lambda flags: OVERLAP in flags and word(flags, FULL) == "full" and "recompute-activations" not in flags,
    ),
    Rule(
        "window-size", "stands beside context parallelism in a ring", "Use --cp-comm-type a2a or all_gather",
        "attention of Transformer Engine",
        lambda flags: "window-size" in flags and degree(flags, CP) > 1
        and word(flags, "cp-comm-type", "p2p") in ("p2p", "a2a+p2p"),
    ),
)  # fmt: skip

OF_RECIPES: Sequence[Rule] = [rule for rule in RULES if not rule.source.startswith("arguments.py")]
"""To which recipes are held, too."""


def broken(flags: Flags) -> dict[str, Rule]:
    """Rules that flags do not keep, the first of each flag that is refused."""
    return {rule.flag: rule for rule in reversed(RULES) if rule.broken(flags)}
