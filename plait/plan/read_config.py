"""Reads configurations of other frameworks: detects the kind of a file and returns its job.

| file | read as |
|---|---|
| a shell script or a text with ``--flags`` | Megatron-LM's command line; also its YAML |
| ``.py`` (``FILE.py:FUNCTION``) | a configuration of torchtitan, or a recipe of Megatron-Bridge |
| ``.toml`` with a table ``[training]`` | torchtitan's, until February 2026 |
| ``.json`` with DeepSpeed's keys | DeepSpeed's, also after ``#`` lines that ``--show`` prints |
| ``.json`` with a ``model_type`` | Hugging Face's: the model alone, or its preset (below) |

Nothing in a file is executed. Any other TOML or JSON file is a job or a plan of Plait.

Hugging Face's ``config.json`` describes a model that Plait trains, or one with the shapes of a
preset. Its dtype sets the precision, unless the command line does. The preset is recognised by its
shapes, experts included. The vocabulary and tied embeddings may differ from the preset's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from plait.core.base.codec.json_text import parse_table
from plait.core.base.codec.toml_text import read_toml
from plait.core.base.codec.yaml_text import load
from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.base.files import contents_within, reason_of
from plait.core.job.spec import Job
from plait.core.model.families import MODEL_TYPES
from plait.core.model.huggingface import number_type
from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.formats.base.literals import LiteralSettings, python_settings
from plait.formats.base.parsed_config import ParsedConfig, settings_of
from plait.formats.base.rows import count, share
from plait.formats.base.shell import Argument, read_script
from plait.formats.bridge import arguments_of, read_recipe
from plait.formats.deepspeed import FIRST, flattened, parse_deepspeed
from plait.formats.megatron.flags import FLAGS, RENAMED
from plait.formats.megatron.read import parse_megatron
from plait.formats.torchtitan.read import parse_torchtitan

LARGEST = 2 << 20
"""Maximum size of a configuration file in bytes."""
YAML = (".yaml", ".yml")
SIZES = {row.name for row in FLAGS.rows if row.kind in (count, share) and not row.part}
"""Flags that set a size; a command line of Megatron-LM has at least one of them."""
TORCHTITAN_PROGRAM = (
    "torchtitan",
    "Name its configuration (.toml, or .py:FUNCTION), and say what the command line changes as settings: strategy.tp=8",
)
NEMO = "Name the recipe of Megatron-Bridge that took its place (.py), or a job (.toml)"
FOREIGN_FLAGS = {
    "deepspeed": ("DeepSpeed", "Name its configuration (--deepspeed's .json), and model.preset=... beside it"),
    "deepspeed-config": ("DeepSpeed", "Name its configuration (.json), and model.preset=... beside it"),
    "config-name": ("NeMo", NEMO),
    "job.": TORCHTITAN_PROGRAM, "training.": TORCHTITAN_PROGRAM, "parallelism.": TORCHTITAN_PROGRAM,
}  # fmt: skip
"""Flags, or prefixes of flags, that start programs with configurations of their own: (program, what
to do instead)."""
PLAIN = (".sh", ".bash", ".txt", ".args", ".slurm", ".sbatch", "")
"""File suffixes of scripts and texts from which flags are read."""
SCRIPTS = re.compile(r"\.(sh|bash|slurm|sbatch)$")
COMMENTS = re.compile(rb"\A(?:\s*+#[^\n]*+\n)++")
"""Comment lines before a JSON document."""
JSON = "Name a plan (JOB.plan.json), DeepSpeed's configuration or Hugging Face's config.json"


def read_configuration(path: Path, overrides: Sequence[str] = ()) -> ParsedConfig | None:
    """Return the configuration in a file of another framework; None if the file is a job or a plan
    of Plait.

    overrides: ``section.key=value`` settings for what the file leaves to its run. Raises JobError
    naming the file.
    """
    try:
        return _read(path, path.suffix.partition(":")[0], settings_of(overrides))
    except JobError as error:
        raise error if error.file else error.in_file(str(path)) from None


FRAMEWORK_FILES = {
    "megatron": ("a command line of Megatron-LM", "cluster.preset=h100"),
    "torchtitan": ("a configuration of torchtitan", "cluster.preset=h100 cluster.ranks=64"),
    "deepspeed": (
        "a configuration of DeepSpeed",
        "model.preset=llama3-8b data.sequence_length=4096 cluster.preset=h100 cluster.ranks=64",
    ),
    "plait": ("a model's configuration of Hugging Face", "cluster.preset=h100 cluster.ranks=64"),
}
"""Files that only ``plait plan`` reads: what they are, and settings that let it plan one, by
framework."""


def no_job_error(path: Path) -> JobError | None:
    """Return the error of a file of another framework, which only ``plait plan`` reads; None for a
    job, a plan, or no file."""
    if not path.is_file():
        return None
    try:
        parsed = read_configuration(path)
        framework = parsed.framework if parsed else ""
    except JobError as error:
        if path.suffix not in PLAIN or (SCRIPTS.match(path.suffix) and not error.key):
            return error
        framework = "megatron" if SCRIPTS.match(path.suffix) else ""
    if not framework:
        return None
    what, settings = FRAMEWORK_FILES[framework]
    own = f'write huggingface = "{path}" below [model] of a job' if framework == "plait" else "write a job of your own"
    fix = f"Plan it (plait plan {path} {settings}), or {own} (plait init JOB.toml)"
    return JobError(f"is {what}, and no job to train", file=str(path), fix=fix)


def _read(path: Path, kind: str, settings: Mapping[str, str]) -> ParsedConfig | None:
    if kind == ".json":
        return _json(path, settings)
    if kind == ".toml":
        return _toml(path)
    if kind == ".py":
        return _python(path, settings)
    if kind in YAML:
        values = load(_text(path))
        _check_no_job(path, values, "YAML")
        if isinstance(values, Mapping) and {"trainer", "model"} <= cast("Mapping[str, Any]", values).keys():
            raise JobError("is a configuration of NeMo 1, which is not read", file=str(path), fix=NEMO)
        return _megatron(path, list(arguments_of(values)), settings)
    if kind in PLAIN:
        return _flags(path, settings)
    return None


def _text(path: Path) -> str:
    try:
        return contents_within(path, LARGEST).decode()
    except (OSError, ValueError) as error:
        raise JobError(f"cannot be read: {reason_of(error)}", file=str(path), fix="Name a text file") from None


def _flags(path: Path, settings: Mapping[str, str]) -> ParsedConfig:
    script = read_script(_text(path), str(path))
    if not script.arguments:
        why = f" ({' '.join(script.notes).rstrip('.')})" if script.notes else ""
        fix = "Name a job (.toml), a plan (.json), a configuration, or the script that has them"
        raise JobError(f"has no --flags{why}", file=str(path), fix=fix)
    told = _megatron(path, script.arguments, settings, script.why)
    told.notes += script.notes
    return told


def _megatron(
    path: Path,
    arguments: Sequence[Argument],
    settings: Mapping[str, str],
    why: Mapping[str, str] = MappingProxyType({}),
) -> ParsedConfig:
    """Return the configuration from Megatron-LM's flags. Raises JobError if no flag sets a size of
    the model or job."""
    if not SIZES & {RENAMED.get(one.name, one.name) for one in arguments}:
        for one in arguments:
            if told := FOREIGN_FLAGS.get(one.name, FOREIGN_FLAGS.get(one.name.partition(".")[0] + ".")):
                problem = f"starts {told[0]} (--{one.name}), whose command line is not read"
                raise JobError(problem, file=str(path), fix=told[1])
        first = ", ".join(str(one)[:60] for one in arguments[:3])
        problem = f"has {len(arguments)} flags, none of which says a size of Megatron-LM's: {first}"
        fix = "Name a command line of Megatron-LM, or a job (.toml)"
        raise JobError(problem, file=str(path), fix=fix)
    return parse_megatron(str(path), arguments, overrides=settings, causes=why)


def _json(path: Path, settings: Mapping[str, str]) -> ParsedConfig | None:
    try:
        data = contents_within(path, LARGEST)
    except (OSError, ValueError):
        return None  # reading the plan reports the error
    try:
        values = parse_table(COMMENTS.sub(lambda found: b"\n" * found[0].count(b"\n"), data), unique=True)
    except ValueError as error:
        raise JobError(f"cannot be read as a plan or a configuration: {error}", file=str(path), fix=JSON) from None
    _check_no_job(path, values, "JSON")
    if "strategy" in values or "hash" in values:
        return None  # a plan
    if FIRST & values.keys():
        return parse_deepspeed(str(path), values)
    if "model_type" in values:
        return parse_huggingface(path, values, settings)
    some = ", ".join(key[:40] for key in list(values)[:3]) or "none"
    problem = f"is neither a plan nor a configuration of DeepSpeed or Hugging Face (its keys: {some})"
    raise JobError(problem, file=str(path), fix=JSON)


def _check_no_job(path: Path, values: Any, syntax: str) -> None:
    """Raise JobError for a job in another syntax than TOML."""
    keys = cast("Mapping[str, Any]", values).keys() if isinstance(values, Mapping) else ()
    if "model" in keys and Job.model_fields.keys() >= set(keys):
        fix = "Write its keys as TOML into JOB.toml: a table is [train], a key is steps = 100"
        raise JobError(f"is a job in {syntax}, and a job is TOML", file=str(path), fix=fix)


def _toml(path: Path) -> ParsedConfig | None:
    if not path.is_file():
        return None  # reading the job reports the error
    values = read_toml(path)
    if not {"training", "parallelism"} & values.keys() or {"train", "data", "run"} & values.keys():
        return None
    old = {key.replace("experimental.", "parallelism."): value for key, value in flattened(values)}
    return parse_torchtitan(str(path), LiteralSettings(values=old), python=False)


def _python(path: Path, overrides: Mapping[str, str]) -> ParsedConfig:
    name, _, function = path.name.partition(":")
    file = path.with_name(name)
    settings = python_settings(_text(file), str(file), function)
    modules = {module.partition(".")[0] for module in settings.modules}
    if "torchtitan" in modules:
        return parse_torchtitan(str(file), settings, python=True)
    if "megatron" in modules or any("parallel_size" in key for key in settings.values):
        return read_recipe(str(file), settings, overrides)
    fix = "Name a module of torchtitan's configurations, or a recipe of Megatron-Bridge"
    raise JobError("imports neither torchtitan nor megatron", file=str(file), fix=fix)


PRECISIONS: Mapping[str, Precision] = {"bfloat16": "bf16-mixed", "float32": "fp32", "float64": "fp64", "": "fp32"}
"""Precisions for planning, by the dtype in the configuration."""


def parse_huggingface(path: Path, values: Mapping[str, Any], overridden: Collection[str] = ()) -> ParsedConfig:
    """Return the configuration of a Hugging Face ``config.json``: the model alone, as keys that
    Plait trains or as the preset with its shapes, and the precision.

    overridden: keys set on the command line. Raises JobError if Plait knows neither the model nor
    its precision."""
    told = _shapes(path, values)
    if "train.precision" in overridden:
        return told
    names = [str(values[key]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if values.get(key) is not None]
    if len(set(names)) > 1:
        raise told.refuse("dtype", f"'{names[0]}' differs from torch_dtype = '{names[1]}'", "Keep one of the two")
    if (kind := number_type(values)) not in PRECISIONS:
        problem = f"'{kind}' is no precision that Plait computes in"
        fix = "Add train.precision=bf16-mixed to the command (as large, and as fast), or fp32"
        raise told.refuse("dtype" if "dtype" in values else "torch_dtype", problem, fix)
    told.set("train.precision", PRECISIONS[kind])
    if kind:
        told.notes.append(f"The file has {kind}: it is planned in {PRECISIONS[kind]} (train.precision).")
    return told


PUBLISHED_SHAPES = {
    "num_hidden_layers": "num_layers", "hidden_size": "hidden", "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden",
}  # fmt: skip
"""Keys that identify a published model, with their names in a preset."""
OTHER_SHAPES = {
    "head_dim": "head_size", "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "num_local_experts": "experts.count", "num_experts": "experts.count", "n_routed_experts": "experts.count",
    "num_experts_per_tok": "experts.per_token", "moe_intermediate_size": "experts.ffn_hidden",
    "n_shared_experts": "experts.shared", "shared_expert_intermediate_size": "experts.shared_ffn_hidden",
    "first_k_dense_replace": "experts.first_dense", "decoder_sparse_step": "experts.every",
    "moe_layer_freq": "experts.every",
}  # fmt: skip
"""Keys that must equal the preset's value if they are present, with their names in a preset."""
FREE_SHAPES = {"vocab_size": "vocab", "tie_word_embeddings": "tied_embeddings"}
"""Keys of a Hugging Face configuration that may differ from the preset's value, with their names in
a preset."""


