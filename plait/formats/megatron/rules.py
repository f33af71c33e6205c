"""Megatron-LM's own rules on flags, as data: combinations refused at startup, with the source line;
and the text of a pipeline layout.

Line numbers are of commit d98e8a64 (22 August 2026). Only command lines go through ``arguments.py``
of ``megatron/training``; the other files are of ``megatron/core``, which recipes go through, too.
Checks that the reader makes while it reads are in ``read``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

Flags = Mapping[str, Sequence[str]]
"""Flags' values by name; a switch has none."""


@dataclass(frozen=True)
class Rule:
    """A rule. flag: the refused flag. problem, fix: the message. source: file and line in
    Megatron-LM. broken: True if a set of flags breaks the rule. older: earlier versions accept the
    flag, so that it only gets a note."""

    flag: str
    problem: str
    fix: str
    source: str
    broken: Callable[[Flags], bool]
    older: bool = False


def word(flags: Flags, name: str, default: str = "") -> str:
    """Return a flag's first value, or the default."""
    return (flags.get(name) or (default,))[0]


def degree(flags: Flags, name: str) -> int:
    """Return a parallel degree; 1 if the flag is missing or its value unknown."""
    text = word(flags, name)
    return int(text) if text.isdigit() else 1


def rounds(flags: Flags) -> bool:
    """Return True if a rank has, or may have, several pipeline stages (virtual stages)."""
    several = "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"
    return any(name in flags for name in (*several, "pipeline-model-parallel-layout"))


TP, PP, EP = (f"{axis}-model-parallel-size" for axis in ("tensor", "pipeline", "expert"))
CP = "context-parallel-size"
OVERLAP = "overlap-moe-expert-parallel-comm"
FULL = "recompute-granularity"
SHARDED = ("use-distributed-optimizer", "use-megatron-fsdp", "use-torch-fsdp2")


def needs(flag: str, alternatives: Collection[str], source: str) -> Rule:
    """Return the rule that ``flag`` needs at least one of ``alternatives``."""
    alternatives = tuple(alternatives)
    problem = f"is set without --{alternatives[0]}"
    return Rule(
        flag, problem, "Give both", source, lambda flags: flag in flags and not flags.keys() & set(alternatives)
    )


RULES: Sequence[Rule] = (
    needs("fp8-param-gather", SHARDED, "arguments.py:1095"),
    needs("optimizer-cpu-offload", ["use-precision-aware-optimizer"], "arguments.py:1884"),
    needs("use-precision-aware-optimizer", SHARDED, "optimizer/__init__.py:1057"),
    Rule(
        "optimizer-cpu-offload", "conflicts with --fp8-param-gather of another recipe than delayed",
        "Leave out one of the two, or use --fp8-recipe delayed", "arguments.py:1889",
        lambda flags: {"optimizer-cpu-offload", "fp8-param-gather"} <= flags.keys()
        and word(flags, "fp8-recipe", "delayed") != "delayed",
    ),
    Rule(
        "tp-comm-overlap", "is set without --sequence-parallel over several tensor-parallel ranks",
        "Give both, or leave it out", "arguments.py:1442",
        lambda flags: "tp-comm-overlap" in flags
        and ("sequence-parallel" not in flags or degree(flags, TP) == 1),
    ),
    Rule(
        "multi-latent-attention", "conflicts with --group-query-attention", "Keep one of the two", "arguments.py:1974",
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
        FULL, "full is set without --recompute-num-layers", "Say how many",
        "transformer/transformer_config.py:1919",
        lambda flags: word(flags, FULL) == "full" and word(flags, "recompute-method") in ("uniform", "block")
        and not {"recompute-num-layers", "recompute-activations"} & flags.keys(),
    ),
    Rule(
        "recompute-num-layers", "conflicts with selective recomputation", "Leave it out",
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
        OVERLAP, "is set without several stages on each pipeline rank",
        "Add --num-virtual-stages-per-pipeline-rank", "transformer/transformer_config.py:3006",
        lambda flags: OVERLAP in flags and degree(flags, PP) > 1 and not rounds(flags),
    ),
    Rule(
        OVERLAP, "is set without ranks that divide the experts", "Use --expert-model-parallel-size above 1",
        "transformer/transformer_config.py:3012",
        lambda flags: OVERLAP in flags and degree(flags, EP) == 1,
    ),
    Rule(
        OVERLAP, "conflicts with full recomputation", "Leave out one of the two",
        "transformer/transformer_config.py:3020",
        lambda flags: OVERLAP in flags and word(flags, FULL) == "full" and "recompute-activations" not in flags,
    ),
    Rule(
        "window-size", "conflicts with context parallelism in a ring", "Use --cp-comm-type a2a or all_gather",
        "attention of Transformer Engine",
        lambda flags: "window-size" in flags and degree(flags, CP) > 1
        and word(flags, "cp-comm-type", "p2p") in ("p2p", "a2a+p2p"),
    ),
)  # fmt: skip

RECIPE_RULES: Sequence[Rule] = [rule for rule in RULES if not rule.source.startswith("arguments.py")]
"""The rules that also hold for recipes."""


def broken(flags: Flags) -> dict[str, Rule]:
    """Return the broken rules by refused flag, the first rule of each flag."""
    return {rule.flag: rule for rule in reversed(RULES) if rule.broken(flags)}


LONGEST = 100_000
"""The longest layout in letters, with all repetitions written out."""


def layout(sizes: list[int]) -> str:
    """Return stages in the form of ``--pipeline-model-parallel-layout``: E is the embedding, t a
    layer, L the loss; a bar separates stages, and (...)*n repeats. sizes: layers of each stage.

    >>> layout([3, 4, 4, 2])
    'Et*3|(t*4|)*2t*2L'
    >>> layout([0, 1, 1, 0])
    'E|(t*1|)*2L'
    """
    first, *middle, last = sizes
    runs = [(size, len(list(same))) for size, same in groupby(middle)]
    inner = "".join(f"({_layers(size)}|)*{times}" for size, times in runs)
    return f"E{_layers(first)}|{inner}{_layers(last)}L"


def _layers(size: int) -> str:
    return f"t*{size}" if size else ""


def stages_of(text: str) -> list[int] | None:
    """Return the layers of each stage of a layout; None if the text is no layout.

    >>> stages_of("Et*3|(t*4|)*2t*2L"), stages_of("E|(t|)*2L"), stages_of("Et||L")
    ([3, 4, 4, 2], [0, 1, 1, 0], [1, 0, 0])
    """
    plain = text.strip("'\"").replace(" ", "").replace(",", "")
    for _ in range(20):
        opened = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * min(int(m[2]), 2000), plain)
        opened = re.sub(r"([EtmL])\*(\d+)", lambda m: m[1] * min(int(m[2]), 2000), opened)
        if opened == plain or len(opened) > LONGEST:
            break
        plain = opened
    if not re.fullmatch(r"[EtmL|]+", plain):
        return None
    return [stage.count("t") for stage in plain.split("|")]
