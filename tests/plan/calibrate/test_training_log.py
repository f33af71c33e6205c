"""Logs of Megatron-LM and torchtitan as timed runs."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.cluster.hardware import Cluster
from plait.formats.base.parsed_config import ParsedConfig
from plait.formats.base.step_log import StepLine, step_times
from plait.formats.megatron.log import arguments_of
from plait.plan.calibrate.recorded import predicted_seconds
from plait.plan.calibrate.training_log import (
    LoggedRun,
    describe_differences,
    framework_of_log,
    read_training_log,
    run_of_log,
)
from plait.plan.read_config import read_configuration
from tests.plan.training_logs import ARGUMENTS, SCATTER, arguments_block, iteration, megatron_log, torchtitan_log

CLUSTER = Cluster.preset("h100")
SCRIPT = """torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096
 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --ffn-hidden-size 14336 --swiglu
 --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 64 --bf16
 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --vocab-size 128256 --sequence-parallel
 --use-distributed-optimizer --disable-bias-linear --untie-embeddings-and-output-weights
"""


def _read(file: Path, framework: str = "megatron", beside: ParsedConfig | None = None) -> LoggedRun:
    return run_of_log(read_training_log(file, framework), beside, [], 256)


def _times(lines: list[StepLine], batch: int | None = None) -> tuple[float, dict[str, int]]:
    found = step_times(lines, batch, "a.log", IgnoredInput())
    return found.seconds, {why: count for why, count in found.left_out.items() if count}


def test_a_megatron_log_says_its_configuration_and_its_steps(tmp_path: Path) -> None:
    file = megatron_log(tmp_path / "a.log", 4.5)
    assert framework_of_log(file) == "megatron"
    log = read_training_log(file, "megatron")
    run = run_of_log(log, None, [], 256)
    assert run.seconds == pytest.approx(4.5, rel=2 * SCATTER)
    assert run.times.error < SCATTER
    assert {why: count for why, count in run.times.left_out.items() if count} == {"in warm-up": 3, "outliers": 1}
    point = run.point
    assert (point["tp"], point["pp"], point["dp"], point["micro"], point["num_micro"]) == (2, 2, 4, 1, 16)
    assert (point["sequence_parallel"], point["optim"], point["params"], point["recompute"]) == (1, 4, 1, 0)
    assert (run.model.num_layers, run.model.hidden, run.model.num_kv_heads, run.model.vocab) == (32, 4096, 8, 128256)
    assert run.job.train.precision == "bf16-mixed"
    assert not log.configuration or not log.configuration.unknown + log.configuration.unmodelled
    assert 1 < predicted_seconds(CLUSTER, [run.priced_step(CLUSTER.device)])[0] < 20


@pytest.mark.parametrize(
    ("changed", "flags"),
    [
        ({}, []),
        ({"gradient_accumulation_fusion": False}, ["--no-gradient-accumulation-fusion"]),
        ({"gradient_accumulation_fusion": True}, []),
        ({"masked_softmax_fusion": False}, ["--no-masked-softmax-fusion"]),
        ({"sequence_parallel": False}, ["--no-async-tensor-model-parallel-allreduce"]),
        ({"new_thing": True}, ["--new-thing"]),
        ({"multi_latent_attention": True}, ["--multi-latent-attention", "--kv-lora-rank 32"]),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
         ["--recompute-granularity selective", "--recompute-modules core_attn"]),
        ({"virtual_pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 8},
         ["--no-overlap-p2p-communication", "--num-virtual-stages-per-pipeline-rank 2"]),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_margin": 2}, ["--fp8 hybrid", "--fp8-margin 2",
                                                                         "--fp8-recipe tensorwise"]),
        ({"num_experts": 8}, ["--expert-tensor-parallel-size 2", "--moe-router-topk 2", "--num-experts 8"]),
        ({"add_bias_linear": True, "swiglu": False}, ["--no-bias-gelu-fusion"]),
    ],
)  # fmt: skip
def test_printed_arguments_are_the_flags_that_were_given(changed: dict[str, object], flags: list[str]) -> None:
    """Defaults that are printed name nothing; what is on and not understood is named."""

    def printed(values: dict[str, object]) -> set[str]:
        texts = {name: str(value) for name, value in values.items()}
        return {str(one) for one in arguments_of(texts, IgnoredInput())}

    assert printed(ARGUMENTS | changed) - printed(ARGUMENTS) == set(flags)


def test_numbers_that_are_not_understood_are_counted() -> None:
    over = IgnoredInput()
    assert [str(one) for one in arguments_of({"new_size": "7", "retro_size": "8", "lr": "0.1"}, over)] == []
    assert over.lines() == [
        "passed over 1 printed argument not understood, most of them defaults (the first: new_size = 7)"
    ]


def test_a_torchtitan_log_says_what_was_built(tmp_path: Path) -> None:
    config = json.dumps({
        "training": {"local_batch_size": 4, "mixed_precision_param": "bfloat16"}, "compile": {"enable": True},
        "parallelism": {"data_parallel_shard_degree": -1}, "model": {"name": "llama3", "flavor": "8B"},
    }, indent=2)  # fmt: skip
    file = torchtitan_log(tmp_path / "a.log", 1.4, more=f"Running with configs: {config}".split("\n"))
    assert framework_of_log(file) == "torchtitan"
    log = read_training_log(file, "torchtitan")
    assert log.device == "NVIDIA H100 80GB HBM3"
    assert "passed over 1 setting built otherwise than configured" in log.over.lines()[0]
    run = run_of_log(log, None, [], 256)
    assert run.seconds == pytest.approx(1.4, rel=3 * SCATTER)
    point = run.point
    assert (point["dp"], point["tp"], point["micro"], point["params"], point["recompute"]) == (8, 1, 1, 8, 2)
    assert run.model.num_parameters == pytest.approx(8.03e9, rel=0.001)
    assert _read(torchtitan_log(tmp_path / "b.log", 1.4), "torchtitan").point == point


def test_a_torchtitan_log_has_no_defaults(tmp_path: Path) -> None:
    text = torchtitan_log(tmp_path / "a.log", 1.4).read_text()
    (tmp_path / "b.log").write_text("\n".join(line for line in text.splitlines() if "Trainer is" not in line))
    with pytest.raises(JobError) as error:
        _read(tmp_path / "b.log", "torchtitan")
    assert error.value.key == "data.sequence_length"


def test_stages_are_those_that_a_torchtitan_log_says_were_built(tmp_path: Path) -> None:
    config = json.dumps({"parallelism": {"pipeline_parallel_layers_per_stage": 4}}, indent=2)
    more = [*f"Running with configs: {config}".split("\n"),
            "Using pipeline schedule Interleaved1F1B with 8 microbatches and 4 stages."]  # fmt: skip
    text = torchtitan_log(tmp_path / "a.log", 1.4, more=more).read_text()
    text = text.replace("pp=1, dp_replicate=1, dp_shard=8", "pp=2, dp_replicate=1, dp_shard=4")
    text = text.replace("batch size 1, global batch size 8", "batch size 8, global batch size 32")
    (tmp_path / "b.log").write_text(text)
    point = _read(tmp_path / "b.log", "torchtitan").point
    assert (point["pp"], point["virtual"]) == (2, 2)


def test_tensor_parallel_ranks_share_their_tokens(tmp_path: Path) -> None:
    run = _read(torchtitan_log(tmp_path / "a.log", 1.4, tp=2), "torchtitan")
    assert (run.seconds, run.point["tp"]) == (pytest.approx(1.4, rel=3 * SCATTER), 2)


@pytest.mark.parametrize(
    ("mesh", "degrees"),
    [
        ("Building 1-D device mesh with ['dp_shard'], [8]", (8, 1, 1)),
        ("Building 1-D device mesh with ['dp'], [8]", (8, 1, 1)),
        ("Building 2-D device mesh with ['dp_shard', 'tp'], [4, 2]", (4, 2, 1)),
        ("Building 2-D device mesh with ['pp', 'dp_shard'], [2, 4]", (4, 1, 2)),
        ("Building 2-D device mesh with ['dp_shard_mod_ep', 'dp_shard_in_ep'], [2, 4]", (8, 1, 1)),
    ],
)
def test_older_lines_of_torchtitan_say_the_same(tmp_path: Path, mesh: str, degrees: tuple[int, int, int]) -> None:
    text = torchtitan_log(tmp_path / "a.log", 1.4).read_text()
    new = "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1, ep=1"
    assert new in text
    old = text.replace(new, mesh).replace("Trainer is initialized with", "Training starts at step 1, with")
    (tmp_path / "b.log").write_text(old.replace("tps:", "wps:"))
    run = _read(tmp_path / "b.log", framework_of_log(tmp_path / "b.log"))
    assert (run.point["dp"], run.point["tp"], run.point["pp"]) == degrees
    assert run.seconds == pytest.approx(1.4, rel=3 * SCATTER), "of 8 ranks each"


def test_a_log_without_its_start_needs_a_configuration(tmp_path: Path) -> None:
    whole = megatron_log(tmp_path / "a.log", 4.5)
    bare = tmp_path / "b.log"
    bare.write_text("\n".join(line for line in whole.read_text().splitlines() if "iteration" in line))
    log = read_training_log(bare, "megatron")
    with pytest.raises(JobError, match=r"b\.log: does not say which configuration ran.*Give the log from its start"):
        run_of_log(log, None, [], 256)
    (tmp_path / "b.sh").write_text(SCRIPT.replace("\n ", " "))
    told = read_configuration(tmp_path / "b.sh")
    run = run_of_log(log, told, ["cluster.ranks=32"], 256)
    assert (run.point["tp"], run.point["dp"], run.folder) == (2, 8, str(bare))
    said = describe_differences(read_training_log(whole, "megatron"), told)
    assert len(said) == 1
    assert "model.rope_theta" not in said[0]
    assert "strategy.overlap is {'tp': 'async', 'shard': 'both'} in the log and" in said[0]


def test_lines_that_count() -> None:
    steady = [StepLine(step, 2.0, 8) for step in range(1, 11)]
    assert _times(steady) == (2.0, {"in warm-up": 3})
    assert _times([StepLine(step, 2.0) for step in range(10, 100, 10)]) == (2.0, {"in warm-up": 1})
    assert _times([StepLine(1, 9.0), *(StepLine(step, 2.0) for step in range(10, 100, 10))])[1] == {"in warm-up": 2}
    assert _times([StepLine(step, 2.0) for step in range(5010, 5100, 10)])[1] == {"in warm-up": 1}
    growing = [StepLine(step, 1.0, 4) for step in range(1, 5)] + [StepLine(step, 2.0, 8) for step in range(5, 15)]
    assert _times(growing, 8) == (2.0, {"of a growing batch": 4, "in warm-up": 3})
    again = [*steady, *(StepLine(step, 2.0, 8) for step in range(6, 12))]
    assert _times(again) == (2.0, {"in warm-up": 6})
    assert _times([*steady, StepLine(11, 3.0, 8), StepLine(12, 1.0, 8)]) == (2.0, {"in warm-up": 3, "outliers": 2})


def test_lines_of_further_ranks_are_counted() -> None:
    over = IgnoredInput()
    lines = [StepLine(step, 2.0 + rank / 10) for step in range(1, 9) for rank in (0, 1)]
    assert step_times(lines, None, "a.log", over).seconds == 2.0
    assert over.lines() == ["passed over 8 lines of a step that an earlier line has (the first: step 1)"]


def test_lines_of_two_runs_are_refused() -> None:
    lines = [StepLine(step, 2.0 + run) for step in range(1, 9) for run in (0, 1)]
    with pytest.raises(JobError, match="two times for a step, 50% apart: two runs are mixed"):
        step_times(lines, None, "a.log", IgnoredInput())


@pytest.mark.parametrize(
    ("lines", "precision", "again"),
    [
        (["Float8 training active with recipe rowwise"], "fp8", "none"),
        (["Swapped to Float8Linear layers with enable_fsdp_float8_all_gather=True"], "fp8", "none"),
        (["Float8 tensorwise scaled training active", "Applied MemoryBudgetAC activation checkpointing to the model"],
         "fp8", {"kind": "full", "layers": 16}),
        (["Swapped to MXFP8Linear layers"], "mxfp8", "none"),
        (["LoRA training active with rank=8"], "bf16-mixed", "none"),
    ],
)  # fmt: skip
def test_what_torchtitan_says_of_precision_and_recomputation_counts(
    tmp_path: Path, lines: list[str], precision: str, again: Any
) -> None:
    file = torchtitan_log(tmp_path / "a.log", 1.5)
    text = file.read_text().replace("Applied", "Did not apply")
    file.write_text("".join(f"[titan] {line}\n" for line in lines) + text)
    log = read_training_log(file, "torchtitan")
    assert (
        log.configuration
        and log.configuration.get("train.precision") == precision
        and log.configuration.get("strategy.recompute") == again
    )


def test_a_start_with_another_configuration_replaces_the_first(tmp_path: Path) -> None:
    first = megatron_log(tmp_path / "a.log", 9.0, micro_batch_size=2).read_text()
    second = megatron_log(tmp_path / "b.log", 4.5).read_text()
    (tmp_path / "c.log").write_text(first + second)
    log = read_training_log(tmp_path / "c.log", "megatron")
    assert run_of_log(log, None, [], 256).seconds == pytest.approx(4.5, rel=0.01)
    assert "40 lines of an earlier start with another configuration" in log.over.lines()[0]
    (tmp_path / "d.log").write_text(second + second)
    assert _read(tmp_path / "d.log").times.lines == 72


def test_packed_prefixed_and_forked_lines_are_read(tmp_path: Path) -> None:
    plain = megatron_log(tmp_path / "a.log", 4.5).read_text()
    forked = "\n".join(f"[default0]:{line}" for line in plain.replace(" | learning", "/5000.1 | learning").splitlines())
    (tmp_path / "b.log.gz").write_bytes(gzip.compress(forked.encode()))
    assert framework_of_log(tmp_path / "b.log.gz") == "megatron"
    (tmp_path / "c.log").write_text("\n".join(f"[pod/a-0] 12:00 INFO {line}" for line in plain.splitlines()))
    found, other, first = (_read(tmp_path / name) for name in ("b.log.gz", "c.log", "a.log"))
    assert (found.times, found.point) == (other.times, other.point) == (first.times, first.point)


def test_a_long_name_has_no_dots(tmp_path: Path) -> None:
    name = "check_weight_hash_across_dp_replicas_interval_of_all"
    log = read_training_log(megatron_log(tmp_path / "a.log", 4.5, **dict[str, Any]({name: 7})), "megatron")
    assert log.over.lines() == [
        f"passed over 1 printed argument not understood, most of them defaults (the first: {name} = 7)"
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\n".join(iteration(step, 1.0, 8) for step in range(1, 6)), "has 2 usable step lines .3 in warm-up."),
        (
            "\n".join(arguments_block(ARGUMENTS | {"padded_vocab_size": 128256})),
            "has 0 usable step lines .none left out.",
        ),
        ("\n".join(arguments_block(ARGUMENTS)[:30]), "has 0 usable"),
        (iteration(1, 1.0, 8).replace("1000.0", "1e30"), "step 1: 1e[+]27 s is not a valid step time"),
        (iteration(1, 1.0, 8).replace("1000.0", "1e+e"), "has 0 usable"),
        (iteration(1, 1.0, 8).replace("1000.0", "0.0"), "0 s is not a valid step time"),
    ],
)
def test_megatron_logs_that_tell_nothing_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a.log").write_text(text)
    (tmp_path / "a.sh").write_text(SCRIPT.replace("\n ", " ").replace("-size 64", "-size 8"))
    beside = read_configuration(tmp_path / "a.sh")
    with pytest.raises(JobError, match=says) as caught:
        _read(tmp_path / "a.log", beside=beside)
    assert "a.log" in str(caught.value)


def test_steps_of_torchtitan_alone_need_a_configuration(tmp_path: Path) -> None:
    text = torchtitan_log(tmp_path / "a.log", 1.5).read_text()
    (tmp_path / "b.log").write_text("\n".join(line for line in text.splitlines() if "step:" in line))
    with pytest.raises(JobError, match=r"b\.log: does not say which configuration ran"):
        _read(tmp_path / "b.log", "torchtitan")
    (tmp_path / "b.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'
        "[parallelism]\ndata_parallel_shard_degree = 8\n"
    )
    told = read_configuration(tmp_path / "b.toml")
    assert _read(tmp_path / "b.log", "torchtitan", told).seconds == pytest.approx(1.5, rel=3 * SCATTER)


@pytest.mark.parametrize("cut", [7, 1000, 5000])
def test_logs_that_are_cut_or_torn_never_crash(tmp_path: Path, cut: int) -> None:
    """What is left either says a run or is refused."""
    texts = {"megatron": megatron_log(tmp_path / "a.log", 4.5).read_bytes(),
             "torchtitan": torchtitan_log(tmp_path / "b.log", 1.0).read_bytes()}  # fmt: skip
    for framework, text in texts.items():
        for part in (text[:cut], text[cut:], text[::2], text[:cut] + b"\xff\x00" * cut + text[cut:]):
            (tmp_path / "c.log").write_bytes(part)
            with suppress(JobError):
                run = _read(tmp_path / "c.log", framework)
                assert 0.5 < run.seconds < 5
