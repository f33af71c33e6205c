"""Published measurements as inputs: what a row becomes, and one clear error for each wrong file."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import planner_moe
import planner_rows
import pytest
from planner_measurements import COLUMNS, node_gigabits
from planner_row import Row
from planner_vtrain import VTRAIN_COLUMNS

from plait.core.base.errors import JobError
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, SHARD_OVERLAPS

ROW = dict.fromkeys(COLUMNS, "") | {
    "row_id": "a-1", "source_id": "a", "completeness": "full", "arch_type": "dense", "task": "pretrain", "layers": "40",
    "hidden": "5120", "heads": "40", "ffn": "13824", "gated_mlp": "1", "vocab": "128000", "seq_len": "2048",
    "gpu": "A100-80GB", "num_gpus": "64", "gpus_per_node": "8", "tp": "2", "pp": "2", "dp": "16", "micro_batch": "2",
    "global_batch": "2048", "recompute": "none", "precision": "bf16", "attention": "flash_attention2", "outcome": "ok",
    "iter_time_s": "30.5", "zero_stage": "1", "date": "2023-10",
}  # fmt: skip
VTRAIN = dict(zip(VTRAIN_COLUMNS, ["8", "32", "4", "2048", "16", "24", "1024", "2", "2", "2", "410.5"], strict=True))


def write(folder: Path, *rows: dict[str, str], drop: tuple[str, ...] = ()) -> Path:
    file = folder / "rows.csv"
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, [name for name in rows[0] if name not in drop], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return file


def read(folder: Path, **changed: str) -> Row:
    (row,) = planner_rows.read_rows([write(folder, ROW | changed)]).rows
    return row


def test_a_row_becomes_shapes_a_point_and_a_cluster(tmp_path: Path) -> None:
    row = read(tmp_path)
    point = row.point.row(0)
    assert (row.device, row.sequence, row.precision, row.seconds, row.oom) == (
        "a100-80",
        2048,
        "bf16-mixed",
        30.5,
        False,
    )
    assert (row.shapes.num_layers, row.shapes.ffn_hidden, row.shapes.gated) == (40, 13824, 1)
    assert {key: point[key] for key in ("tp", "pp", "dp", "micro", "num_micro", "optim", "params")} == {
        "tp": 2, "pp": 2, "dp": 16, "micro": 2, "num_micro": 64, "optim": 16, "params": 1,
    }  # fmt: skip
    assert point["schedule"] == SCHEDULES.index("1f1b")
    assert row.options.fused_attention


def test_what_columns_say_is_used(tmp_path: Path) -> None:
    row = read(tmp_path, vpp="4", recompute="full(every layer)", comm_overlap="TP+P2P+grad+param overlap", sp="1",
               attention="unfused (fused softmax)", precision="fp8-hybrid", gpu="H100-80GB")  # fmt: skip
    point = row.point.row(0)
    assert point["schedule"] == SCHEDULES.index("interleaved")
    assert point["virtual"] == 4
    assert point["recompute"] == RECOMPUTES.index("full")
    assert point["overlap"] == OVERLAPS.index("domino")
    assert point["shard_overlap"] == SHARD_OVERLAPS.index("both")
    assert point["sequence_parallel"] == 1
    assert row.options.transfers_hidden
    assert not row.options.fused_attention
    assert (row.precision, row.device) == ("fp8", "h100")


def test_an_overlap_that_is_off_is_off(tmp_path: Path) -> None:
    row = read(tmp_path, comm_overlap="grad+param overlap; TP and P2P overlap off in yaml")
    assert row.point.row(0)["overlap"] == OVERLAPS.index("async")
    assert row.point.row(0)["shard_overlap"] == SHARD_OVERLAPS.index("both")
    assert not row.options.transfers_hidden


@pytest.mark.parametrize(
    "told, gigabits",
    [("4x100 Gb RoCE per node", 400), ("1600 Gbps/node RoCE", 1600), ("400 Gb/s RDMA per GPU", 3200),
     ("8x200 Gbps HDR InfiniBand per node (Selene)", 1600), ("4x Omni-Path per node (Jean Zay)", 400),
     ("RoCE RDMA", 0)],
)  # fmt: skip
def test_the_network_that_a_row_names(told: str, gigabits: float) -> None:
    assert node_gigabits(told, 8) == gigabits


def test_a_vtrain_row(tmp_path: Path) -> None:
    (row,) = planner_rows.read_rows([write(tmp_path, VTRAIN)]).rows
    assert (row.seconds, row.point.row(0)["num_micro"], row.shapes.num_layers) == (0.4105, 4, 24)


@pytest.mark.parametrize(
    "changed, reason",
    [({"recompute": ""}, "no recompute"), ({"tp": ""}, "no tp"), ({"arch_type": "moe"}, "no dense transformer"),
     ({"task": "lora"}, "not pre-training of all weights"), ({"gpu": "TPU v5p"}, "TPU v5p is not described"),
     ({"precision": "int8"}, "precision is 'int8'"), ({"iter_time_s": ""}, "neither time nor memory"),
     ({"dp": "8"}, "degrees do not multiply to the GPUs"), ({"layers": "1.5"}, "layers is a fraction"),
     ({"outcome": "crashed"}, "outcome is 'crashed'"), ({"layers": "1"}, "more places than layers"),
     ({"heads": "48"}, "heads do not divide hidden"), ({"kv_heads": "7"}, "kv_heads do not divide heads"),
     ({"vpp": "9"}, "virtual stages do not divide layers"), ({"zero_stage": "7"}, "zero_stage is '7'")],
)  # fmt: skip
def test_a_row_that_says_too_little_is_skipped_and_counted(
    tmp_path: Path, changed: dict[str, str], reason: str
) -> None:
    read = planner_rows.read_rows([write(tmp_path, ROW, ROW | changed)])
    assert len(read.rows) == 1
    assert read.skipped == {reason: 1}


@pytest.mark.parametrize(
    "column, value, problem",
    [("iter_time_s", "-3", "not a positive number"), ("iter_time_s", "nan", "not a positive number"),
     ("layers", "many", "'many' is not a number"), ("hidden", "inf", "not a positive number"),
     ("num_gpus", "0", "not a positive number"), ("layers", "1e300", "1e300 is out of range"),
     ("micro_batch", "9" * 400, "not a positive number"), ("peak_mem", "lots", "line 3"), ("peak_mem", "-3", "line 3")],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_line(tmp_path: Path, column: str, value: str, problem: str) -> None:
    with pytest.raises(JobError, match=problem) as caught:
        planner_rows.read_rows([write(tmp_path, ROW, ROW | {"peak_mem_unit": "GB(as printed)", column: value})])
    assert "line 3" in str(caught.value)
    assert column in str(caught.value)


def test_rows_of_experts_are_read_as_carefully(tmp_path: Path) -> None:
    expert = {"model": "Mixtral_8x7B"} | ROW | {"arch_type": "moe", "ep": "8", "num_gpus": "64", "tp": "1", "pp": "1"}
    (row,) = planner_moe.read_moe([write(tmp_path, expert | {"layers": "16.0"})]).rows
    assert row.shapes.num_layers == 16
    for changed in ({"tp": "1000000"}, {"layers": "0.5"}):
        assert planner_moe.read_moe([write(tmp_path, expert | changed)]).skipped.total() == 1
    for column in ("layers", "seq_len"):
        with pytest.raises(JobError, match="line 2: 'many' is not a number") as caught:
            planner_moe.read_moe([write(tmp_path, expert | {column: "many"})])
        assert caught.value.key == column


def test_missing_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="has no column recompute, precision"):
        planner_rows.read_rows([write(tmp_path, ROW, drop=("recompute", "precision"))])
    with pytest.raises(JobError, match="has no column"):
        planner_rows.read_rows([write(tmp_path, {"model": "7B", "step": "1"})])


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    for content in (b"\xff\xfe\x00binary", b""):
        file.write_bytes(content)
        with pytest.raises(JobError):
            planner_rows.read_rows([file])
    with pytest.raises(JobError, match="cannot be read"):
        planner_rows.read_rows([tmp_path / "none.csv"])
    write(tmp_path, ROW)
    file.write_text(file.read_text() + "1,2,3\n")
    with pytest.raises(JobError, match="not as many columns"):
        planner_rows.read_rows([file])


def accuracy(*args: str) -> subprocess.CompletedProcess[str]:
    root = Path(planner_rows.__file__).parents[1]
    return subprocess.run(
        [sys.executable, str(root / "benchmarks" / "planner_accuracy.py"), *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


@pytest.mark.system
def test_the_accuracy_benchmark_prints_groups_in_which_the_planner_errs_by_rule(tmp_path: Path) -> None:
    """Of pipelines of torchtitan that print no micro-batch, too, which no other figure has."""
    wide = {"gpu": "A100-80GB", "num_gpus": "256", "dp": "256", "tp": "1", "pp": "1", "cp": "1", "global_batch": "1024"}
    silent = {"source_id": "torchtitan", "micro_batch": "", "num_gpus": "8", "dp": "1", "cp": "4", "tp": "2", "pp": "1"}
    medians: list[float] = []
    for tiers in ("sum", "slowest"):
        ran = accuracy("--json", "--tiers", tiers, "--rows", str(write(tmp_path, ROW, ROW | wide, ROW | silent)))
        assert ran.returncode == 0, ran.stderr
        line = json.loads(ran.stdout.splitlines()[-1])
        assert [group["rows"] for group in line["groups"].values()] == [1, 1]
        assert line["overall"]["rows"] == 2 and line["tiers"] == tiers
        assert all(f"{group['median']:.1%}".replace("%", " %") in ran.stdout for group in line["groups"].values())
        medians.append(next(iter(line["groups"].values()))["median"])
    assert medians[1] < medians[0]
