"""``plait plan`` of other frameworks' files: what is searched beside them, and what they ask
for."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.command import plait, succeed

TIER = "unit"
SCRIPT = """
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 \\
    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 64 \\
    --padded-vocab-size 50304 --bf16 --tensor-model-parallel-size 2 --hidden-dropout 0 --attention-dropout 0
"""
TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 2048
[parallelism]
tensor_parallel_degree = 4
"""
DEEPSPEED = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "train_batch_size": 64,
             "train_micro_batch_size_per_gpu": 1}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512,
         "intermediate_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-5}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "titan.toml").write_text(TITAN)
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def plan(folder: Path, *words: object) -> CompletedProcess[str]:
    return plait("plan", *words, "cluster.preset=h100", folder=folder)


def text(found: CompletedProcess[str]) -> str:
    return " ".join((found.stdout + found.stderr).split())


JOB = (
    '[model]\npreset = "llama3.2-1b"\n[data]\nsequence_length = 1024\n[train]\nglobal_batch_size = 16\n'
    'precision = "bf16-mixed"\n[cluster]\npreset = "h100"\nranks = 8\n[strategy]\ntp = 8\n'
)
DS_MODEL = ("model.preset=llama3.2-1b", "data.sequence_length=1024")


@pytest.mark.parametrize(
    ("words", "changed", "written"),
    [
        (("run.sh",), "--tensor-model-parallel-size 1", "--tensor-model-parallel-size 1"),
        (("titan.toml", "cluster.ranks=8"), "compile.enable_async_tensor_parallel = True",
         "enable_async_tensor_parallel = true"),
        (("ds.json", "cluster.ranks=8", *DS_MODEL), '"train_micro_batch_size_per_gpu": 8',
         '"train_micro_batch_size_per_gpu": 8'),
    ],
)  # fmt: skip
def test_a_file_s_strategy_beside_the_best_that_is_searched(
    folder: Path, words: tuple[str, ...], changed: str, written: str
) -> None:
    own = " ".join(plan(folder, *words).stdout.split())
    assert f"This is {words[0]} as it is. With strategy=auto, the same command searches" in own
    batch = "train.global_batch_size=64"
    assert words[0] != "run.sh" or f"This is run.sh with {batch}. With" in text(plan(folder, *words, batch))
    degrees = re.search(r"; with (strategy\.tp=auto .*), only for other parallel degrees\.", own)
    assert bool(degrees) == (words[0] != "titan.toml")  # which recomputes a share of an unknown number of layers
    assert not degrees or "strategies searched" in text(plan(folder, *words, *degrees[1].split()))
    found = plan(folder, *words, "strategy=auto")
    assert found.returncode == 0 and f" times as fast as {words[0]}. To write into {words[0]}:" in text(found)
    assert any(line.strip(" ,") == written for line in found.stdout.splitlines())
    alone, both = (json.loads(plan(folder, *words, *more, "--json").stdout) for more in ((), ("strategy=auto",)))
    best = both["candidates"][0]
    assert both["as_written"]["own"]["seconds"] == pytest.approx(alone["candidates"][0]["seconds"])
    assert best["seconds"] < both["as_written"]["own"]["seconds"] and len(both["candidates"]) > 1
    assert any(changed in one for one in both["as_written"]["changes"])


@pytest.mark.parametrize("file", ["titan.toml", "ds.json", "run.sh", "synonyms.sh", "flags.yaml"])
def test_a_file_with_the_written_lines_has_the_best_prediction(folder: Path, file: str) -> None:
    flags = re.findall(r"--([-\w]+)(?: ([\w.]+))?", SCRIPT.partition("pretrain_gpt.py")[2])
    (folder / "flags.yaml").write_text("".join(f"{key.replace('-', '_')}: {value or 'true'}\n" for key, value in flags))
    synonyms = " --recompute-activations --sequence-parallel --num-layers-per-virtual-pipeline-stage 1"
    (folder / "synonyms.sh").write_text(SCRIPT.rstrip() + synonyms + " --pipeline-model-parallel-size 4")
    before, words = (folder / file).read_text(), ("cluster.ranks=8", *(DS_MODEL if file == "ds.json" else ()))
    found = json.loads(plan(folder, file, *words, "strategy=auto", "--json").stdout)
    said = plan(folder, file, *words, "strategy=auto").stdout.partition(f"To write into {file}:\n")[2]
    lines = said.partition("To take out")[0].partition("\n")[2]
    for name in re.findall(r"[-\w]+", said.partition("To take out of it: ")[2]):
        before = re.sub(rf"{name}\b", "", before)
    if file == "ds.json":
        written = json.dumps(json.loads(before) | json.loads(lines))
    elif file == "titan.toml":
        old, new = tomllib.loads(before), tomllib.loads(lines)
        tables = {name: old.get(name, {}) | new.get(name, {}) for name in {**old, **new}}
        written = "".join(
            f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
            for name, table in tables.items()
        )
    elif file.endswith(".sh"):
        written = f"{before.rstrip()} {lines.replace(chr(10), ' ')}"
    else:
        changed = {line.partition(":")[0] for line in lines.splitlines()}
        written = "".join(one for one in before.splitlines(True) if one.partition(":")[0] not in changed) + lines
    (folder / file).write_text(written)
    again = json.loads(plan(folder, file, *words, "--json").stdout)
    assert again["candidates"][0]["seconds"] == pytest.approx(found["candidates"][0]["seconds"])


