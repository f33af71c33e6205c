"""The reference of a job file's settings. It is made from types, defaults and docstrings of the
sections, so that it cannot differ from what ``Job`` accepts. It also has the settings' names in
other frameworks."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import Any, TypeGuard, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from plait.core.base.codec.data import ExtraValue, allowed
from plait.core.base.codec.toml_text import show
from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError, nearest
from plait.core.job.framework_names import PEERS, VALUES, key_of
from plait.core.job.spec import Job
from plait.core.model.families import MODEL_TYPES
from plait.core.model.spec import ModelSpec

COMMAND = "plait job --markdown > docs/job.md"
PEERS_COMMAND = "plait job --peers > docs/reference/coming-from.md"


@dataclass(frozen=True)
class Setting:
    """One setting. default: as TOML; empty if the setting is required, ``-`` if it is optional and
    has no default."""

    name: str
    allowed: str
    default: str
    meaning: str

    def lines(self) -> str:
        """Return the text for a terminal: accepted values, default and meaning."""
        default = {"": "needed", "-": "not set by default"}.get(self.default, f"default {self.default}")
        return f"{self.name}: {self.allowed} ({default}). {self.meaning}"


@dataclass(frozen=True)
class SettingsTable:
    """One section of the job file with its keys."""

    name: str
    meaning: str
    keys: tuple[Setting, ...]


@cache
def reference() -> tuple[SettingsTable, ...]:
    """Return every section with its keys, in the order of the job file."""
    found = [SettingsTable("model", _words(_MODEL), (*_MODEL_KEYS, *_shapes()))]
    for name, field in Job.model_fields.items():
        if _is_section(section := field.annotation):
            found.append(SettingsTable(name, _words(section.__doc__ or ""), tuple(_keys(name, section))))
    return tuple(found)


def look_up(query: str) -> SettingsTable | tuple[Setting, ...]:
    """Return the section called ``query``, or the settings that ``query`` may mean: a whole name,
    or parts of it in order, such as ``steps``, ``slices.batch``.

    Raises JobError with the nearest known name.
    """
    tables = reference()
    for table in tables:
        if query in (table.name, f"[{table.name}]"):
            return table
    keys = [key for table in tables for key in table.keys]
    parts = query.split(".")
    exact = tuple(key for key in keys if key.name == query or key.name.startswith(query + "."))
    # `part in rest` consumes the iterator up to the match: parts must occur in this order, the last one last.
    like = (key for key in keys for rest in [iter(key.name.split("."))] if all(part in rest for part in parts))
    found = exact or tuple(key for key in like if key.name.split(".")[-1] == parts[-1])
    if not found and (own := key_of(query)):
        raise JobError(f"is called {own} here", key=query, fix=f"Ask for {own}")
    if not found:
        known = [*(table.name for table in tables), *(key.name for key in keys)]
        last = {name.split(".")[-1]: name for name in known}
        close = nearest(query, known) or nearest(parts[-1], last)
        raise JobError(f"no setting has this name{close}", key=query, fix="plait job shows all of them")
    return found


def markdown() -> str:
    """Return the text of ``docs/job.md``."""
    lines = [_HEAD.format(command=COMMAND, example=(specs_folder() / "jobs" / "quickstart.toml").read_text().strip())]
    for table in reference():
        lines += ["", f"## [{table.name}]", "", _ticks(table.meaning), ""]
        lines += ["| key | what it takes | default | meaning |", "|---|---|---|---|"]
        for key in table.keys:
            default = {"": "needed", "-": ""}.get(key.default, f"`{key.default}`")
            cells = (f"`{key.name}`", key.allowed, default, _ticks(key.meaning))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def coming_from() -> str:
    """Return the text of ``docs/reference/coming-from.md``."""
    lines = [_PEERS_HEAD.format(command=PEERS_COMMAND)]
    for key, row in PEERS.items():
        flags = " ".join(f"--{flag}" for flag in row.megatron.split())
        cells = [", ".join(f"`{name}`" for name in names.split()) for names in (flags, *row[1:-1])]
        lines.append(f"| `{key}` | {' | '.join((*cells, row.write.removeprefix('Write ')))} |")
    lines += [_PEERS_VALUES]
    lines += [f'| `{key}` | `"{theirs}"` | `"{own}"` |' for (key, theirs), own in VALUES.items()]
    return "\n".join(lines) + "\n"


def _keys(prefix: str, section: type[BaseModel]) -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        inner = [part for part in (field.annotation, *get_args(field.annotation)) if _is_section(part)]
        yield Setting(
            f"{prefix}.{name}",
            _alternatives(field.annotation, list(field.metadata), f"{prefix}.{name}"),
            "" if field.is_required() else "-" if default is None else _toml(default),
            _words(field.description or ""),
        )
        for part in inner:
            yield from _keys(f"{prefix}.{name}", part)


def _alternatives(annotation: Any, limits: list[Any], name: str) -> str:
    """Return the accepted values as ``allowed`` does, but without the keys of a table, which have
    lines of their own."""
    parts = [part for part in get_args(annotation) if part is not NoneType]
    if not any(_is_section(part) for part in parts):
        return allowed(annotation, limits)
    if get_origin(annotation) in (tuple, list):
        return f"a list, each a table [{name}]"
    words = [f"a table [{name}]" if _is_section(part) else allowed(part) for part in parts]
    return " or ".join([*words, *(show(str(word)) for word in limits if isinstance(word, ExtraValue))])


def _shapes() -> Iterator[Setting]:
    """Yield the settings of ``[model]`` that are fields of ``ModelSpec``."""
    types, meanings = get_type_hints(ModelSpec), _docstrings(ModelSpec)
    for field in fields(ModelSpec):
        default = "" if field.default is MISSING else "-" if field.default is None else _toml(field.default)
        yield Setting(f"model.{field.name}", allowed(types[field.name]), default, _words(meanings.get(field.name, "")))


def _docstrings(owner: type) -> dict[str, str]:
    """Return the docstrings below a class's fields, by field."""
    (body,) = (
        node.body
        for node in ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        if isinstance(node, ast.ClassDef)
    )
    return {
        first.target.id: second.value.value
        for first, second in pairwise(body)
        if isinstance(first, ast.AnnAssign)
        and isinstance(first.target, ast.Name)
        and isinstance(second, ast.Expr)
        and isinstance(second.value, ast.Constant)
        and isinstance(second.value.value, str)
    }


