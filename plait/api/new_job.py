"""A job file from a few answers: what to train, on what, and where. Each answer is read by one function, so
that a question on a terminal and an option refuse the same words with the same paragraph.

What nobody is asked (batch, learning rate, steps) begins with published values, which the file shows with
what they mean. The planner chooses the rest. A file is planned before it is written: one that does not fit
is no beginning.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from plait.core.base.errors import JobError, nearest

if TYPE_CHECKING:
    from plait.core.model.spec import ModelSpec

SMALL, CPU, HERE = "small", "cpu", "here"
SHAPES: Mapping[str, Any] = {"family": "gpt", "num_layers": 4, "hidden": 128, "num_heads": 4}
"""The model ``small``: 0.8M parameters, which a CPU trains in minutes."""
LONGEST_CPU = 512
"""Tokens of a sequence that is proposed for processors."""
_ACCELERATORS = re.compile(r"(?:(\d{1,7})\s*x?\s*)?([a-z][\w-]*)?", re.IGNORECASE)


@dataclass(frozen=True)
class Wish:
    """Answers that were read so far, by the names of questions; text: as the user wrote them."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    text: dict[str, str] = field(default_factory=dict[str, str])

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def answer(self, question: JobQuestion, text: str) -> None:
        """Take an answer. Raises JobError that says what is allowed."""
        self.values[question.name] = question.read(text.strip(), self)
        self.text[question.name] = text.strip()


@dataclass(frozen=True)
class JobQuestion:
    """asks: for people. default: what an empty answer stands for. read: the value of an answer."""

    name: str
    asks: str
    default: Callable[[Wish], str]
    read: Callable[[str, Wish], Any]

    @property
    def option(self) -> str:
        """How the answer is given on the command line."""
        return f"--{self.name}"


@dataclass(frozen=True)
class ModelAnswer:
    """keys: of [model]. spec: its shapes. folder: of Hugging Face, if it is one's."""

    keys: Mapping[str, Any]
    spec: ModelSpec
    folder: Path | None = None


def _model(text: str, wish: Wish) -> ModelAnswer:
    from plait.core.base.env import specs_folder
    from plait.core.model.spec import ModelSpec

    folder = specs_folder() / "models"
    presets = sorted(file.stem for file in folder.glob("*.toml"))
    if text == SMALL:
        return ModelAnswer(SHAPES, ModelSpec.from_dict({**SHAPES, "vocab": 257, "max_sequence": 1 << 20}))
    if text in presets:
        return ModelAnswer({"preset": text}, ModelSpec.from_dict(ModelSpec.preset_values(text, folder)))
    path = Path(text).expanduser()
    if text and path.is_dir():
        if not (path / "config.json").is_file():
            fix = "Name the folder that holds config.json, the weights and tokenizer.json"
            raise JobError(f"the folder '{text}' has no config.json", key="--model", fix=fix)
        return ModelAnswer({"huggingface": path}, ModelSpec.from_huggingface(path), path)
    known = ", ".join(presets)
    problem = f"'{text}' is no preset{nearest(text.lower(), presets)} and no folder"
    raise JobError(problem, key="--model", fix=f"Use {SMALL}, a Hugging Face folder, or one of {known}")


def kinds() -> list[str]:
    """Kinds of accelerators that are known: clusters of GPUs that ship."""
    from plait.core.base.env import specs_folder
    from plait.core.cluster.hardware import Cluster

    names = sorted(file.stem for file in (specs_folder() / "clusters").glob("*.toml"))
    return [name for name in names if Cluster.preset(name).device.kind == "cuda"]


def _accelerators(text: str, wish: Wish) -> tuple[int, str]:
    """(how many, of which kind)."""
    from plait.core.base.process import usable_cores
    from plait.core.cluster.hardware import Cluster

    known = kinds()
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
        raise JobError(f"{count} are no whole hosts: each has {each} of {kind}", key="--accelerators", fix=fix)
    return count, kind


def _sequence(text: str, wish: Wish) -> int:
    most = wish["model"].spec.max_sequence
    if not text.isdecimal() or not 1 <= int(text) <= most:
        fix = f"Use a whole number from 1 to {most}"
        raise JobError(f"'{text}' is no length of this model's sequences", key="--sequence-length", fix=fix)
    return int(text)


