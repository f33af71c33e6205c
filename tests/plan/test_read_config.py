"""Configurations of torchtitan, DeepSpeed, Megatron-Bridge and Hugging Face, read from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.job.settings import RecomputeLayers
from plait.core.step.columns.points import SCHEDULES
from plait.plan.read_config import no_job_error, read_configuration
from tests.plan.told_files import point, told

TITAN = """
[model]
name = "llama3"
flavor = "70B"
[training]
batch_size = 4
seq_len = 8192
steps = 10
[parallelism]
data_parallel_replicate_degree = 2
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "full"
[checkpoint]
interval = 500
"""
REGISTRY = """
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.llama3 import model_registry
SEQ: int = 4096

def small():
    return Trainer.Config(
        model_spec=model_registry("8B"), training=TrainingConfig(local_batch_size=1, seq_len=2 * SEQ),
        activation_checkpoint=ActivationCheckpointConfig(mode="selective"), metrics=M.Config(log_freq=1),
    )

def piped(layers=32):
    config = small()
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
    config.training.local_batch_size = 8
    config.training.dtype_of_my_own = "float4"
    config.activation_checkpoint = FullAC.Config()
    config.training.seed = os.environ["SEED"]
    return config
"""
BRIDGE = """
import torch
from megatron.bridge import AutoBridge

def llama3_70b():
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-70B").to_megatron_provider()
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.virtual_pipeline_model_parallel_size = 5
    cfg.model.context_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.model.pipeline_model_parallel_layout = None
    cfg.dataset.seq_length = 8192
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 1
    cfg.train.train_iters = 1000
    cfg.ddp.overlap_grad_reduce = True
    cfg.ddp.overlap_param_gather = True
    cfg.ddp.use_distributed_optimizer = True
    cfg.ddp.use_megatron_fsdp = False
    cfg.ddp.grad_reduce_in_fp32 = True
    cfg.ddp.data_parallel_sharding_strategy = "no_shard"
    cfg.model.my_switch = 3
    return cfg
