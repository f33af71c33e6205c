"""Job files: written from options or copied from shipped examples, with a comment above each key.

Batch size, learning rate and steps, which no option sets, begin with published values. The planner
chooses the rest. A file is planned before it is written: a job that does not fit is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from plait.core.base.errors import JobError, nearest
from plait.core.base.text import paragraph

if TYPE_CHECKING:
    from plait.core.model.spec import ModelSpec

SMALL, CPU, HERE = "small", "cpu", "here"
SMALL_MODEL: Mapping[str, Any] = {"family": "gpt", "num_layers": 4, "hidden": 128, "num_heads": 4}
"""The model ``small``: 0.8M parameters, which a CPU trains in minutes."""
LONGEST, LONGEST_CPU = 8192, 512
"""The longest default sequence, in tokens; and the longest on CPUs."""
_ACCELERATORS = re.compile(r"(?:(\d{1,7})\s*x?\s*)?([a-z][\w-]*)?", re.IGNORECASE)
COLUMNS = 98
"""The width of a comment in columns, without its ``# ``."""
_SECTION = re.compile(r"#?\[+([\w.]+)\]+\s*$")
_KEY = re.compile(r"#?([\w-]+)\s*=")


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """The options of ``plait init``, as read. name: of the model, as the user wrote it. keys: of
    [model]. spec: the model's shapes. count, kind: of accelerators. target: where the job runs;
    partition: its partition or namespace. sequence_length: tokens of a sequence. data: paths.
    tokenizer: its file or name."""

    name: str
    keys: Mapping[str, Any]
    spec: ModelSpec
    count: int
    kind: str
    target: str
    partition: str
    sequence_length: int
    data: list[str]
    tokenizer: str

    @property
    def weights(self) -> Path | None:
        """The model's Hugging Face folder; None if there is none."""
        return self.keys.get("huggingface")

    @property
    def node_keys(self) -> list[Line]:
        """Lines of the job file with the number of nodes, and of GPUs per node."""
        from plait.core.cluster.hardware import Cluster

        if self.kind == CPU:
            return [("nodes", 1), ("gpus", 0)]
        each = Cluster.preset(self.kind).ranks_per_node
        return [("nodes", -(-self.count // each)), ("gpus", min(self.count, each))]


def read_options(options: Mapping[str, str]) -> NewJob:
    """Read options by their names; missing options have defaults. Raises JobError that lists the
    allowed values."""
    name = options.get("model", SMALL)
    keys, spec = _model(name)
    count, kind = _accelerators(options.get("accelerators", "1xcpu" if name == SMALL else "8xh100"))
    place, part = _place(options.get("on", HERE))
    proposed = 128 if name == SMALL else min(spec.max_sequence, LONGEST_CPU if kind == CPU else LONGEST)
    file = keys["huggingface"] / "tokenizer.json" if "huggingface" in keys else Path()
    return NewJob(
        name=name, keys=keys, spec=spec, count=count, kind=kind, target=place, partition=part,
        sequence_length=_sequence(options.get("sequence-length", str(proposed)), spec.max_sequence),
        data=_data(options.get("data", "python-stdlib"), mounted=place == "kubernetes"),
        tokenizer=_tokenizer(options.get("tokenizer", str(file) if file.is_file() else "bytes")),
    )  # fmt: skip


def _model(text: str) -> tuple[Mapping[str, Any], ModelSpec]:
    """Return (keys of [model], the model's shapes) for a preset, a Hugging Face folder or
    ``small``. Raises JobError for anything else."""
    from plait.core.base.env import specs_folder
    from plait.core.model.spec import ModelSpec

    folder = specs_folder() / "models"
    presets = sorted(file.stem for file in folder.glob("*.toml"))
    if text == SMALL:
        return SMALL_MODEL, ModelSpec.from_dict({**SMALL_MODEL, "vocab": 257, "max_sequence": 1 << 20})
    if text in presets:
        return {"preset": text}, ModelSpec.from_dict(ModelSpec.preset_values(text, folder))
    path = Path(text).expanduser()
    if text and path.is_dir():
        if not (path / "config.json").is_file():
            fix = "Name the folder that holds config.json, the weights and tokenizer.json"
            raise JobError(f"the folder '{text}' has no config.json", key="--model", fix=fix)
        return {"huggingface": path}, ModelSpec.from_huggingface(path)
    known = ", ".join(presets)
    problem = f"'{text}' is no preset{nearest(text.lower(), presets)} and no folder"
    raise JobError(problem, key="--model", fix=f"Use {SMALL}, a Hugging Face folder, or one of {known}")


def accelerator_kinds() -> list[str]:
    """Return the known kinds of accelerators: the shipped presets of clusters with GPUs."""
    from plait.core.base.env import specs_folder
    from plait.core.cluster.hardware import Cluster

    names = sorted(file.stem for file in (specs_folder() / "clusters").glob("*.toml"))
    return [name for name in names if Cluster.preset(name).device.kind == "cuda"]


def _accelerators(text: str) -> tuple[int, str]:
    """Return (number of accelerators, their kind), from text such as ``8xh100``. Raises
    JobError."""
    from plait.core.base.process import usable_cores
    from plait.core.cluster.hardware import Cluster

    known = accelerator_kinds()
    fix = f"Write COUNTxKIND, such as 8xh100 or 2xcpu. Kinds: {CPU} (processors), {', '.join(known)}"
    found = _ACCELERATORS.fullmatch(text)
    if not text or not found or not found.group(2):
        raise JobError(f"'{text}' names no accelerators", key="--accelerators", fix=fix)
    count, kind = int(found.group(1) or 1), found.group(2).lower()
    if kind != CPU and kind not in known:
        raise JobError(f"no accelerator is called '{kind}'{nearest(kind, known)}", key="--accelerators", fix=fix)
    if count < 1:
        raise JobError("0 accelerators train nothing", key="--accelerators", fix=fix)
    if kind == CPU:
        if count > (cores := usable_cores()):
            fix = f"Use at most {cores}xcpu"
            raise JobError(f"{count} ranks would share {cores} processors here", key="--accelerators", fix=fix)
        return count, kind
    each = Cluster.preset(kind).ranks_per_node
    if count > each and count % each:
        fix = f"Use at most {each}, or a multiple of {each}"
        raise JobError(f"{count} accelerators do not fill whole hosts of {each} {kind}", key="--accelerators", fix=fix)
    return count, kind


def _sequence(text: str, most: int) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= most:
        fix = f"Use a whole number from 1 to {most}"
        raise JobError(f"'{text}' is no length of this model's sequences", key="--sequence-length", fix=fix)
    return int(text)


def _data(text: str, *, mounted: bool) -> list[str]:
    """Return the paths of the data. mounted: True if they lie on volumes that only pods may see, so
    that they are not checked. Raises JobError for a missing file."""
    from plait.core.job.settings import STDLIB

    paths = [part.strip() for part in text.split(",") if part.strip()]
    fix = f"Name files and folders with commas between them, or {STDLIB}, which is always there"
    if not paths:
        raise JobError("no data are named", key="--data", fix=fix)
    for path in paths:
        if not (mounted or path == STDLIB or "://" in path or Path(path).expanduser().exists()):
            raise JobError(f"'{path}' is not there", key="--data", fix=fix)
    return paths


def _tokenizer(text: str) -> str:
    from plait.core.job.settings import BYTES

    if text != BYTES and not Path(text).expanduser().is_file():
        fix = f"Name the tokenizer.json of a Hugging Face tokenizer, or {BYTES}"
        raise JobError(f"'{text}' is no file", key="--tokenizer", fix=fix)
    return text


def _place(text: str) -> tuple[str, str]:
    """Return (where the job runs, its partition or namespace), from text such as ``slurm:gpu``.
    Raises JobError."""
    place, _, part = text.partition(":")
    if place not in (HERE, "slurm", "kubernetes") or (place == HERE and part):
        fix = "Use here, slurm, slurm:PARTITION, kubernetes or kubernetes:NAMESPACE"
        raise JobError(f"'{text}' is no place to run", key="--on", fix=fix)
    return place, part


# ---- the file ----

Line = str | tuple[str, Any]
"""An item of a section: a key with its value, or a line of text that is written unchanged."""
OWN_STRATEGY = """
## Without [strategy] the planner chooses all of it. To choose yourself:
#[strategy]
#tp = {tp}
#dp = {dp}
#pp = 1
#shard = "zero1"
"""


def job_text(new: NewJob, folder: Path) -> str:
    """Return the text of the job file. folder: the file's folder, from which relative paths
    start."""
    from plait.core.base.codec.toml_text import show

    command = f"plait train FILE{'' if new.target == HERE else ' --on ' + new.target}"
    text = f"# {new.name} on {new.count} x {new.kind}. plait plan FILE plans it; {command} trains it.\n"
    text += "# plait job KEY explains a key. Lines that begin with # and a key show what else may be said.\n"
    tp = gcd(8, new.count, new.spec.num_kv_heads)
    for name, keys in _sections(new, folder).items():
        lines = [one if isinstance(one, str) else f"{one[0]} = {show(one[1])}" for one in keys]
        text += "\n".join(["", f"[{name}]", *lines, ""])
        text += OWN_STRATEGY.format(tp=tp, dp=new.count // tp) if name == "train" else ""
    return with_comments(text)


def _sections(new: NewJob, folder: Path) -> dict[str, list[Line]]:
    model = [(key, _from(folder, value) if isinstance(value, Path) else value) for key, value in new.keys.items()]
    paths = new.data if new.target == "kubernetes" else [_from(folder, one) for one in new.data]
    found: dict[str, list[Line]] = {
        "model": [*model],
        "data": [("text", paths[0] if len(paths) == 1 else paths), ("tokenizer", _from(folder, new.tokenizer)),
                 ("sequence_length", new.sequence_length)],
        "train": _train_keys(new, folder),
        "cluster": [*([("preset", new.kind)] if new.kind != CPU else []), ("ranks", new.count)],
        "run": [("device", "cpu")] if new.kind == CPU else ['#name = "first"'],
    }  # fmt: skip
    if new.target == "slurm":
        part = ("partition", new.partition) if new.partition else '#partition = "gpu"'
        found["slurm"] = [part, *new.node_keys, '#time = "24:00:00"', '#account = "project"', "#spares = 1"]
    if new.target == "kubernetes":
        part = ("namespace", new.partition) if new.partition else '#namespace = "training"'
        found["run"].append(("folder", "/data/runs"))
        found["kubernetes"] = [("image", "plait:latest"), part, *new.node_keys, ("volumes", ["data:/data"]),
                               '#kueue_queue = "queue"']  # fmt: skip
    return found


def _train_keys(new: NewJob, folder: Path) -> list[Line]:
    """Return keys of [train] with published values. Learning rates are those of Brown 2020 (arXiv
    2005.14165, table 2.1) up to a billion parameters, and of Touvron 2023 (arXiv 2307.09288,
    section 2.2) above. Batches have half a million tokens, one million from a billion parameters
    on, four million from twenty billion on (the same tables); fewer for fine-tuning and on CPUs."""
    size = new.spec.num_parameters
    rate, tokens = (6e-4, 1 << 19) if size < 1e9 else (3e-4, 1 << 20) if size < 20e9 else (1.5e-4, 1 << 22)
    steps, warmup, batch = 10_000, 500, tokens // new.sequence_length
    if new.name == SMALL:
        steps, warmup, rate = 400, 40, 3e-3
    tuned = new.weights if new.weights and any(new.weights.glob("*.safetensors")) else None
    if tuned:
        steps, warmup, rate, batch = 500, 20, 1e-5, 128
    batch = 16 if new.kind == CPU else batch
    found: list[Line] = [
        ("steps", steps), ("global_batch_size", max(1, -(-batch // new.count)) * new.count),
        ("micro_batch_size", "auto"), ("learning_rate", rate), ("min_learning_rate", float(f"{rate / 10:.3g}")),
        ("warmup_steps", warmup), '#optimizer = "muon"',
        ("precision", "fp32" if new.kind == CPU else "bf16-mixed"), ("eval_every", 100), ("checkpoint_every", 100),
    ]  # fmt: skip
    return [*found, ("init_from", _from(folder, tuned))] if tuned else found


def _from(folder: Path, name: str | Path) -> str:
    """Return a relative path as a job file in ``folder`` must name it; other words stay as they
    are."""
    from plait.core.job.settings import BYTES, STDLIB

    if name in (BYTES, STDLIB) or "://" in str(name):
        return str(name)
    path = Path(name).expanduser()
    return str(path) if path.is_absolute() else os.path.relpath(path.absolute(), folder.absolute())


def with_comments(text: str) -> str:
    """Return a job file with the meaning of each key above it, taken from the one table of
    settings.

    A line that begins with ``#`` and a key, or a section, is a setting that is left out, with a
    value to begin with. Lines of ``## text`` are remarks on this file and stay. Lines of ``# text``
    within a section are replaced, so that files cannot differ from the reference. Raises JobError
    for an unknown key.

    >>> print(with_comments("# A try.\\n\\n[train]\\n#steps = 3\\n"), end="")
    # A try.
    <BLANKLINE>
    [train]
    # Optimizer steps of the whole run.
    #steps = 3
    """
    return "".join(f"{line}\n" for line in _lines(text.strip().splitlines()))


def _lines(lines: list[str]) -> Iterator[str]:
    from plait.core.job.reference import reference

    meanings = {key.name: key.meaning.replace("``", "") for table in reference() for key in table.keys}
    section = ""
    for line in lines:
        if found := _SECTION.match(line):
            section = found.group(1)
        elif section and (found := _KEY.match(line)):
            name = f"{section}.{found.group(1)}"
            if name not in meanings:
                raise JobError("no setting has this name", key=name, fix="plait job shows all of them")
            yield from (f"# {one}" for one in paragraph(meanings[name], COLUMNS).splitlines())
        elif section and line.startswith("#") and not line.startswith("##"):
            continue
        yield line


# ---- writing, after planning ----


def examples() -> dict[str, Path]:
    """Return the shipped job files by name."""
    from plait.core.base.env import specs_folder

    return {file.stem: file for file in sorted((specs_folder() / "jobs").glob("*.toml"))}


def example(name: str) -> str:
    """Return the text of a shipped job file. Raises JobError that lists the names."""
    if name not in (known := examples()):
        fix = f"Use one of {', '.join(known)}"
        raise JobError(f"no example is called '{name}'{nearest(name, known)}", key="--example", fix=fix)
    return known[name].read_text()


def check_new_file(file: Path) -> None:
    """Raise JobError for a file that exists, whose folder does not exist, or whose name does not
    end in .toml."""
    if file.suffix != ".toml":
        raise JobError(f"'{file}' is no name of a job file", key="FILE", fix="Choose one that ends in .toml")
    if file.exists() or file.is_symlink():
        raise JobError("is there already, and is not overwritten", file=str(file), fix="Name another file")
    if not file.parent.is_dir():
        raise JobError(
            f"there is no folder {file.parent}", file=str(file), fix=f"Make it first: mkdir -p {file.parent}"
        )


def write_job(file: Path, text: str) -> str:
    """Write a new job file, whole or not at all, once its job could be planned. Return a sentence
    on the plan. Raises JobError, also if another process has made the file meanwhile, and
    InfeasiblePlan."""
    from plait.core.base.files import explained

    check_new_file(file)
    with explained(f"{file} cannot be written", fix="Choose another folder"):
        folder = Path(mkdtemp(prefix=".plait-init-", dir=file.parent))
        draft = file.parent / folder.name / file.name
        try:
            draft.write_text(text)
            told = _planned_sentence(draft, file)
            try:
                os.link(draft, file)
            except FileExistsError:
                check_new_file(file)
        finally:
            draft.unlink(missing_ok=True)
            folder.rmdir()
    return told


def _planned_sentence(draft: Path, file: Path) -> str:
    """Return a sentence on the strategy that the planner chooses. The draft's relative paths start
    from the folder of ``file``."""
    from plait.api.choices import close_job
    from plait.core.base.codec.toml_text import read_toml
    from plait.core.job.spec import Job
    from plait.train.data.tokenizer import load_tokenizer

    job = Job.from_dict(read_toml(draft), file.parent).named(file.stem)
    return close_job(job, load_tokenizer(job.data.tokenizer).vocab, None)[1]


def write_example(file: Path, name: str) -> str:
    """Write a shipped job file. It is planned unchanged first, unless it names a file that the user
    must provide. Return a sentence on the plan, or on that file."""
    text = example(name)
    if "\nhuggingface = " not in text:
        return write_job(file, text)
    check_new_file(file)
    with file.open("x") as out:
        out.write(text)
    return "it begins with the weights in the folder that model.huggingface names: change that, and plan it"


def next_commands(file: Path) -> list[str]:
    """Return commands to try a job with; a dry run only for a job that Plait can train."""
    from plait.core.job.spec import Job

    commands = [f"plait plan {file}"]
    with suppress(JobError):
        job = Job.read(file)
        job.check_trains(job.model_spec(vocab=1))
        commands.append(f"plait train {file} --dry-run")
    return commands