def _proposed_sequence(wish: Wish) -> str:
    if wish.text["model"] == SMALL:
        return "128"
    cpu = wish["accelerators"][1] == CPU
    return str(min(wish["model"].spec.max_sequence, LONGEST_CPU if cpu else 8192))


def _data(text: str, wish: Wish) -> str | list[str]:
    from plait.core.job.settings import STDLIB

    paths = [part.strip() for part in text.split(",") if part.strip()]
    fix = f"Name files and folders with commas between them, or {STDLIB}, which is always there"
    if not paths:
        raise JobError("no data are named", key="--data", fix=fix)
    if wish["on"][0] != "kubernetes":  # whose volumes may be mounted in pods alone
        for path in paths:
            if path != STDLIB and "://" not in path and not Path(path).expanduser().exists():
                raise JobError(f"'{path}' is not there", key="--data", fix=fix)
    return paths[0] if len(paths) == 1 else paths


def _tokenizer(text: str, wish: Wish) -> str:
    from plait.core.job.settings import BYTES

    if text != BYTES and not Path(text).expanduser().is_file():
        fix = f"Name the tokenizer.json of a Hugging Face tokenizer, or {BYTES}"
        raise JobError(f"'{text}' is no file", key="--tokenizer", fix=fix)
    return text


def _proposed_tokenizer(wish: Wish) -> str:
    folder = wish["model"].folder
    return str(folder / "tokenizer.json") if folder and (folder / "tokenizer.json").is_file() else "bytes"


def _where(text: str, wish: Wish) -> tuple[str, str]:
    """(place, partition or namespace)."""
    place, _, part = text.partition(":")
    if place not in (HERE, "slurm", "kubernetes") or (place == HERE and part):
        fix = "Use here, slurm, slurm:PARTITION, kubernetes or kubernetes:NAMESPACE"
        raise JobError(f"'{text}' is no place to run", key="--on", fix=fix)
    return place, part


QUESTIONS = (
    JobQuestion("model", f"The model: a preset such as llama3-8b, a Hugging Face folder, or {SMALL} to try",
             lambda wish: SMALL, _model),
    JobQuestion("accelerators", "Accelerators, as COUNTxKIND: 8xh100, 64xh200, 2xcpu",
             lambda wish: "1xcpu" if wish.text["model"] == SMALL else "8xh100", _accelerators),
    JobQuestion("on", "Where it runs: here, slurm or slurm:PARTITION, kubernetes or kubernetes:NAMESPACE",
             lambda wish: HERE, _where),
    JobQuestion("sequence-length", "Tokens of a sequence", _proposed_sequence, _sequence),
    JobQuestion("data", "Data: files and folders, with commas between them", lambda wish: "python-stdlib", _data),
    JobQuestion("tokenizer", "The tokenizer: bytes, or a tokenizer.json", _proposed_tokenizer, _tokenizer),
)  # fmt: skip
"""In the order in which they are asked: a default may depend on the answers before."""


# ---- the file ----


def job_text(wish: Wish, folder: Path) -> str:
    """The file of answers, to lie in ``folder``."""
    from plait.api.commented import commented
    from plait.core.base.codec.toml_text import show

    count, kind = wish["accelerators"]
    command = f"plait train FILE{'' if wish['on'][0] == HERE else ' --on ' + wish['on'][0]}"
    lines = [
        f"# {wish.text['model']} on {count} x {kind}. plait plan FILE plans it; {command} trains it.",
        "# plait job KEY explains a key. Lines that begin with # and a key show what else may be said.",
    ]
    for name, keys in _sections(wish, folder).items():
        lines += ["", f"[{name}]"]
        lines += [one if isinstance(one, str) else f"{one[0]} = {show(one[1])}" for one in keys]
        lines += OWN_STRATEGY if name == "train" else []
    return commented("\n".join(lines))


