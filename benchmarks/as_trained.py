"""Runs as they were trained and published, predicted with the time and the memory of the framework that ran
them: does each fit into its device, and how far off is its step.

    python benchmarks/as_trained.py [--json]

Llama 3 405B: arXiv 2407.21783, table 4 (430, 400 and 380 TFLOPs a GPU; seconds with the causal half of
attention's scores and with all) and section 3.3.2. Nemotron-4 340B: arXiv 2406.11704, table 2. 175B and 530B:
the Megatron-LM baseline of MegaScale (arXiv 2402.15627, tables 2 and 3), whose kind of GPU its utilisation
implies; micro-batches of one sequence are an assumption. It overlapped none of data parallelism's
communication (table 3: MegaScale gains by doing so), Llama and Nemotron did.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.plan.answer import Planner
from plait.plan.search.candidate import Candidate

GIB = 2**30
TRAINED: dict[str, Any] = {
    "tp": 8,
    "schedule": "interleaved",
    "shard": "zero1",
    "overlap": "async",
    "sequence_parallel": True,
}
LLAMA = {"pp": 16, "virtual_stages": 8}
"""A layer a stage, the first and the last without."""
NEMOTRON = {
    "family": "llama", "num_layers": 96, "hidden": 18432, "num_heads": 96, "num_kv_heads": 8, "ffn_hidden": 49152,
    "vocab": 256000, "max_sequence": 4096,
}  # fmt: skip
"""Its MLP has 73,728 numbers and no gate: as many parameters, FLOPs and kept bytes as 49,152 with one."""
LLAMA_VOCAB = 128256
BASELINE = {"tp": "async", "shard": "none"}
GPT3 = {"preset": "gpt3-175b", "vocab": 64000}
LARGE = {"family": "gpt", "num_layers": 105, "hidden": 20480, "num_heads": 128, "vocab": 64000, "max_sequence": 2048}


@dataclass(frozen=True, kw_only=True)
class Run:
    """seconds: of a step, as published; tflops: of a GPU, where these are published instead."""

    name: str
    cluster: str
    framework: str
    model: Mapping[str, Any]
    sequence: int
    batch: int
    strategy: Mapping[str, Any]
    seconds: float = 0.0
    tflops: float = 0.0

    @cached_property
    def planner(self) -> Planner:
        """Of the job as it was trained."""
        values = {
            "model": dict(self.model),
            "data": {"sequence_length": self.sequence},
            "train": {"global_batch_size": self.batch, "micro_batch_size": 1, "precision": "bf16-mixed"},
            "cluster": {"preset": self.cluster},
            "plan": {"framework": self.framework},
            "strategy": TRAINED | dict(self.strategy),
        }
        one = Job.from_dict(values)
        vocab = self.model.get("vocab", LLAMA_VOCAB)
        return Planner(one, Cluster.preset(self.cluster), vocab)

    @cached_property
    def predicted(self) -> Candidate:
        """What is predicted of it."""
        return self.planner.predict(self.planner.job)

    @property
    def published(self) -> tuple[float, float]:
        """Seconds, at least and at most."""
        if self.seconds:
            return self.seconds, self.seconds
        rate = self.tflops * 1e12 * self.planner.job.world_size
        model, of = self.planner.model, (self.sequence, self.batch)
        return model.causal_step_flops(*of) / rate, model.step_flops(*of) / rate

    @property
    def differences(self) -> tuple[float, float]:
        """Of what is predicted, relative to both."""
        low, high = self.published
        return self.predicted.seconds / high - 1, self.predicted.seconds / low - 1

    def row(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        memory = self.predicted.memory
        return {
            "run": self.name, "gpus": self.planner.job.world_size, "framework": self.framework,
            "published_s": [round(one, 2) for one in self.published], "predicted_s": round(self.predicted.seconds, 2),
            "difference": [round(one, 3) for one in self.differences],
            "p10_p90_s": [round(self.predicted.low, 2), round(self.predicted.high, 2)], "fits": memory.fits,
            "gib": round(self.predicted.most_memory / GIB, 1), "usable_gib": round(memory.usable / GIB, 1),
        }  # fmt: skip


def runs() -> Iterator[Run]:
    """All of them."""
    llama: dict[str, Any] = {"cluster": "h100", "framework": "llama3", "model": {"preset": "llama3-405b"}}
    long = LLAMA | {"dp": 8, "cp": 16, "cp_comm_type": "ring"}
    for tokens, batch, strategy, tflops in (
        (8192, 2048, LLAMA | {"dp": 64}, 430), (8192, 2048, LLAMA | {"dp": 128}, 400), (131072, 128, long, 380)
    ):  # fmt: skip
        yield Run(
            name=f"Llama 3 405B, {tokens:,} tokens",
            sequence=tokens,
            batch=batch,
            strategy=strategy,
            tflops=tflops,
            **llama,
        )
    megatron: dict[str, Any] = {"framework": "megatron"}
    for replicas, batch, seconds in ((16, 768, 10.3), (32, 1536, 10.3), (64, 2304, 8.0)):
        degrees = {"pp": 12, "virtual_stages": 8, "dp": replicas}
        yield Run(
            name="Nemotron-4 340B", cluster="h100", model=NEMOTRON, sequence=4096, batch=batch, strategy=degrees,
            seconds=seconds, **megatron,
        )  # fmt: skip
    shared = megatron | {"cluster": "a100-80", "sequence": 2048}
    for gpus, batch, seconds in (
        (256, 768, 40.0), (512, 768, 21.2), (768, 768, 15.2), (1024, 768, 11.9), (3072, 6144, 29.02),
        (6144, 6144, 14.78), (8192, 6144, 12.24), (12288, 6144, 8.57),
    ):  # fmt: skip
        degrees = {"pp": 8, "virtual_stages": 6, "dp": gpus // 64, "overlap": BASELINE}
        yield Run(name="175B", model=GPT3, batch=batch, strategy=degrees, seconds=seconds, **shared)
    for gpus, seconds in ((2240, 43.1), (4480, 43.5), (11200, 44.0)):
        degrees = {"pp": 35, "virtual_stages": 3, "dp": gpus // 280, "overlap": BASELINE}
        yield Run(name="530B", model=LARGE, batch=gpus, strategy=degrees, seconds=seconds, **shared)


def main() -> None:
    """Print a line for each, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    rows = [one.row() for one in runs()]
    if parser.parse_args().json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        low, high = (f"{one:+.1%}" for one in row["difference"])
        told = low if low == high else f"{low} to {high}"
        print(
            f"{row['run']:30s} {row['gpus']:6,d} GPUs  {row['published_s'][0]:g}-{row['published_s'][1]:g} s  "
            f"{row['predicted_s']:g} s ({told})  {row['gib']:g} of {row['usable_gib']:g} GiB  fits: {row['fits']}"
        )


if __name__ == "__main__":
    main()