def test_a_search_beside_flags_that_nobody_knows_predicts_no_own_strategy(folder: Path) -> None:
    (folder / "run.sh").write_text(SCRIPT.replace("parallel-size 2", "parallel-size $TP"))
    found = plan(folder, "run.sh", "strategy=auto")
    assert found.returncode == 0 and "run.sh as it is has no prediction: " in text(found)
    assert "strategy.tp: '--tensor-model-parallel-size $TP': known only during a run" in text(found)


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        ("run.sh", "tensor-model-parallel-size", "tensor-model-paralel-size",
         "strategy.tp: '--tensor-model-paralel-size 2' is not understood (did you mean --tensor-model-parallel-size?)"),
        ("titan.toml", "tensor_parallel_degree", "tensor_paralell_degree", "strategy.tp: 'parallelism.tensor_paralell"),
        ("ds.json", "train_micro_batch_size_per_gpu", "train_micro_batch_size_per_gpus", "train.micro_batch_size: "),
    ],
)  # fmt: skip
def test_names_that_are_nearly_those_of_degrees_are_asked_for(
    folder: Path, file: str, before: str, after: str, said: str
) -> None:
    (folder / file).write_text((folder / file).read_text().replace(before, after))
    more = ["cluster.ranks=8", *(DS_MODEL if file == "ds.json" else ())]
    found = plan(folder, file, *more)
    assert found.returncode == 2 and said in text(found), text(found)
    keys = ["strategy.tp=2", "train.micro_batch_size=1"]
    assert plan(folder, file, *more, *keys).returncode == 0


def test_a_strategy_of_a_job_is_left_to_the_planner(folder: Path) -> None:
    (folder / "job.toml").write_text(JOB)
    found = json.loads(plan(folder, "job.toml", "strategy=auto", "--json").stdout)
    assert found["searched"] > 100 and found["candidates"][0]["strategy"]["tp"] == 1


@pytest.mark.parametrize("first", [True, False])
def test_settings_that_end_like_a_file_are_settings(folder: Path, *, first: bool) -> None:
    model = "model.huggingface=config.json"
    words = (model, "ds.json") if first else ("ds.json", model)
    found = plan(folder, *words, "cluster.ranks=8", "data.sequence_length=256")
    assert found.returncode == 0 and "run by DeepSpeed" in text(found), text(found)


@pytest.mark.parametrize(
    ("batch", "micro", "times", "said"),
    [
        (60, 4, None, "60 sequences are no whole number of micro-batches of 4 on each of 8 replicas, which DeepSpeed"),
        (64, 4, None, "micro-batch 4"),
        (60, 4, 2, "60 is not 4 x 2 times whole replicas"),
        (64, 4, 4, "8 ranks are not tp x pp x cp x dp = 4"),
        (64, 4, 2, "micro-batch 4"),
        (64, None, 4, "micro-batch 2"),
        (64, None, 3, "64 sequences are not 8 replicas x 3 micro-batches of one size"),
        (60, None, None, "60 sequences are not 8 replicas x 1 micro-batches of one size"),
        (None, 4, 2, "micro-batch 4"),
        (None, None, 4, "does not say how many sequences a step has"),
    ],
)
def test_batches_of_deepspeed_are_whole_steps_or_refused(
    folder: Path, batch: int | None, micro: int | None, times: int | None, said: str
) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = {key: one for key, one in zip(keys, (batch, micro, times), strict=True) if one}
    (folder / "own.json").write_text(json.dumps({"bf16": {"enabled": True}} | values))
    found = plan(folder, "own.json", *DS_MODEL, "cluster.ranks=8")
    assert said in text(found) and found.returncode == 2 * (not said.startswith("micro-batch")), text(found)