OWN_STRATEGY = [
    "", "## Without [strategy] the planner chooses all of it. To choose yourself:", "#[strategy]", "#tp = 8", "#dp = 1",
    "#pp = 1", '#shard = "zero1"',
]  # fmt: skip
Line = str | tuple[str, Any]
"""Of a section: a key with its value, or a line as it is to stand."""


def _sections(wish: Wish, folder: Path) -> dict[str, list[Line]]:
    model, (count, kind), (place, part) = wish["model"], wish["accelerators"], wish["on"]
    found: dict[str, list[Line]] = {
        "model": [(key, _from(folder, value) if isinstance(value, Path) else value) for key, value in
                  model.keys.items()],
        "data": _data_keys(wish, folder),
        "train": _train_keys(wish, folder),
        "cluster": [*([("preset", kind)] if kind != CPU else []), ("ranks", count)],
        "run": [("device", "cpu")] if kind == CPU else ["#name = \"first\""],
    }  # fmt: skip
    if place == "kubernetes":
        found["run"].append(("folder", "/data/runs"))
    if place == "slurm":
        found["slurm"] = _slurm_keys(count, kind, part)
    if place == "kubernetes":
        found["kubernetes"] = _kubernetes_keys(count, kind, part)
    return found


def _data_keys(wish: Wish, folder: Path) -> list[Line]:
    from plait.core.job.settings import BYTES, STDLIB

    data, place = wish["data"], wish["on"][0]
    paths = [data] if isinstance(data, str) else data
    if place != "kubernetes":
        paths = [one if one == STDLIB or "://" in one else _from(folder, Path(one)) for one in paths]
    tokenizer = wish["tokenizer"]
    told: Line = ("tokenizer", tokenizer if tokenizer == BYTES else _from(folder, Path(tokenizer)))
    return [("text", paths[0] if len(paths) == 1 else paths), told, ("sequence_length", wish["sequence-length"])]


def _train_keys(wish: Wish, folder: Path) -> list[Line]:
    model, (count, kind), length = wish["model"], wish["accelerators"], wish["sequence-length"]
    size, tuned = model.spec.num_parameters, _has_weights(model.folder)
    steps, warmup, rate = (400, 40, 3e-3) if wish.text["model"] == SMALL else (10_000, 500, _learning_rate(size))
    if tuned:
        steps, warmup, rate = 500, 20, 1e-5
    found: list[Line] = [
        ("steps", steps), ("global_batch_size", _batch(size, count, kind, length, tuned=tuned)),
        ("micro_batch_size", "auto"), ("learning_rate", rate), ("min_learning_rate", float(f"{rate / 10:.3g}")),
        ("warmup_steps", warmup), "#optimizer = \"muon\"",
        ("precision", "fp32" if kind == CPU else "bf16-mixed"), ("eval_every", 100), ("checkpoint_every", 100),
    ]  # fmt: skip
    return [*found, ("init_from", _from(folder, model.folder))] if tuned else found


def _learning_rate(parameters: int) -> float:
    """The peak by size: Brown 2020 (arXiv 2005.14165, table 2.1) up to a billion parameters, Touvron 2023
    (arXiv 2307.09288, section 2.2) above."""
    return 6e-4 if parameters < 1e9 else 3e-4 if parameters < 20e9 else 1.5e-4


