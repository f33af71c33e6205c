"""A plan in a sentence, of every kind of strategy."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from plait.api.training import describe_run
from plait.core.cluster.hardware import Hosts
from plait.core.job.plan import Choices, Plan
from plait.core.job.spec import Job
from plait.plan.make import make_plan
from plait.plan.search.fits import AvailableMemory

JOB = """
[model]
family = "gpt"
num_layers = 4
hidden = 64
num_heads = 4
max_sequence = 64
[data]
text = "python-stdlib"
sequence_length = 64
[train]
steps = 1500
global_batch_size = 16
micro_batch_size = 0
[strategy]
"""


def plan_of(tmp_path: Path, *settings: str) -> Plan:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    return make_plan(Job.read(file, settings).named("job"), Hosts(), vocab=257)


def said(plan: Plan, there: AvailableMemory | None = None) -> str:
    return describe_run(plan, there)


def test_all_that_was_asked_for_is_there(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "strategy.tp=2", "strategy.slices.batch=4", "strategy.slices.columns=2")
    found = said(plan, AvailableMemory(shared=3 << 30))
    assert found.startswith(f"gpt of 4 layers, hidden 64: {plan.model.num_parameters:,} parameters (fp32) on 2 ranks ")
    assert "(tp 2, slices 4 x 2); 1,500 steps of 1,024 tokens (16 sequences of 64); tensors take " in found
    assert found.endswith(" MiB a rank (predicted, 3 GiB free for all)")
    assert said(plan, AvailableMemory(each=2 << 30)).endswith(" a rank (predicted of 2 GiB)")
    assert said(plan).endswith(" a rank (predicted)")


def test_while_slices_are_not_chosen_memory_is_between_two_figures(tmp_path: Path) -> None:
    found = said(plan_of(tmp_path, "strategy.tp=2", "strategy.slices=auto"))
    least, most = re.search(r"tensors take ([\d.]+) MiB to ([\d.]+) MiB a rank", found).groups()  # type: ignore[union-attr]
    chosen = said(plan_of(tmp_path, "strategy.tp=2", "strategy.slices.batch=1", "strategy.slices.columns=1"))
    [known] = re.findall(r"tensors take ([\d.]+) MiB a rank", chosen)
    assert float(least) <= float(known) <= float(most)
    assert float(least) < float(most)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("strategy.tp=1",), "on 1 rank; 1,500 steps of 1,024 tokens (16 sequences of 64);"),
        (("strategy.tp=2", "strategy.overlap=sync", "strategy.sequence_parallel=true"),
         "on 2 ranks (tp 2, overlap sync, sequence parallel);"),
        (("strategy.tp=1", "strategy.pp=2", "train.micro_batch_size=4", "strategy.schedule=gpipe",
          "strategy.recompute=full"),
         "on 2 ranks (pp 2, gpipe, full recomputation); 1,500 steps of 1,024 tokens (16 sequences of 64 in 4 "
         "micro-batches);"),
        (("strategy.tp=1", "strategy.dp=2", "strategy.shard=zero2"),
         "on 2 ranks (dp 2, sharded gradients over 2, optimizer over 2);"),
        (("strategy.tp=[2,1]", "strategy.pp=2", "strategy.dp=[1,2]", "train.micro_batch_size=2",
          "strategy.slices.batch=1"),
         "on 4 ranks (tp 2/1, dp 1/2, pp 2, slices 1 x 1, "),
        (("strategy.tp=1", "strategy.cp=2", "strategy.slices.batch=1"), "on 2 ranks (cp 2, slices 1 x 1);"),
    ],
)  # fmt: skip
def test_every_kind_of_strategy(tmp_path: Path, settings: tuple[str, ...], words: str) -> None:
    assert words in said(plan_of(tmp_path, *settings))


def test_what_is_timed_before_training_is_not_said_to_be_known(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "strategy.tp=2")
    several = tuple(replace(plan.strategy, p1=p1) for p1 in (1, 2))
    assert "(tp 2, slices chosen before training)" in said(replace(plan, choices=Choices(strategies=several)))