@pytest.mark.parametrize(
    ("changed", "key", "keys"),
    [
        ({"bf16": {"enabled": "auto"}}, "train.precision: 'bf16.enabled = auto'", ["train.precision=bf16-mixed"]),
        (
            {"zero_optimization": {"stage": "auto"}},
            "strategy.shard: 'zero_optimization.stage",
            ["strategy.shard=zero3"],
        ),
    ],
)
def test_what_deepspeed_leaves_to_a_trainer_is_asked_for(
    folder: Path, changed: dict[str, object], key: str, keys: list[str]
) -> None:
    (folder / "own.json").write_text(json.dumps(DEEPSPEED | changed))
    found = plan(folder, "own.json", *DS_MODEL, "cluster.ranks=8")
    assert found.returncode == 2 and f"{key}" in text(found) and "known only during a run" in text(found)
    assert plan(folder, "own.json", *DS_MODEL, "cluster.ranks=8", *keys).returncode == 0


FP8 = "--fp8-format hybrid --transformer-impl transformer_engine"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (FP8, "fp8, on 8 GPUs"),
        (f"{FP8} --seq-length 1020", "data.sequence_length: Transformer Engine multiplies in fp8 what 8 divides"),
        (f"{FP8} --ffn-hidden-size 4104", "model.ffn_hidden = 4,104, sharded over tp ranks, is none such"),
        (f"{FP8} --ffn-hidden-size 4112", "model.ffn_hidden = 4,112, sharded over tp ranks, is none such"),
        (f"{FP8} --ffn-hidden-size 4128", "fp8, on 8 GPUs"),
        (f"{FP8} --fp8-recipe mxfp8 --ffn-hidden-size 4128", "what 32 divides in height and 32 in width"),
        ("--seq-length 1020 --ffn-hidden-size 4104", "on 8 GPUs"),
    ],
)
def test_products_that_transformer_engine_refuses_in_eight_bits(folder: Path, more: str, said: str) -> None:
    (folder / "run.sh").write_text(f"{SCRIPT.rstrip()} {more}\n")
    found = plan(folder, "run.sh")
    assert said in text(found) and found.returncode == 2 * ("on 8 GPUs" not in said), text(found)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--zero-stage 2", "sharding ZeRO-2"),
        ("--zero-stage 3", "sharding ZeRO-3/FSDP"),
        ("--zero-stage 0 --ds-sequence-parallel-size 2", "cp type Ulysses 2"),
        ("--zero-stage 0 --checkpoint-activations", "recompute full"),
        ("--zero-stage 4", "--zero-stage: '4' is unknown"),
        ("--pad-vocab-size-to 60160", "parameters"),
    ],
)
def test_flags_of_megatron_deepspeed(folder: Path, more: str, said: str) -> None:
    (folder / "run.sh").write_text(f"{SCRIPT.rstrip()} --deepspeed {more}\n")
    assert said in text(plan(folder, "run.sh")), text(plan(folder, "run.sh"))


def test_a_search_says_that_no_strategy_can_multiply_a_width_in_eight_bits(folder: Path) -> None:
    (folder / "run.sh").write_text(f"{SCRIPT.rstrip()} {FP8} --ffn-hidden-size 4104\n")
    found = plan(folder, "run.sh", "strategy=auto")
    assert found.returncode == 2 and "which model.ffn_hidden 4,104 are not" in text(found)


def test_devices_before_bf16_keep_the_scores_of_attention(folder: Path) -> None:
    """Megatron-LM #525: GPT-2 large, micro-batches of 4, runs out of the 32 GB of a V100."""
    large = SCRIPT.replace("num-layers 8", "num-layers 36").replace("hidden-size 1024", "hidden-size 1280")
    large = large.replace("heads 16", "heads 20").replace("parallel-size 2", "parallel-size 1")
    (folder / "run.sh").write_text(large.replace("micro-batch-size 1", "micro-batch-size 4"))
    found = plait("plan", "run.sh", "cluster.preset=v100", folder=folder)
    assert found.returncode == 2 and "does not fit" in text(found)
    small = succeed("plan", "run.sh", "cluster.preset=v100", "train.micro_batch_size=1", folder=folder)
    assert "lacks the fused attention kernels" in text(small)
    assert "fused attention" not in text(plan(folder, "run.sh"))


RECIPE = """
from megatron.bridge.models import llama

def recipe():
    TP, PP, CP = 2, 1, 2
    cfg = _pretrain_common()
    cfg.model = Llama3ModelProvider8B(
        tensor_model_parallel_size=TP, pipeline_model_parallel_size=PP, context_parallel_size=CP,
        sequence_parallel=TP > 1, seq_length=4096,
    )
    cfg.train.global_batch_size, cfg.train.micro_batch_size = 64, 1
    return cfg
"""