"""


def test_torchtitan_s_toml(tmp_path: Path) -> None:
    one = told(tmp_path, "train.toml", TITAN)
    found = point(one, "cluster.ranks=64")
    wanted = {"tp": 8, "dp": 8, "optim": 4, "params": 4, "micro": 4, "num_micro": 1, "sequence_parallel": 1}
    assert {name: found[name] for name in wanted} == wanted
    assert one.get("model.hidden") == 8192 and one.get("strategy.recompute") == "full"
    assert one.unknown == [] and one.harmless == ["training.steps", "checkpoint.interval"]


def test_tables_that_torchtitan_does_not_have_are_named(tmp_path: Path) -> None:
    wrong = '[paralelism]\npipeline_parallel_degree = 2\n[bogus]\nx = 1\n[activation_checkpointing]\nmode = "full"\n'
    known = "[job]\ndump_folder = 'x'\n[lr_scheduler]\nwarmup_steps = 2\n[quantize.linear.float8]\nfilter_fqns = []\n"
    one = told(tmp_path, "train.toml", f"{TITAN}{wrong}{known}")
    assert one.unknown == [
        "paralelism.pipeline_parallel_degree = 2",
        "bogus.x = 1",
        "activation_checkpointing.mode = full",
    ]
    assert one.harmless[2:] == ["job.dump_folder", "lr_scheduler.warmup_steps", "quantize.linear.float8.filter_fqns"]
    more = "".join(
        f"    config.{line}\n" for line in ("paralelism.degree = 2", "hf_assets_path = 'x'", "optimizer.lr = 1")
    )
    two = told(tmp_path, "mine.py", CHANGED.replace("    return config\n", f"{more}    return config\n"))
    assert "paralelism.degree = 2" in two.unknown and {"config.hf_assets_path", "optimizer.lr"} <= {*two.harmless}


@pytest.mark.parametrize(
    ("key", "precision", "options"),
    [
        ("", "bf16-mixed", {}),
        ('mixed_precision_reduce = "float32"', "bf16-mixed", {}),
        ('mixed_precision_reduce = "bfloat16"', "bf16-mixed", {"gradient_bytes": 2.0}),
        ('mixed_precision_param = "float32"', "fp32", {}),
    ],
)
def test_what_torchtitan_computes_and_reduces_in(
    tmp_path: Path, key: str, precision: str, options: dict[str, float]
) -> None:
    one = told(tmp_path, "train.toml", TITAN.replace("[training]", f"[training]\n{key}"))
    assert (one.get("train.precision"), one.options) == (precision, options | {"loss_chunks": 1})


def test_torchtitan_s_module(tmp_path: Path) -> None:
    one = told(tmp_path, "registry.py:small", REGISTRY)
    found = point(one, "cluster.ranks=16", "train.global_batch_size=32")
    assert (found["dp"], found["optim"], found["num_micro"], found["recompute_layers"]) == (16, 16, 2, 16)
    assert one.get("data.sequence_length") == 8192 and one.unknown == []
    assert one.notes[0] == "Selective recomputation is predicted as full recomputation of half of the layers."
    two = told(tmp_path, "registry.py:piped", REGISTRY)
    found = point(two, "cluster.ranks=16")
    assert (found["pp"], found["virtual"], found["micro"], found["num_micro"]) == (2, 2, 1, 8)
    assert SCHEDULES[found["schedule"]] == "interleaved" and found["optim"] == 8 and found["params"] == 1
    assert two.get("strategy.recompute") == "full"
    assert two.unknown == [
        "training.dtype_of_my_own = float4", "training.seed = os.environ['SEED'] (computed)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "again", "said"),
    [
        ("", {"kind": "full", "layers": 16}, "number 2 divides"),
        ('[activation_checkpoint]\nselective_ac_option = "op"', {"kind": "full", "layers": 16}, "half of the layers"),
        ('[activation_checkpoint]\nselective_ac_option = "4"', {"kind": "full", "layers": 8}, "number 4 divides"),
        ('[activation_checkpoint]\nselective_ac_option = "1"', "full", "number 1 divides"),
        ('[activation_checkpoint]\nmode = "memory_budget"\nmemory_budget = 0.75', {"kind": "full", "layers": 8},
         "A memory budget of 0.75"),
        ('[activation_checkpoint]\nmode = "none"', "none", ""),
    ],
)  # fmt: skip
def test_what_torchtitan_computes_again(tmp_path: Path, table: str, again: Any, said: str) -> None:
    before = TITAN.partition("[activation_checkpoint]")[0].replace('"70B"', '"8B"')
    one = told(tmp_path, "titan.toml", f"{before}\n{table}\n")
    assert one.get("strategy.recompute") == again and said in " ".join(one.lines())


def test_a_share_of_layers_follows_the_stages(tmp_path: Path) -> None:
    one = told(tmp_path, "titan.toml", TITAN.partition("[activation_checkpoint]")[0].replace('"70B"', '"8B"'))
    more = ["cluster.ranks=64", "train.global_batch_size=64", "strategy.shard=auto"]
    for pp, layers in ((1, 16), (4, 4)):
        again = one.job([*more, f"strategy.pp={pp}"]).strategy.recompute
        assert again == RecomputeLayers(kind="full", layers=layers)
    with pytest.raises(JobError, match="50% of a stage's layers") as error:
        one.job([*more, "strategy.pp=auto"])
    assert error.value.key == "strategy.recompute"
    assert one.job([*more, "strategy.pp=auto", "strategy.recompute=none"]).strategy.recompute == "none"


def test_layers_of_a_model_that_nobody_knows_are_all_computed_again(tmp_path: Path) -> None:
    one = told(tmp_path, "titan.toml", '[model]\nname = "other"\nflavor = "1B"\n[training]\nseq_len = 8\n')
    assert one.get("strategy.recompute") == "full" and "all layers are counted as recomputed" in " ".join(one.lines())


@pytest.mark.parametrize(
    ("table", "precision", "gathered"),
    [
        ('[model]\nconverters = ["float8"]\n[float8]\nenable_fsdp_float8_all_gather = true', "fp8", True),
        ('[model]\nconverters = ["quantize.linear.float8"]\n[quantize.linear.float8]\n'
         "enable_fsdp_float8_all_gather = true", "fp8", True),
        ('[model]\nconverters = ["quantize.linear.mx"]\n[quantize.linear.mx]\nrecipe_name = "mxfp8"', "mxfp8", False),
        ('[model]\nconverters = ["quantize.linear.nvfp4"]', "nvfp4", None),
        ("[model]\nconverters = []", "bf16-mixed", None),
    ],
)  # fmt: skip
def test_torchtitan_s_converters(tmp_path: Path, table: str, precision: str, gathered: bool | None) -> None:
    one = told(tmp_path, "titan.toml", f"{table}\n[training]\nseq_len = 8192\n")
    assert one.get("train.precision") == precision and one.get("recipe.fp8_param_gather") == gathered


def test_a_schedule_s_name_has_any_case(tmp_path: Path) -> None:
    piped = '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "interleaved1f1b"'
    one = told(tmp_path, "titan.toml", TITAN.replace("[parallelism]", piped))
    assert one.get("strategy.schedule") == "interleaved" and not one.unmodelled


def test_a_schedule_that_is_predicted_as_another_keeps_none_of_its_rules(tmp_path: Path) -> None:
    piped = '[parallelism]\npipeline_parallel_degree = 8\npipeline_parallel_schedule = "{}"'
    rules = [
        [rule.sentence for rule in found.rules if rule.scheduling]
        for name in ("LoopedBFS", "1F1B")
        if (found := told(tmp_path, "titan.toml", TITAN.replace("[parallelism]", piped.format(name))).runs)
    ]
    assert rules[0] == [] and len(rules[1]) == 2


CHANGED = """
import os
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b

