"""Run folders as training leaves them, without training: a plan, and checkpoints of random
weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from plait.core.cluster.hardware import HERE
from plait.core.job.spec import Job
from plait.core.parallel.strategy import Strategy
from plait.plan.make import make_plan
from plait.train.checkpoint.checkpoints import Checkpoints
from plait.train.checkpoint.whole import master_dtype
from plait.train.data.tokenizer import load_tokenizer
from plait.train.model.transformer import Transformer

LLAMA: dict[str, Any] = {
    "family": "llama",
    "num_layers": 1,
    "hidden": 16,
    "num_heads": 4,
    "ffn_hidden": 24,
    "max_sequence": 32,
}
GPT: dict[str, Any] = {"family": "gpt", "num_layers": 1, "hidden": 16, "num_heads": 4, "max_sequence": 32}


def write_run(
    folder: Path,
    model: dict[str, Any],
    *,
    tokenizer: str = "bytes",
    precision: str = "fp32",
    steps: tuple[int, ...],
    init_from: str | None = None,
) -> dict[int, Transformer]:
    """A run with a checkpoint after each of ``steps``; the models that they hold. init_from: what
    its job names."""
    job = Job.from_dict(
        {
            "model": model,
            "data": {"tokenizer": tokenizer, "sequence_length": 8},
            "train": {"precision": precision, "warmup_steps": 1, "init_from": init_from},
        }
    )
    plan = make_plan(job, HERE, vocab=load_tokenizer(tokenizer).vocab)
    plan.write(folder / "plan.json")
    models: dict[int, Transformer] = {}
    for step in steps:
        models[step] = whole = Transformer(plan.model, Strategy(), dtype=master_dtype(plan))
        generator = torch.Generator().manual_seed(step)
        for parameter in whole.named.values():
            random = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.data.add_(random.to(parameter.dtype))
        held = {store.key: store.held("optim") for store in whole.units.values()}
        weights = {"master": {store.key: store.kept for store in whole.units.values()}}
        Checkpoints(folder / "checkpoints", held, keep=len(steps)).save(step, weights, {}, wait=True)
    return models
