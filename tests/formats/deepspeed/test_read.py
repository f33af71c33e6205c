"""Configurations of DeepSpeed, read from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from tests.plan.told_files import point, told

DEEPSPEED = {
    "train_batch_size": 512, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "reduce_bucket_size": 5e8, "offload_param": {"nvme": 1},
        "offload_optimizer": {"device": "none"},
    },
    "bf16": {"enabled": True}, "gradient_clipping": 1.0, "my_key": 1,
}  # fmt: skip
ASKED = ["cluster.preset=h100", "data.sequence_length=4096", "model.preset=llama3-8b"]


def test_deepspeed_s_json(tmp_path: Path) -> None:
    one = told(tmp_path, "ds.json", json.dumps(DEEPSPEED))
    found = point(one, *ASKED[1:])
    assert (found["dp"], found["params"], found["micro"], found["num_micro"]) == (64, 64, 2, 4)
    assert one.unknown == ["my_key = 1"]
    assert one.unmodelled == ["zero_optimization.offload_param.nvme = 1"]


def test_lines_that_show_prints_before_are_passed_over(tmp_path: Path) -> None:
    commented = f"# torchrun PROGRAM\n\n# deepspeed cannot say: {{slices}}\n{json.dumps(DEEPSPEED)}\n"
    assert told(tmp_path, "a.json", commented).values == told(tmp_path, "b.json", json.dumps(DEEPSPEED)).values
    with pytest.raises(JobError, match="line 3 column 2"):
        told(tmp_path, "c.json", "# one\n# two\n{]")


@pytest.mark.parametrize(
    ("changed", "more", "key", "problem"),
    [
        ({"train_batch_size": 500}, ASKED, "train_batch_size", "500 is not 2 x 4 times whole replicas"),
        ({"train_batch_size": "many"}, ASKED, "train_batch_size", "'many' is a text"),
        ({"train_batch_size": 0}, ASKED, "train_batch_size", "0 is not positive"),
        ({"zero_optimization": {"stage": 4}}, ASKED, "zero_optimization.stage", "'4' is unknown. Use 0, 1, 2, 3"),
        ({"zero_optimization": True}, ASKED, "zero_optimization", "True is no table"),
        ({"bf16": {"enabled": "true"}}, ASKED, "bf16.enabled", "'true' is neither true nor false"),
        ({"fp16": {"enabled": True}}, ASKED, "fp16.enabled", "true conflicts with bf16"),
        ({"data_types": {"grad_accum_dtype": "float8"}}, ASKED, "data_types.grad_accum_dtype", "'float8' is unknown"),
        ({}, ASKED[:2], "model", "does not say the model's shapes"),
        ({}, [ASKED[0], ASKED[2]], "data.sequence_length", "does not say how many tokens"),
        ({"train_batch_size": "auto"}, ASKED, "cluster.ranks", "does not say how many ranks"),
        ({"zero_optimization": {"stage": "auto"}}, ASKED, "strategy.shard", "stage = auto': known only during"),
        ({"bf16": {"enabled": "auto"}}, ASKED, "train.precision", "bf16.enabled = auto': known only during"),
        ({"train_micro_batch_size": 4}, ASKED, "train.micro_batch_size", "mean train_micro_batch_size_per_gpu?"),
        ({}, [*ASKED, "cluster.ranks=32"], "cluster.ranks", "512 is 2 x 4 sequences on each of 64 replicas"),
    ],
)  # fmt: skip
def test_what_deepspeed_refuses_or_does_not_say_is_told_by_its_key(
    tmp_path: Path, changed: dict[str, Any], more: list[str], key: str, problem: str
) -> None:
    with pytest.raises(JobError) as error:
        told(tmp_path, "ds.json", json.dumps(DEEPSPEED | changed)).job(more)
    assert error.value.key == key and problem in str(error.value) and str(error.value.file).endswith("ds.json")


def test_advice_on_what_is_read_was_tried(tmp_path: Path) -> None:
    """Of a batch that its ranks do not fill, it is to blame, and not a micro-batch that nobody
    said."""
    one = told(tmp_path, "ds.json", json.dumps({"train_batch_size": 60, "train_micro_batch_size_per_gpu": 1}))
    asked = [*ASKED, "cluster.ranks=16"]
    with pytest.raises(JobError, match=r"60 sequences are not a multiple .* = 1 x 16\. Use 48 or 64") as error:
        one.job(asked)
    assert error.value.key == "train.global_batch_size"
    for change in error.value.changes:
        assert one.job([*asked, *(f"{key}={value}" for key, value in change.items())]).strategy.dp == 16
    with pytest.raises(JobError, match=r"16 ranks are not tp x pp x cp x dp = 15\. Use 15"):
        one.job([*asked, "strategy.dp=15"])
    assert one.job([*ASKED, "cluster.ranks=15", "strategy.dp=15"]).strategy.dp == 15
    with pytest.raises(JobError, match="8 does not divide the 15 ranks") as error:
        one.job([*ASKED, "cluster.ranks=15", "strategy.shard={params=1,grads=1,optim=8}"])
    assert {"strategy.shard.optim": 15} in error.value.changes


@pytest.mark.parametrize(
    ("changed", "key", "value", "said"),
    [
        ({"pipeline": {"stages": 2, "activation_checkpoint_interval": 1}}, "strategy.recompute", "full", ""),
        ({"pipeline": {"stages": 2, "activation_checkpoint_interval": 0}}, "strategy.recompute", "none", ""),
        ({"optimizer": {"type": "Muon"}}, "train.optimizer", "muon", ""),
        ({"optimizer": {"type": "OneBitAdam"}}, "train.optimizer", "adamw", "optimizer.type = OneBitAdam"),
        ({"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}}, "strategy.overlap.tp", "async", ""),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "strategy.recompute", None,
         "activation_checkpointing.cpu_checkpointing = True"),
        ({"bf16": {}, "amp": {"enabled": True}}, "train.precision", "bf16-mixed", "amp.enabled: products"),
        ({"bf16": {}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "train.precision", "bf16-mixed",
         "torch_autocast.enabled: products"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "recipe.optimizer_offload_fraction", 1.0, ""),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
         "recipe.optimizer_offload_fraction", 1.0, "zero_optimization.offload_optimizer.device = nvme (counted as"),
        ({}, "strategy.recompute", None, "strategy.recompute=full predicts it for all"),
    ],
)  # fmt: skip
def test_what_deepspeed_leaves_to_others_or_calls_by_older_names(
    tmp_path: Path, changed: dict[str, Any], key: str, value: Any, said: str
) -> None:
    one = told(tmp_path, "ds.json", json.dumps(DEEPSPEED | changed))
    assert one.get(key) == value and said in " ".join(one.lines())


@pytest.mark.parametrize(
    ("batches", "micro", "batch"),
    [
        ((512, None, 16), 2, 512),
        ((512, None, None), 32, 512),
        ((None, 2, None), 2, 32),
        ((None, 2, 4), 2, 128),
        (("auto", 2, 4), 2, 128),
        ((512, 4, None), 4, 512),
        ((None, 2, "auto"), None, "train.global_batch_size"),
        ((512, "auto", 4), None, "train.micro_batch_size"),
        ((500, None, 3), None, "train.global_batch_size"),
    ],
)
def test_deepspeed_s_three_batch_sizes(
    tmp_path: Path, batches: tuple[Any, Any, Any], micro: int | None, batch: int | str
) -> None:
    """On 16 replicas; what is neither said nor follows is asked for."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = {key: value for key, value in DEEPSPEED.items() if key not in names}
    values |= {key: value for key, value in zip(names, batches, strict=True) if value is not None}
    one = told(tmp_path, "ds.json", json.dumps(values))
    if isinstance(batch, str):
        with pytest.raises(JobError) as error:
            one.job([*ASKED, "cluster.ranks=16"])
        assert error.value.key == batch
    else:
        train = one.job([*ASKED, "cluster.ranks=16"]).train
        assert (train.micro_batch_size, train.global_batch_size) == (micro, batch)


def test_gradients_that_deepspeed_sums_in_fp32_fill_more(tmp_path: Path) -> None:
    one = told(tmp_path, "ds.json", json.dumps(DEEPSPEED | {"data_types": {"grad_accum_dtype": "fp32"}}))
    assert one.runs and one.runs.options.main_gradient_bytes == 4.0


def test_a_second_copy_of_parameters_is_zero_plus_plus_s(tmp_path: Path) -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 8}
    found = point(told(tmp_path, "ds.json", json.dumps(DEEPSPEED | {"zero_optimization": zero})), *ASKED[1:])
    assert (found["params"], found["secondary"]) == (64, 8)