def mine():
    config = llama3_8b()
    config.model_spec = model_registry("8B", converters=[MXFP8LinearConverter.Config()])
    config.training.seq_len = 4096
    config.training.seq_len *= 2
    config.training.local_batch_size += os.cpu_count()
    config.parallelism.data_parallel_shard_degree = int(os.environ.get("SHARDS", 8))
    config.parallelism = replace(config.parallelism, tensor_parallel_degree=2)
    config.parallelism.context_parallel_degree = degree_of(2)
    return config
"""


def test_what_a_module_changes_and_what_it_cannot_say(tmp_path: Path) -> None:
    one = told(tmp_path, "mine.py", CHANGED)
    assert one.get("data.sequence_length") == 8192 and one.get("train.precision") == "mxfp8"
    assert one.get("cluster.ranks") == 16 and one.get("strategy.recompute") == {"kind": "full", "layers": 16}
    assert "llama3_8b() is in another module: its settings are not in the prediction." in one.notes
    assert one.unknown == [
        "parallelism.context_parallel_degree = degree_of(...) (computed)",
        "config.training.local_batch_size += os.cpu_count() (computed)",
    ]


def test_a_function_of_a_module_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="has 2 functions") as error:
        told(tmp_path, "registry.py", REGISTRY)
    assert "registry.py:small. There are: small, piped" in str(error.value)
    with pytest.raises(JobError, match="has no function 'other'"):
        told(tmp_path, "registry.py:other", REGISTRY)
    with pytest.raises(JobError, match="is no Python"):
        told(tmp_path, "registry.py", "def (")
    with pytest.raises(JobError, match="imports neither torchtitan nor megatron"):
        told(tmp_path, "registry.py", "import os")


def test_nothing_of_a_module_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    text = f"import torchtitan\nopen({str(marker)!r}, 'w')\n{REGISTRY}"
    told(tmp_path, "registry.py:small", text)
    assert not marker.exists()


def test_a_recipe_of_megatron_bridge(tmp_path: Path) -> None:
    one = told(tmp_path, "recipe.py", BRIDGE)
    found = point(one, "cluster.ranks=64")
    wanted = {"tp": 4, "pp": 4, "cp": 2, "virtual": 5, "dp": 2, "optim": 4, "sequence_parallel": 1, "micro": 1}
    assert {name: found[name] for name in wanted} == wanted
    assert one.get("model") == {"preset": "llama3-70b"} and one.unknown == ["--my-switch 3"]


@pytest.mark.parametrize(
    ("given", "precision", "gathered"),
    [
        ("bf16_with_mxfp8_mixed()", "mxfp8", True),
        ("'bf16_with_fp8_current_scaling_mixed'", "fp8", True),
        ('get_mixed_precision_config("bf16_with_fp8_delayed_scaling_mixed")', "fp8", True),
        ("bf16_with_nvfp4_mixed()", "nvfp4", None),
        ("bf16_mixed()", "bf16-mixed", None),
        ("'fp32'", "fp32", None),
        ('MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="mxfp8")', "mxfp8", False),
    ],
)
def test_a_recipe_s_mixed_precision(tmp_path: Path, given: str, precision: str, gathered: bool | None) -> None:
    text = BRIDGE.replace("    cfg.train.micro_batch_size = 1\n", f"    cfg.mixed_precision = {given}\n")
    one = told(tmp_path, "recipe.py", text)
    assert one.get("train.precision") == precision and bool(one.get("recipe.fp8_param_gather")) == bool(gathered)
    assert not [line for line in one.unknown if "mixed" in line]
    with pytest.raises(JobError) as error:  # no micro-batch stands in the file
        one.job(["cluster.ranks=64", "cluster.preset=b200"])
    assert error.value.key == "train.micro_batch_size"


PROVIDED = """import megatron
TP = 2
{}

