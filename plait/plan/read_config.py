"""Configurations of other frameworks, read from a file: which kind a file is, and its job.

| file | read as |
|---|---|
| a shell script or a text with ``--flags`` | Megatron-LM's command line; also its YAML |
| YAML with ``trainer`` and ``model`` | NeMo 1's, on Megatron-LM's core (``read_nemo``) |
| ``.py`` (``FILE.py:FUNCTION``) | a configuration of torchtitan, or a recipe of Megatron-Bridge |
| ``.toml`` with a table ``[training]`` | torchtitan's, until February 2026 |
| ``.json`` with DeepSpeed's keys | DeepSpeed's, behind lines of ``#`` that ``--show`` prints |
| ``.json`` with a ``model_type`` | Hugging Face's: the model alone, or its preset (``read_huggingface``) |

Nothing of a file is executed. Any other TOML or JSON is a job or a plan of Plait.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from plait.core.base.codec.json_text import parse_table
from plait.core.base.codec.toml_text import read_toml
from plait.core.base.codec.yaml_text import load
from plait.core.base.errors import JobError
from plait.core.base.files import contents_within, reason_of
from plait.plan.megatron_flags import DEGREES, SAME, SHAPES
from plait.plan.read_bridge import arguments_of, read_recipe
from plait.plan.read_deepspeed import UNDERSTOOD, deepspeed_told, flattened
from plait.plan.read_huggingface import huggingface_told
from plait.plan.read_literals import LiteralSettings, python_settings
from plait.plan.read_megatron import megatron_told
from plait.plan.read_nemo import is_nemo, nemo_told
from plait.plan.read_shell import Argument, read_script
from plait.plan.read_torchtitan import torchtitan_told
from plait.plan.told import Told, settings_of

LARGEST = 2 << 20
"""Bytes of a configuration."""
YAML = (".yaml", ".yml")
TITAN = (
    "torchtitan",
    "Name its configuration (.toml, or .py:FUNCTION), and say what the command line changes as settings: strategy.tp=8",
)
OTHERS = {
    "deepspeed": ("DeepSpeed", "Name its configuration (--deepspeed's .json), and model.preset=... beside it"),
    "deepspeed-config": ("DeepSpeed", "Name its configuration (.json), and model.preset=... beside it"),
    "config-name": ("NeMo", "Name its configuration (.yaml), and say changes of it as settings: strategy.tp=8"),
    "job.": TITAN, "training.": TITAN, "parallelism.": TITAN,
}  # fmt: skip
"""Flags, and beginnings of flags, of programs with configurations of their own: whose, and what to do."""
PLAIN = (".sh", ".bash", ".txt", ".args", ".slurm", ".sbatch", "")
"""Ends of names of files whose flags are read."""
COMMENTS = re.compile(rb"\A(?:\s*+#[^\n]*+\n)++")
"""Lines before a JSON."""
JSON = "Name a plan (JOB.plan.json), DeepSpeed's configuration or Hugging Face's config.json"


def read_configuration(path: Path, overrides: Sequence[str] = ()) -> Told | None:
    """What a file says, if it is another framework's; None for a job and a plan of Plait. overrides:
    ``section.key=value`` settings that say what the file leaves to its run. Raises JobError naming the
    file."""
    try:
        return _read(path, path.suffix.partition(":")[0], settings_of(overrides))
    except JobError as error:
        raise error if error.file else error.in_file(str(path)) from None


def _read(path: Path, kind: str, said: Mapping[str, str]) -> Told | None:
    if kind == ".json":
        return _json(path, said)
    if kind == ".toml":
        return _toml(path)
    if kind == ".py":
        return _python(path, said)
    if kind in YAML:
        values = load(_text(path))
        return nemo_told(str(path), values) if is_nemo(values) else _megatron(path, list(arguments_of(values)), said)
    if kind in PLAIN:
        return _flags(path, said)
    return None


def _text(path: Path) -> str:
    try:
        return contents_within(path, LARGEST).decode()
    except (OSError, ValueError) as error:
        raise JobError(f"cannot be read: {reason_of(error)}", file=str(path), fix="Name a text file") from None


def _flags(path: Path, said: Mapping[str, str]) -> Told:
    script = read_script(_text(path), str(path))
    if not script.arguments:
        why = f" ({' '.join(script.notes).rstrip('.')})" if script.notes else ""
        fix = "Name a job (.toml), a plan (.json), a configuration, or the script that has them"
        raise JobError(f"has no --flags{why}", file=str(path), fix=fix)
    told = _megatron(path, script.arguments, said, script.why)
    told.notes += script.notes
    return told


def _megatron(
    path: Path, given: Sequence[Argument], said: Mapping[str, str], why: Mapping[str, str] = MappingProxyType({})
) -> Told:
    """The job of Megatron-LM's flags. Raises JobError where none of them says a job's shape."""
    if not {*DEGREES, *SHAPES} & {SAME.get(one.name, one.name) for one in given}:
        for one in given:
            if told := OTHERS.get(one.name, OTHERS.get(one.name.partition(".")[0] + ".")):
                problem = f"starts {told[0]} (--{one.name}), whose command line is not read"
                raise JobError(problem, file=str(path), fix=told[1])
        first = ", ".join(str(one)[:60] for one in given[:3])
        problem = f"has {len(given)} flags, none of which says a size of Megatron-LM's: {first}"
        fix = "Name a command line of Megatron-LM, or a job (.toml)"
        raise JobError(problem, file=str(path), fix=fix)
    return megatron_told(str(path), given, said=said, why=why)


def _json(path: Path, said: Mapping[str, str]) -> Told | None:
    try:
        data = contents_within(path, LARGEST)
    except (OSError, ValueError):
        return None  # said where a plan is read
    try:
        values = parse_table(COMMENTS.sub(lambda found: b"\n" * found[0].count(b"\n"), data), unique=True)
    except ValueError as error:
        raise JobError(f"cannot be read as a plan or a configuration: {error}", file=str(path), fix=JSON) from None
    if "strategy" in values or "hash" in values:
        return None  # a plan
    if {key.partition(".")[0] for key in UNDERSTOOD} & values.keys():
        return deepspeed_told(str(path), values)
    if "model_type" in values:
        return huggingface_told(path, values, said)
    some = ", ".join(key[:40] for key in list(values)[:3]) or "none"
    problem = f"is neither a plan nor a configuration of DeepSpeed or Hugging Face (its keys: {some})"
    raise JobError(problem, file=str(path), fix=JSON)


def _toml(path: Path) -> Told | None:
    if not path.is_file():
        return None  # said where a job is read
    values = read_toml(path)
    if "training" not in values and "parallelism" not in values:
        return None
    old = {key.replace("experimental.", "parallelism."): value for key, value in flattened(values)}
    return torchtitan_told(str(path), LiteralSettings(values=old), python=False)


def _python(path: Path, said: Mapping[str, str]) -> Told:
    name, _, function = path.name.partition(":")
    file = path.with_name(name)
    settings = python_settings(_text(file), str(file), function)
    modules = {module.partition(".")[0] for module in settings.modules}
    if "torchtitan" in modules:
        return torchtitan_told(str(file), settings, python=True)
    if "megatron" in modules or any("parallel_size" in key for key in settings.values):
        return read_recipe(str(file), settings, said)
    fix = "Name a module of torchtitan's configurations, or a recipe of Megatron-Bridge"
    raise JobError("imports neither torchtitan nor megatron", file=str(file), fix=fix)