def _batch(parameters: int, count: int, kind: str, length: int, *, tuned: bool) -> int:
    """Sequences of a step, a multiple of ``count``: half a million tokens, one million from a billion
    parameters on, four from twenty billion on (the same tables), fewer to fine-tune or on processors."""
    tokens = 1 << 19 if parameters < 1e9 else 1 << 20 if parameters < 20e9 else 1 << 22
    wanted = 16 if kind == CPU else 128 if tuned else tokens // length
    return max(1, -(-wanted // count)) * count


def _has_weights(folder: Path | None) -> bool:
    return folder is not None and next(folder.glob("*.safetensors"), None) is not None


def _slurm_keys(count: int, kind: str, partition: str) -> list[Line]:
    from plait.core.cluster.hardware import Cluster

    each = Cluster.preset(kind).ranks_per_node if kind != CPU else count
    found: list[Line] = [("partition", partition)] if partition else ['#partition = "gpu"']
    return [*found, ("nodes", -(-count // each)), ("gpus", min(count, each) if kind != CPU else 0),
            '#time = "24:00:00"', '#account = "project"', "#spares = 1"]  # fmt: skip


def _kubernetes_keys(count: int, kind: str, namespace: str) -> list[Line]:
    from plait.core.cluster.hardware import Cluster

    each = Cluster.preset(kind).ranks_per_node if kind != CPU else count
    found: list[Line] = [("namespace", namespace)] if namespace else ['#namespace = "training"']
    return [("image", "plait:latest"), *found, ("nodes", -(-count // each)),
            ("gpus", min(count, each) if kind != CPU else 0), ("volumes", ["data:/data"]),
            '#kueue_queue = "queue"']  # fmt: skip


def _from(folder: Path, path: Path) -> str:
    """A path as a file in ``folder`` names it."""
    path = path.expanduser()
    return str(path) if path.is_absolute() else os.path.relpath(path.absolute(), folder.absolute())


# ---- written, and planned before ----


def examples() -> dict[str, Path]:
    """The jobs that ship, by name."""
    from plait.core.base.env import specs_folder

    return {file.stem: file for file in sorted((specs_folder() / "jobs").glob("*.toml"))}


def example(name: str) -> str:
    """The text of a job that ships. Raises JobError that lists them."""
    if name not in (known := examples()):
        fix = f"Use one of {', '.join(known)}"
        raise JobError(f"no example is called '{name}'{nearest(name, known)}", key="--example", fix=fix)
    return known[name].read_text()


def check_free(file: Path) -> None:
    """Raise JobError for a file that is there, or no job file by its name."""
    if file.suffix != ".toml":
        raise JobError(f"'{file}' is no name of a job file", key="FILE", fix="Choose one that ends in .toml")
    if file.exists() or file.is_symlink():
        raise JobError("is there already, and is not overwritten", file=str(file), fix="Name another file")
    if not file.parent.is_dir():
        raise JobError(
            f"there is no folder {file.parent}", file=str(file), fix=f"Make it first: mkdir -p {file.parent}"
        )


def write_job(file: Path, text: str) -> str:
    """Write a job file that is not there yet, whole or not at all, once it could be planned; a sentence on
    the plan. Raises JobError, also where somebody else has made the file meanwhile, and InfeasiblePlan."""
    from plait.core.base.files import explained

    check_free(file)
    with explained(f"{file} cannot be written", fix="Choose another folder"):
        folder = Path(mkdtemp(prefix=".plait-init-", dir=file.parent))
        draft = file.parent / folder.name / file.name
        try:
            draft.write_text(text)
            told = _planned_sentence(draft, file)
            try:
                os.link(draft, file)
            except FileExistsError:
                check_free(file)
        finally:
            draft.unlink(missing_ok=True)
            folder.rmdir()
    return told


def _planned_sentence(draft: Path, file: Path) -> str:
    """How the planner would run a job. Relative paths of the draft are meant from the file's folder."""
    from plait.api.choose import planned
    from plait.core.base.codec.toml_text import read_toml
    from plait.core.job.spec import Job
    from plait.train.data.tokenizer import load_tokenizer

    job = Job.from_dict(read_toml(draft), file.parent).named(file.stem)
    return planned(job, load_tokenizer(job.data.tokenizer).vocab, None)[1]


def write_example(file: Path, name: str) -> str:
    """Write a job that ships; a sentence on where it came from. It is planned as it stands, where it names
    no file that somebody has to bring."""
    text = example(name)
    if "\nhuggingface = " not in text:
        return write_job(file, text)
    check_free(file)
    with file.open("x") as out:
        out.write(text)
    return "it begins with the weights in the folder that model.huggingface names: change that, and plan it"


def next_commands(file: Path) -> list[str]:
    """Return commands to try a job with: a dry run only of one that can be trained."""
    from plait.core.job.spec import Job

    commands = [f"plait plan {file}"]
    with suppress(JobError):
        job = Job.read(file)
        job.check_trains(job.model_spec(vocab=1))
        commands.append(f"plait train {file} --dry-run")
    return commands
