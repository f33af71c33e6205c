"""What torchtitan takes where its configurations say nothing, keeps in memory, and cuts into stages."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from plait.core.base.errors import JobError
from plait.plan.told import Told
from plait.plan.torchtitan_stages import given_stages
from tests.plan.told_files import point, told

MODEL = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\n{}\n[parallelism]\n{}\n{}'
BASE = """
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b as base
def planned():
    config = base()
    config.model_spec = model_registry("8B")
    {}
    return config
"""
OWN = """
from torchtitan.models.llama3 import model_registry
def planned():
    return Trainer.Config(model_spec=model_registry("8B"), {})
"""


def toml(folder: Path, training: str = "", parallelism: str = "", more: str = "") -> Told:
    return told(folder, "titan.toml", MODEL.format(training, parallelism, more))


def module(folder: Path, settings: str, text: str = OWN) -> Told:
    return told(folder, "mine.py", text.format(settings))


PIPED = "pipeline_parallel_degree = 4\npipeline_parallel_schedule = '{}'\n"
EACH = "pipeline_parallel_layers_per_stage = {}\n"
NONE_LESS = "pipeline_parallel_first_stage_less_layers = 0\npipeline_parallel_last_stage_less_layers = 0\n"


@pytest.mark.parametrize(
    ("schedule", "more", "virtual", "sizes"),
    [
        ("Interleaved1F1B", "", 2, [4, 5, 4, 4, 4, 4, 4, 3]),
        ("Interleaved1F1B", EACH.format(3), 3, [2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 2, 1]),
        ("Interleaved1F1B", EACH.format(4) + NONE_LESS, 2, [4] * 8),
        ("1F1B", "", 1, [8, 9, 8, 7]),
        ("1F1B", EACH.format(9), 1, [8, 9, 8, 7]),
    ],
)
def test_embedding_and_head_count_among_the_layers_of_stages(
    tmp_path: Path, schedule: str, more: str, virtual: int, sizes: list[int]
) -> None:
    one = toml(tmp_path, "local_batch_size = 12\nseq_len = 2048", PIPED.format(schedule) + more)
    assert point(one, "cluster.ranks=8")["virtual"] == virtual and one.runs
    assert [stage.num_layers for stage in one.runs.options.stages(32, len(sizes))] == sizes
    uneven = [note for note in one.notes if "predicted with equal ones" in note]
    assert bool(uneven) == (min(sizes) < max(sizes))


@pytest.mark.parametrize(
    ("schedule", "more", "problem"),
    [
        ("Interleaved1F1B", EACH.format(4), "are 9 stages of 4, no multiple of 4 ranks"),
        ("Interleaved1F1B", EACH.format(9), "1 a rank where the schedule has 2 or more"),
        ("1F1B", EACH.format(3), "3 a rank where the schedule has 1"),
        ("ZBVZeroBubble", EACH.format(3), "3 a rank where the schedule has 2"),
        ("1F1B", "pipeline_parallel_last_stage_less_layers = 12", "12 is more than the 11 layers of a stage"),
    ],
)
def test_stages_that_torchtitan_refuses_are(tmp_path: Path, schedule: str, more: str, problem: str) -> None:
    with pytest.raises(JobError, match=problem):
        toml(tmp_path, "", PIPED.format(schedule) + more)


def test_parts_of_a_file_are_its_stages(tmp_path: Path) -> None:
    ends = [0, 7, 15, 23, 25, 27, 28, 30, 32]
    parts: list[list[str]] = [[f"layers.{layer}" for layer in range(*cut)] for cut in pairwise(ends)]
    one = toml(tmp_path, "", PIPED.format("Interleaved1F1B") + f"module_fqns_per_model_part = {parts}")
    assert one.get("strategy.virtual_stages") == 2 and "ends_count" not in one.options
    assert given_stages({"first": ends}) == [7, 8, 8, 2, 2, 1, 2, 2] and given_stages({"first": ["a"]}) == []
    one = module(tmp_path, "parallelism=ParallelismConfig(pipeline_parallel_degree=4, "
                           "module_fqns_per_model_part=[[f'layers.{i}'] for i in N])")  # fmt: skip
    assert "module_fqns_per_model_part" in " ".join(one.unknown)


def test_what_is_gathered_in_every_forward_of_a_pipeline_is_named(tmp_path: Path) -> None:
    always = 'fsdp_reshard_after_forward = "always"\n'
    assert toml(tmp_path, "", always).unmodelled == []
    piped = toml(tmp_path, "", always + PIPED.format("1F1B"))
    assert piped.unmodelled == ["parallelism.fsdp_reshard_after_forward = always"]