def pretrain():
    model = Llama3ModelProvider8B({})
    cfg = ConfigContainer(model=model, train=TrainingConfig(micro_batch_size=1, global_batch_size=64))
    {}
    return cfg
"""


@pytest.mark.parametrize(
    ("before", "given", "after"),
    [
        ("TP *= 2", "tensor_model_parallel_size=TP", ""),
        ("MORE = dict(tensor_model_parallel_size=4)", "**MORE", ""),
        ('MORE = {"tensor_model_parallel_size": 2 * TP}', "**MORE", ""),
        ("", "", "setattr(cfg.model, 'tensor_model_parallel_size', 4)"),
        ("", "", "for k, v in [('tensor_model_parallel_size', 4)]: setattr(cfg.model, k, v)"),
        ("", "", "cfg.model.update({'tensor_model_parallel_size': 4})"),
        ("", "tensor_model_parallel_size=4", "print(cfg)"),
    ],
)
def test_ways_to_set_something_of_a_recipe(tmp_path: Path, before: str, given: str, after: str) -> None:
    one = told(tmp_path, "recipe.py", PROVIDED.format(before, given, after))
    assert one.get("strategy.tp") == 4 and not one.unknown


@pytest.mark.parametrize(
    ("before", "given", "after", "says"),
    [
        ("if BIG: TP = 4", "tensor_model_parallel_size=TP", "", "'TP': known only during"),
        ("try:\n    TP = 4\nexcept ImportError: pass", "tensor_model_parallel_size=TP", "", "'TP': known only during"),
        ("tp = Degree(4)", "tensor_model_parallel_size=tp", "", "'tp': known only during"),
        ("", "**common()", "", r"\*\*common\(\): may stand for flags"),
        ("", "", "tune(cfg)", r"tune\(\): may stand for flags"),
        ("", "", "for k, v in some(): setattr(cfg.model, k, v)", "setattr.*: may stand for flags"),
        ("", "", "cfg.mixed_precision = f'bf16_with_{X}_mixed'", r"known only during .* add train\.precision=\.\.\."),
    ],
)
def test_what_may_set_anything_of_a_recipe_is_asked_for(
    tmp_path: Path, before: str, given: str, after: str, says: str
) -> None:
    with pytest.raises(JobError, match=says):
        told(tmp_path, "recipe.py", PROVIDED.format(before, given, after))


@pytest.mark.parametrize(
    ("more", "dp"),
    [
        (["strategy.dp=auto", "cluster.ranks=64"], ("strategy.dp",)),
        (["strategy.tp=auto", "cluster.ranks=64"], ("strategy.tp", "strategy.dp")),
    ],
)
def test_degrees_beside_a_file_may_be_left_open(tmp_path: Path, more: list[str], dp: tuple[str, ...]) -> None:
    one = told(tmp_path, "titan.toml", TITAN.replace("data_parallel_replicate_degree = 2\n", ""))
    open_ones = one.job(["train.global_batch_size=64", *more]).open
    assert set(dp) <= set(open_ones)


@pytest.mark.parametrize("setting", ["cluster.ranks=auto", "strategy.tp=x", "strategy.pp=0", "strategy.dp=1.5"])
def test_degrees_that_are_none_are_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(JobError) as error:
        told(tmp_path, "titan.toml", TITAN).job(["cluster.ranks=64", setting])
    assert error.value.key == setting.partition("=")[0] and error.value.file == "command line"


def test_copies_of_shards_over_open_degrees_are_refused(tmp_path: Path) -> None:
    one = told(tmp_path, "titan.toml", TITAN)
    more = ["cluster.ranks=64", "strategy.dp=auto", "train.global_batch_size=64"]
    with pytest.raises(JobError, match=r"Add strategy\.shard=auto") as error:
        one.job(more)
    assert error.value.key == "strategy.shard"
    assert "strategy.shard" in one.job([*more, "strategy.shard=auto"]).open


def test_megatron_s_yaml(tmp_path: Path) -> None:
    text = """