def _is_section(part: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(part, type) and issubclass(part, BaseModel)


def _toml(value: Any) -> str:
    return show(value.model_dump(mode="json") if isinstance(value, BaseModel) else value)


def _words(text: str) -> str:
    return " ".join(text.split())


def _ticks(text: str) -> str:
    return text.replace("``", "`")


_MODEL = """The model: a preset, a Hugging Face config, or all shapes. Keys beside a preset or a config replace
what it says."""
_KINDS = ", ".join(f"``{kind}``" for kind in MODEL_TYPES)
_MODEL_KEYS = (
    Setting(
        "model.preset",
        "a text",
        "-",
        "A file of ``specs/models``, such as ``gpt3-125m``. Its vocabulary counts with bytes, else the tokenizer's.",
    ),
    Setting("model.huggingface", "a text", "-", f"A Hugging Face folder or its ``config.json`` ({_KINDS})."),
)
_HEAD = """<!-- Made from the types in plait/core/job/settings.py and plait/core/model/spec.py: do not edit, run
     {command} -->
# Settings of a job

A job is a TOML file. `plait train JOB section.key=value ...` replaces its settings for one run, such as
`train.steps=100`; `plait job KEY` looks a setting up. What is not written has the default below.
Values are taken as they are: no text for a number, no number for a truth value.

A relative path in a file is meant from that file's folder, one on the command line from the current folder;
`run.folder`, where results go, always from the current folder.

```toml
{example}
```"""
_PEERS_HEAD = """<!-- Made from the table in plait/core/job/framework_names.py: do not edit, run
     {command} -->
# Coming from another framework

What Megatron-LM, torchtitan, DeepSpeed and transformers call a job's keys. Whoever writes one of these names in a
job, or as an option of `plait train` and `plait plan`, is told the key; `plait job NAME` looks it up.
Behaviour differs in details: [job.md](../job.md) says what each key does,
[features.md](../features.md) what there is.
Whole configurations are read by `plait plan FILE` ([plan.md](../plan.md)).

    plait job tensor-model-parallel-size

| key | Megatron-LM | torchtitan | DeepSpeed | transformers | others | what to write |
|---|---|---|---|---|---|---|"""
_PEERS_VALUES = """
Values:

| key | theirs | here |
|---|---|---|"""