@pytest.mark.parametrize(
    ("before", "after", "keys", "said"),
    [
        ("", "", [], r"8.03B parameters, .* 1 2 2 2 .*"),
        ("", "", ["--json"], r'"sequence_parallel": true'),
        ("TP > 1", "TP > 2 and TP", ["--json"], r'"sequence_parallel": false'),
        ("8B(\n", "(num_layers=4, hidden_size=1024, ffn_hidden_size=2048, num_attention_heads=16,\n", [],
         r"300M parameters"),
        ("Llama3ModelProvider8B(", "Qwen3ModelProvider8B(num_layers=4,", [],
         r"model: Qwen3ModelProvider8B has defaults of its own, which are unknown here: hidden_size, "),
        ("Llama3ModelProvider8B(", "Qwen3ModelProvider8B(", ["model.preset=qwen3-8b"], r"8.19B parameters"),
        ("2, 1, 2", "degrees()", [],
         r"--tensor-model-parallel-size: 'TP', --pipeline.*: known only during .* add strategy.tp=... strategy"),
        ("= _pretrain", "= base(); cfg = _pretrain", [], r"8.03B parameters"),
        ("_pretrain_common()", "llama3_8b()", [], r"llama3_8b\(\): may stand for flags that are known .* strategy"),
        ("    cfg.train", "    if BIG:\n        cfg.train.seq_length = 8192\n    cfg.train", [],
         r"--seq-length: '8192 or left out': known only during"),
        ("    cfg.train", "    if TP == 2:\n        cfg.dataset.seq_length = 8192\n    cfg.train", [], r"parameters"),
    ],
)  # fmt: skip
def test_recipes_of_megatron_bridge(folder: Path, before: str, after: str, keys: list[str], said: str) -> None:
    (folder / "recipe.py").write_text(RECIPE.replace(before, after, 1))
    found = plan(folder, "recipe.py", "model.vocab=128256" if "model.preset=qwen3-8b" not in keys else keys[0],
                 "cluster.ranks=8", *keys)  # fmt: skip
    assert re.search(said, text(found)), text(found)


MISTRAL = {"model_type": "mistral", "num_key_value_heads": 2}
HUGGING_FACE = ("config.json", "data.sequence_length=256", "train.global_batch_size=16", "cluster.ranks=8")


@pytest.mark.parametrize(
    ("more", "words", "said"),
    [
        ({"torch_dtype": "bfloat16"}, (), "The file has bfloat16: it is planned in bf16-mixed"),
        ({"dtype": "bfloat16"}, ("train.precision=fp32",), "fp32, on 8 GPUs"),
        ({"dtype": "float32"}, (), "The file has float32: it is planned in fp32"),
        ({}, (), "fp32, on 8 GPUs"),
        (
            {"torch_dtype": "float16"},
            (),
            "torch_dtype: 'float16' is no precision that Plait computes in. Add train.prec",
        ),
        ({"dtype": "float16"}, ("train.precision=bf16-mixed",), "bf16-mixed, on 8 GPUs"),
        (MISTRAL | {"sliding_window": 0}, (), "sliding_window: 0 means in transformers"),
        (MISTRAL | {"sliding_window": None}, (), "fp32, on 8 GPUs"),
    ],
)
def test_a_configuration_of_hugging_face_says_the_precision(
    folder: Path, more: dict[str, object], words: tuple[str, ...], said: str
) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | more))
    found = plan(folder, *HUGGING_FACE, *words)
    assert said in text(found) and found.returncode == 2 * ("parameters" not in text(found)), text(found)


def test_a_job_keeps_its_default_precision_beside_weights_of_another_type(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "bfloat16"}))
    job = '[model]\nhuggingface = "config.json"\n[data]\nsequence_length = 256\n[train]\nglobal_batch_size = 16\n'
    (folder / "job.toml").write_text(job)
    found = text(plan(folder, "job.toml", "cluster.ranks=8"))
    assert "fp32, on 8 GPUs" in found and "config.json has bfloat16, and the job no train.precision" in found
    assert "has bfloat16" not in text(plan(folder, "job.toml", "cluster.ranks=8", "train.precision=fp32"))
    assert "has bfloat16" in text(plait("train", "job.toml", "--dry-run", "strategy.tp=1", folder=folder))


def test_a_plan_replaces_another_with_a_word_and_no_other_file(folder: Path) -> None:
    (folder / "job.toml").write_text(JOB)
    assert "of another plan" not in plan(folder, "job.toml", "train.steps=3").stdout
    assert "of another plan" not in plan(folder, "job.toml", "train.steps=3").stdout
    assert "in place of another plan (--out FILE keeps both)" in text(plan(folder, "job.toml", "train.steps=4"))
    (folder / "notes.json").write_text("{}")
    found = plan(folder, "job.toml", "--out", "notes.json")
    assert found.returncode == 2 and "notes.json is no plan, and a plan would replace it" in text(found)
    assert (folder / "notes.json").read_text() == "{}"
