"""What cannot fit is refused before anything starts, in no time whatever the sizes, with what would fit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.core.errors import InfeasiblePlan, JobError, PlaitError
from plait.core.job import Job
from plait.plan.estimate import PlannedStep, estimate
from plait.plan.fits import Room, check_fits, check_size, least_bytes, room

GIB = 1 << 30
LIMIT = 20.0
SMALL = {"family": "gpt", "num_layers": 2, "hidden": 64, "num_heads": 4, "max_sequence": 128}


def job(model: dict[str, Any], **sections: dict[str, Any]) -> Job:
    return Job.from_dict({"model": model, **sections})


def refused(asked: Job, there: Room | None) -> PlaitError:
    """The error of a job that must not start, and that it comes at once."""
    start = time.process_time()
    with pytest.raises(PlaitError) as caught:
        check_all(asked, there)
    assert time.process_time() - start < LIMIT
    return caught.value


def check_all(asked: Job, there: Room | None) -> None:
    """As ``plait train`` does."""
    check_size(asked, 257, there)
    found = estimate(PlannedStep.of(asked, 257, gpu=bool(there and there.each)))
    if there:
        check_fits(asked, found, 257, there)


def test_gpt3_175b_on_24_gib() -> None:
    asked = job({"preset": "gpt3-175b"}, data={"sequence_length": 2048}, strategy={"tp": 2})
    error = refused(asked, Room(shared=24 * GIB))
    assert isinstance(error, InfeasiblePlan)
    assert error.exit_status == 2
    for word in ("1.973 TiB", "optimizer 648", "activations 724", "24 GiB", "all 2 ranks", "Use a smaller model"):
        assert word in str(error)


@pytest.mark.parametrize(("model", "sections"), [
    ({"num_layers": 10**8}, {}),
    ({"num_layers": 10**12}, {}),
    ({"hidden": 10**9}, {}),
    ({"vocab": 10**12}, {}),
    ({"max_sequence": 10**12}, {}),
    ({"ffn_hidden": 10**12}, {}),
    ({"max_sequence": 10**11}, {"data": {"sequence_length": 10**11}}),
    ({}, {"train": {"global_batch_size": 10**12}}),
    ({}, {"train": {"global_batch_size": 10**9, "micro_batch_size": 1}}),
    ({}, {"train": {"global_batch_size": 10**7, "micro_batch_size": 1}, "strategy": {"pp": 2}}),
    ({}, {"train": {"global_batch_size": 10**9}, "strategy": {"dp": 10**9}}),
    ({}, {"train": {"global_batch_size": 10**6}, "strategy": {"p1": 10**6}}),
], ids=str)  # fmt: skip
def test_absurd_sizes_are_refused_at_once(model: dict[str, Any], sections: dict[str, Any]) -> None:
    start = time.process_time()
    with pytest.raises(PlaitError):
        check_all(job(SMALL | model, **sections), Room(shared=24 * GIB))
    assert time.process_time() - start < LIMIT


@pytest.mark.parametrize(("model", "sections", "says"), [
    ({}, {"strategy": {"pp": 10**9}}, "2 layers leave one of 1000000000 stages"),
    ({"num_layers": 10**9}, {"strategy": {"pp": 10**8}}, "stages are more than"),
    ({"num_layers": 10**9}, {"strategy": {"virtual_stages": 10**8}}, "stages are more than"),
    ({"num_heads": 10**9, "hidden": 10**9}, {"strategy": {"tp": 3}}, "does not divide num_heads"),
    ({"family": "utransformer", "levels": 10**9, "num_layers": 2 * 10**9 + 1}, {}, "cannot be halved"),
], ids=str)  # fmt: skip
def test_absurd_jobs_are_not_even_read(model: dict[str, Any], sections: dict[str, Any], says: str) -> None:
    start = time.process_time()
    with pytest.raises(JobError, match=says):
        job(SMALL | model, **sections)
    assert time.process_time() - start < LIMIT


def test_where_memory_is_not_known_lengths_are_limited() -> None:
    assert "10000" in str(refused(job(SMALL | {"num_layers": 10**8}), None))
    many = {"global_batch_size": 10**7, "micro_batch_size": 1}
    assert "micro-batches" in str(refused(job(SMALL, train=many, strategy={"pp": 2}), None))


def test_a_hugging_face_config_of_a_billion_layers(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 10**9, "n_embd": 64, "n_head": 4, "vocab_size": 300, "n_positions": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = refused(job({"huggingface": str(tmp_path)}), Room(shared=24 * GIB))
    assert "at least" in str(error)


def test_the_bound_is_below_the_estimate() -> None:
    for strategy in ({}, {"tp": 2}, {"pp": 2, "schedule": "1f1b"}, {"dp": 2, "shard": "fsdp"}):
        asked = job(SMALL, strategy=strategy | {"recompute": "full"})
        assert least_bytes(asked, 257) < estimate(PlannedStep.of(asked, 257)).bytes


GPUS = Room(each=80 * GIB, what="each of 8 GPUs")


@pytest.mark.parametrize(("there", "sections", "says"), [
    (GPUS, {"strategy": {"dp": 8}}, "would fit with strategy.shard=zero1"),
    (GPUS, {"strategy": {"dp": 4, "shard": "zero1"}}, "would fit with strategy.shard=fsdp"),
    (GPUS, {"train": {"global_batch_size": 64}, "strategy": {"tp": 4, "recompute": "full"}}, "train.micro_batch_size="),
    (GPUS, {}, "strategy.tp=2"),
    (Room(shared=16 * GIB), {}, "or more machines"),
], ids=str)  # fmt: skip
def test_it_says_what_would_fit(there: Room, sections: dict[str, Any], says: str) -> None:
    base = {"train": {"global_batch_size": 8}, "data": {"sequence_length": 2048}}
    asked = job({"preset": "gpt3-6.7b"}, **(base | sections))
    error = refused(asked, there)
    assert "optimizer" in str(error)
    assert says in str(error)
    if "would fit" in str(error):
        changes = dict(pair.split("=") for pair in str(error).split("would fit with ")[1].rstrip(".").split())
        again = asked.to_dict()
        for key, value in changes.items():
            section, name = key.split(".")
            again[section][name] = int(value) if value.isdigit() else value
        assert there.holds(estimate(PlannedStep.of(Job.from_dict(again), 257, gpu=bool(there.each))))


def test_what_fits_is_let_through() -> None:
    asked = job(SMALL)
    check_all(asked, Room(shared=GIB))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A machine without GPUs, of 24 GiB, with the control groups' files given."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def made(own: str = "", **files: str) -> Path:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {24 << 20} kB\n")
        (tmp_path / "proc/self/cgroup").write_text(own)
        for name, text in files.items():
            file = (
                tmp_path / "sys/fs/cgroup" / name.replace("__", "/").replace("_max", ".max").replace("_now", ".current")
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return made


def test_memory_is_what_the_machine_has(machine: Callable[..., Path]) -> None:
    assert room("auto", 2, machine()) == Room(shared=24 * GIB)
    assert room("cuda", 2, Path("/nowhere")) is None
    assert room("cpu", 2, Path("/nowhere")) is None


def test_a_control_groups_limit_counts_also_of_those_around_it(machine: Callable[..., Path]) -> None:
    files = {
        "a__memory_max": f"{4 * GIB}",
        "a__memory_now": f"{GIB}",
        "a__b__memory_max": "max",
        "a__b__memory_now": "7",
    }
    assert room("cpu", 2, machine("0::/a/b\n", **files)) == Room(shared=3 * GIB)


@pytest.mark.system
def test_gpus_are_asked(machine: Callable[..., Path]) -> None:
    root = machine()
    tool = root / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 81920\necho 81559\n")
    tool.chmod(0o755)
    assert room("auto", 2, root) == Room(each=81559 << 20, what="each of 2 GPUs")
    assert room("auto", 3, root) == Room(shared=24 * GIB)  # not one for each
    assert room("shared", 3, root) == Room(each=(81559 << 20) // 2, what="each rank's part of 2 GPUs")
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert room("auto", 2, root) == Room(shared=24 * GIB)
