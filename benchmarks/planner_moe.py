"""Published measurements of mixture-of-experts models, as rows that the planner's models take.

Such rows name a model and a layout and little else: shapes are the preset's, layers the row's where it
gives them (proxies have fewer); of recomputation they say nothing, and none is taken. Nothing is fitted to
these rows, and they are in no total of dense ones. What cannot be described is skipped, with a reason:
models and devices without a description. Experts are whole where they can
only be shared out over tensor-parallel ranks too. Megatron-Bridge sends tokens of Qwen3 by HybridEP on
Blackwell since 26.06 (scripts/performance/configs/qwen, commit 05c0c90); of older releases no file was read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from planner_measurements import read_measurement
from planner_row import Bad, Row, Rows, Skipped, whole
from planner_rows import header, in_line, read_lines

from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.model.experts import check_expert_parallel
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.shapes import Shapes

MODELS = (
    (r"grok-?1", "grok-1"), (r"qwen3[_-]30b", "qwen3-30b-a3b"), (r"qwen3[_-]235b", "qwen3-235b-a22b"),
    (r"deepseek-?v3", "deepseek-v3"), (r"mixtral_8x7b", "mixtral-8x7b"), (r"mixtral_8x22b", "mixtral-8x22b"),
)  # fmt: skip
"""Names in measurements, to presets."""
ONCE_SINCE = "26.06"
"""Releases of Megatron-Bridge whose recipes send a token once to a rank."""


def read_moe(files: Iterable[Path]) -> Rows:
    """All rows of such models that can be predicted. Each source has ``-moe`` in its name."""
    rows: list[Row] = []
    skipped: Counter[str] = Counter()
    for file in files:
        if "arch_type" not in header(file):
            continue
        for number, values in enumerate(read_lines(file), start=2):
            if "moe" not in values["arch_type"]:
                continue
            try:
                rows.append(_moe(values, file.stem))
            except Skipped as reason:
                skipped[str(reason)] += 1
            except Bad as bad:
                raise in_line(bad, number, file) from None
    return Rows(rows, skipped)


def _moe(values: Mapping[str, str], stem: str) -> Row:
    model = _model(values.get("model", ""))
    layers, ranks = whole(values, "layers"), whole(values, "num_gpus")
    tp, pp, cp, ep = (whole(values, name) or 1 for name in ("tp", "pp", "cp", "ep"))
    if not ranks:
        raise Skipped("experts: no num_gpus")
    replicas = ranks // (tp * pp)
    if replicas < cp:
        raise Skipped("degrees do not multiply to the GPUs")
    try:
        model = replace(model, num_layers=layers) if layers else model
        if model.experts and "tokendrop" in values["model"]:
            model = replace(model, experts=replace(model.experts, capacity=1.0))
        cut = replicas % ep == 0
        check_expert_parallel(model, ep, replicas * (1 if cut else tp))
    except JobError as error:
        if error.key == "model.experts.first_dense":
            raise Skipped("experts: in none of the layers") from None
        raise Skipped("experts: degrees that do not divide them") from None
    told = {
        "arch_type": "dense", "layers": model.num_layers, "hidden": model.hidden, "heads": model.num_heads,
        "kv_heads": model.num_kv_heads, "ffn": model.ffn_hidden, "gated_mlp": 1, "vocab": model.vocab,
        "dp": replicas // cp, "sp": int(tp > 1), "micro_batch": values["micro_batch"] or 1,
        "recompute": values["recompute"] or "none",
    }  # fmt: skip
    row = read_measurement({**values, **{name: str(value) for name, value in told.items()}}, stem)
    point = replace(row.point, ep=np.array([ep]))
    once = (
        values["source_id"] == "megatron-bridge-perf"
        and re.match("G?B", values["gpu"]) is not None
        and values["date"] >= ONCE_SINCE
    )
    options = replace(row.options, experts_whole=not cut, dispatch_once=once)
    return replace(row, source=f"{row.source}-moe", shapes=Shapes.of(model), point=point, full=False, options=options)


@cache
def _model(name: str) -> ModelSpec:
    for pattern, preset in MODELS:
        if re.match(pattern, name, re.IGNORECASE):
            return ModelSpec.preset(preset, specs_folder() / "models")
    raise Skipped(f"experts: {name.split(' ')[0] or 'a model without a name'} is not described")