language_model: {num_layers: 8, hidden_size: 512, num_attention_heads: 8, hidden_dropout: 0.0}
model_parallel: {tensor_model_parallel_size: 2, sequence_parallel: true}
MODEL_ARGS: {--seq-length: 256, --max-position-embeddings: 256, --bf16: true, --use-distributed-optimizer: true,
             --fp16: false, --vocab-size: 1024}
micro_batch_size: 1
global_batch_size: 16
"""
    one = told(tmp_path, "config.yaml", text)
    found = point(one, "cluster.ranks=8")
    assert (found["tp"], found["dp"], found["optim"], found["sequence_parallel"]) == (2, 4, 4, 1)
    assert one.unknown == []
    assert point(one, "cluster.ranks=8") == found and one.job(["cluster.ranks=8"]).model["tied_embeddings"] is True
    off = "share_embeddings_and_output_weights: false\nadd_bias_linear: true\nfrobnicates: false\ngrows: null\n"
    other = told(tmp_path, "config.yaml", text + off)
    assert other.unknown == ["--frobnicates false"]
    assert other.job(["cluster.ranks=8"]).model["tied_embeddings"] is False


def test_a_mistake_of_a_file_s_form_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"bad\.yaml: line 1: not valid YAML") as error:
        told(tmp_path, "bad.yaml", "a: {b: ???, c: 1}")
    assert error.value.file == str(tmp_path / "bad.yaml")


@pytest.mark.parametrize("name", ["job.toml", "plan.json", "missing.json", "missing.toml"])
def test_what_is_plait_s_own_is_left_to_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "job.toml").write_text('[model]\npreset = "gpt3-125m"\n')
    (tmp_path / "plan.json").write_text('{"strategy": {}}')
    assert read_configuration(tmp_path / name) is None


def test_a_text_without_flags_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="has no --flags"):
        told(tmp_path, "train.sh", "echo")


@pytest.mark.parametrize(
    ("name", "text"),
    [("gpt.yaml", "trainer: {devices: 8}\nmodel: {num_layers: 4, encoder_seq_length: 128}\n"),
     ("train.sh", "python megatron_gpt_pretraining.py --config-name=gpt --config-path=conf\n")],
)  # fmt: skip
def test_nemo_1_is_refused_with_what_took_its_place(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(JobError, match=r"NeMo.*Name the recipe of Megatron-Bridge that took its place") as error:
        told(tmp_path, name, text)
    assert error.value.file == str(tmp_path / name)


FILES = {
    "run.sh": ("--num-layers 2 --hidden-size 64 --unknown $TP", "is a command line of Megatron-LM", "plait plan"),
    "start.sh": ("deepspeed train.py --deepspeed", "starts DeepSpeed", "Name its configuration"),
    "titan.toml": (TITAN, "is a configuration of torchtitan", "plait plan"),
    "ds.json": (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1}}',
        "a configuration of DeepSpeed",
        "ranks=64",
    ),
    "config.json": ('{"model_type": "llama"}', "a model's configuration of Hugging Face", "below [model]"),
    "job.json": ('{"model": {}, "strategy": {}}', "is a job in JSON, and a job is TOML", "[train]"),
    "job.yaml": ("model: {}", "is a job in YAML, and a job is TOML", "[train]"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_job_is_named_for_what_it_is(tmp_path: Path, name: str) -> None:
    text, what, fix = FILES[name]
    (tmp_path / name).write_text(text)
    found = str(no_job_error(tmp_path / name))
    assert found.startswith(f"{tmp_path / name}: ") and what in found and fix in found


@pytest.mark.parametrize(("name", "text"), [("a.toml", "[model]"), ("a.json", '{"hash": ""}'), ("a.txt", "--a 1")])
def test_what_may_be_a_job_is_not(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert no_job_error(tmp_path / name) is None
    assert no_job_error(tmp_path / f"absent-{name}") is None