def _shapes(path: Path, values: Mapping[str, Any]) -> ParsedConfig:
    kind = str(values["model_type"])
    if kind in MODEL_TYPES:
        return ParsedConfig("plait", str(path), {"model": {"huggingface": str(path)}})
    inner = values.get("text_config", values)
    said: Mapping[str, Any] = cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else {}
    files = sorted((specs_folder() / "models").glob(f"{re.split(r'[^a-z]', kind)[0] or 'none'}*.toml"))
    presets = {file.stem: ModelSpec.preset(file.stem, file.parent) for file in files}
    alike = {
        name: _unlike(one, said) for name, one in presets.items()
        if all(said.get(key) == getattr(one, ours) for key, ours in PUBLISHED_SHAPES.items())
    }  # fmt: skip
    fix = f"Supported: {', '.join(MODEL_TYPES)}, and shapes of presets. Describe it by keys of [model] in a job"
    if not alike:
        raise JobError(f"model_type '{kind}' is not supported", file=str(path), key="model_type", fix=fix)
    name = min(alike, key=lambda name: len(alike[name]))
    if others := alike[name]:
        has = " and ".join(f"{key}={value}" for key, value in others.items())
        problem = f"a {kind} is no {name}, though its layers are as many and as wide: it has {has}"
        raise JobError(problem, file=str(path), key=next(iter(others)), fix=fix)
    own = {FREE_SHAPES[key]: value for key, value in _differing(presets[name], said, FREE_SHAPES).items()}
    told = ParsedConfig("plait", str(path), {"model": {"preset": name} | own})
    changed = "".join(f" with {key}={value}" for key, value in own.items())
    told.notes.append(f"A {kind} of these shapes is planned as the preset {name}{changed}; other keys are not read.")
    return told


def _differing(preset: ModelSpec, config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of ``config`` that have another value than the preset, with that value.
    names: the preset's field by key."""

    def own(path: str) -> Any:
        return reduce(lambda part, name: getattr(part, name, None), path.split("."), cast("Any", preset)) or 0

    return {key: config[key] for key, ours in names.items() if config.get(key) is not None and config[key] != own(ours)}


def _unlike(preset: ModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys and values that differ from the preset's; absent keys count as equal. Exception:
    a model has experts only if its configuration says how many."""
    if preset.experts and not any(config.get(key) for key, ours in OTHER_SHAPES.items() if ours == "experts.count"):
        return {"num_local_experts": 0}
    dense = {"mlp_only_layers": config["mlp_only_layers"]} if config.get("mlp_only_layers") else {}
    return _differing(preset, config, OTHER_SHAPES) | dense
