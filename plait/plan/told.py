"""What a configuration of another framework says, as a job of ours, and what of it was not understood.

A reader sorts every setting of a file:

| kind | what becomes of it |
|---|---|
| understood | a value of the job, or an option of the framework's time and memory |
| harmless | counted: it changes neither a step's time nor its memory (data, rates, logs, checkpoints) |
| not modelled | named: known, and the prediction does not have it |
| not understood | named: nobody looked at what it does |

What contradicts itself is refused with file, key and value. What is missing is asked for by its key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from plait.core.base.codec.toml_text import COMMAND_LINE
from plait.core.base.errors import JobError
from plait.core.base.passed_over import PassedOver
from plait.core.job.left_open import PLANNED
from plait.core.job.settings import PLANNABLE
from plait.core.job.spec import Job
from plait.plan.frameworks import Framework, framework_of

ALIKE = 0.9
"""Likeness of a name to one that is meant."""
SHORTEST = 10
"""Letters with which the name of one that is meant may begin."""
MISSING = {
    "data.sequence_length": "how many tokens a sequence has",
    "train.global_batch_size": "how many sequences a step has",
}
"""What no job is predicted without, and what is said of it."""


@dataclass
class Told:
    """values: of a job, by section and key. options: of the framework's time and memory. instances: copies of
    the shards. local: sequences of a step of one replica, 0 where none are said. rounds: micro-batches of a
    replica where no size of them is said; 0 where the size has to be. secondary: ranks of a second copy of
    parameters. again: the share of a stage's layers that is computed again, 0 where the strategy says. freed:
    columns that take values that the framework has only nearly, and keys of rules that do not hold of what
    the file says. asked: keys of the job without which nothing is predicted, and why. rounded: sizes of the
    model before they are rounded up to a multiple of so many times tp.
    harmless: settings. unmodelled, unknown: settings as they stand. caveat: a sentence on whose
    rules and predictions these are, where they are not the file's program's; refusals have it, too. why: as
    many replicas. notes: sentences on what is predicted otherwise than said."""

    framework: str
    file: str
    values: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    instances: int = 1
    local: int = 0
    rounds: int = 1
    secondary: int = 0
    again: float = 0.0
    freed: tuple[str, ...] = ()
    rounded: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    asked: dict[str, str] = field(default_factory=dict[str, str])
    harmless: list[str] = field(default_factory=list[str])
    unmodelled: list[str] = field(default_factory=list[str])
    unknown: list[str] = field(default_factory=list[str])
    caveat: str = ""
    why: str = ""
    notes: list[str] = field(default_factory=list[str])

    def set(self, key: str, value: Any) -> None:
        """A value of the job: ``section.key``, or ``model.experts.key``."""
        table: dict[str, Any] = self.values
        *sections, last = key.split(".")
        for section in sections:
            table = table.setdefault(section, {})
        table[last] = value

    def round_up(self, name: str, size: int, each: int) -> int:
        """A size of the model, up to a multiple of so many times tp; anew where another tp is planned."""
        self.rounded[name] = size, each
        return _rounded(size, each * self.get("strategy.tp", 1))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the job."""
        table: Any = self.values
        for part in key.split("."):
            if not isinstance(table, dict) or part not in table:
                return default
            table = table[part]
        return table

    def refuse(self, key: str, problem: str, fix: str) -> JobError:
        """What contradicts itself in the file."""
        return JobError(problem, file=self.file, key=key, fix=". ".join(filter(None, (fix, self.caveat))))

    @property
    def runs(self) -> Framework | None:
        """The framework with what the file says of it; None where the file says a model alone."""
        known = framework_of(self.framework)
        if known is None:
            return None
        has = {name: values for name, values in known.has.items() if name not in self.freed}
        rules = [rule for rule in known.rules if rule.key not in self.freed]
        return replace(known, options=replace(known.options, **self.options), has=has, rules=rules)

    def ask(self, key: str, text: str) -> None:
        """Have a key be asked for that only a run knows."""
        self.asked[key] = f"'{text}': nobody knows it before a run"

    def strange(self, name: str, text: str, keys: Mapping[str, str]) -> None:
        """Name what is not understood; where its name is nearly another's, ask for the key that this says.
        keys: of a job, by names."""
        self.unknown.append(text)
        begun = [key for key in keys if key.startswith(name) and len(name) >= SHORTEST]
        if near := get_close_matches(name, keys, n=1, cutoff=ALIKE) or begun:
            self.asked[keys[near[0]]] = f"'{text}' is not understood (did you mean {near[0]}?)"

    def over(self) -> PassedOver:
        """The harmless settings, counted."""
        found = PassedOver()
        for name in self.harmless:
            found.note("setting(s) without effect on time and memory", name)
        return found

    def lines(self) -> list[str]:
        """Sentences: what is not understood comes first."""
        found = list[str]()
        if self.unknown:
            found.append(
                f"NOT UNDERSTOOD in {Path(self.file).name}, and not in the prediction: {_listed(self.unknown)}"
            )
        if self.unmodelled:
            found.append(f"Known, and not in the prediction: {_listed(self.unmodelled)}")
        return [*found, *self._remarks]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "framework": self.framework, "file": self.file, "options": dict(self.options),
            "not_understood": list(self.unknown), "not_modelled": list(self.unmodelled),
            "harmless": list(self.harmless), "notes": self._remarks,
        }  # fmt: skip

    @property
    def _remarks(self) -> list[str]:
        return [*filter(None, [self.caveat]), *self.notes]

    def job(self, overrides: Sequence[str] = ()) -> Job:
        """The job, with ``section.key=value`` settings beside what the file says. Raises JobError for what is
        missing or contradicts itself."""
        values, said = self.values | {"plan": {"framework": self.framework}}, settings_of(overrides)
        for key in self.asked.keys() - said.keys():
            raise self.refuse(key, self.asked[key], f"Set it in the file, or add {key}=... to the command")
        if searched := [one for one in overrides if _is_whole(one)]:
            train = values.get("train", {})
            if self.local and "train.global_batch_size" not in said:  # as many as it has
                train = {"global_batch_size": self.own_job(overrides).train.global_batch_size} | train
            values |= {"strategy": dict.fromkeys(PLANNABLE, "auto"), "train": train | {"micro_batch_size": "auto"}}
            overrides = [one for one in overrides if one not in searched]
        return Job.completed(values, overrides, self._complete if self.runs else lambda _: None)

    def own_job(self, overrides: Sequence[str] = ()) -> Job:
        """The job with the file's own strategy: nothing of it is left to the planner, nor, where a better one
        is searched for, the command's."""
        pairs = {one: one.partition("=") for one in overrides}
        kept = [one for one, (key, _, value) in pairs.items() if value.strip(" \"'") != "auto"
                and not (any(map(_is_whole, overrides)) and self._says(key.strip()))]  # fmt: skip
        return self.job(kept)

    def _says(self, key: str) -> bool:
        """Tell whether the file says a key of its strategy."""
        named = key.startswith("strategy.") or key == "train.micro_batch_size"
        return key == "strategy.dp" or (named and key not in self.asked and self.get(key) is not None)

    def _complete(self, values: dict[str, Any]) -> None:
        """Fill in what follows from the rest: replicas, shards, the batch."""
        strategy, cluster = values.setdefault("strategy", {}), values.setdefault("cluster", {})
        degrees = {name: _degree(strategy.get(name), f"strategy.{name}") for name in ("tp", "pp", "cp")}
        dp, ranks = _degree(strategy.get("dp"), "strategy.dp"), _degree(cluster.get("ranks"), "cluster.ranks")
        each = 0 if None in degrees.values() else math.prod(one or 1 for one in degrees.values())
        ranks = ranks or (dp or 0) * each
        if not ranks:
            fix = "Add cluster.ranks=... to the command"
            raise JobError("does not say how many ranks there are", file=self.file, key="cluster.ranks", fix=fix)
        cluster["ranks"] = ranks
        if dp is None or not each:
            strategy.setdefault("dp", "auto")
        elif ranks % each or ranks != each * (dp or ranks // each):
            told = f"not tp x pp x cp x dp = {each * dp}" if dp else f"no multiple of tp x pp x cp = {each}"
            fix = f"Use {each * dp}" if dp else f"Use a multiple of {each}"
            why = f" ({self.why})" if dp and self.why else ""
            raise JobError(f"{ranks} ranks are {told}{why}", file=self.file, key="cluster.ranks", fix=fix)
        else:
            dp = strategy["dp"] = ranks // each
        if degrees["tp"] in (0, 1):
            strategy["sequence_parallel"] = False  # whatever the file says of other degrees
        self._complete_batch(values, dp if each else None)
        self._complete_sizes(values["model"], degrees["tp"] or self.get("strategy.tp", 1))
        if self.again and strategy.get("recompute") == self.get("strategy.recompute"):
            self._complete_recomputed(values, degrees["pp"])
        if self.instances > 1 or self.secondary:
            self._complete_shards(strategy, strategy["dp"], degrees["cp"] or 1)

    def _complete_batch(self, values: dict[str, Any], dp: int | None) -> None:
        """The batch, and how large a micro-batch is. dp: replicas, None where these are left open."""
        train, strategy = values.setdefault("train", {}), values["strategy"]
        if self.local and dp:
            train.setdefault("global_batch_size", self.local * dp)
        for key, what in MISSING.items():
            section, name = key.split(".")
            if not values.get(section, {}).get(name):
                raise JobError(f"does not say {what}", file=self.file, key=key, fix=f"Add {key}=... to the command")
        self._check_model(values.get("model", {}))
        if strategy["dp"] == "auto":
            train.setdefault("micro_batch_size", "auto")
        if "micro_batch_size" in train or not isinstance(batch := train["global_batch_size"], int):
            return
        key, parts = "train.micro_batch_size", self.rounds * (dp or 1)
        if not self.rounds:
            fix = f"Add {key}=... to the command"
            raise JobError("does not say how many sequences a micro-batch has", file=self.file, key=key, fix=fix)
        if batch % parts:
            problem = f"{batch:,} sequences are not {dp} replicas x {self.rounds} micro-batches of one size"
            fix = f"Use a multiple of {parts}"
            raise JobError(problem, file=self.file, key="train.global_batch_size", fix=fix)
        train["micro_batch_size"] = batch // parts

    def _complete_sizes(self, model: dict[str, Any], tp: int) -> None:
        """Sizes that tp rounds up, where they are the file's."""
        for name, (size, each) in self.rounded.items():
            if name in model and model[name] == self.get(f"model.{name}"):
                model[name] = _rounded(size, each * tp)

    def _complete_recomputed(self, values: Mapping[str, Any], pp: int | None) -> None:
        """How many layers of a stage a share of them is. pp: None where it is left open."""
        key, strategy = "strategy.recompute", values["strategy"]
        virtual, layers = strategy.get("virtual_stages", 1), values["model"].get("num_layers")
        if pp is None or virtual == "auto":
            problem = f"{self.again:.0%} of a stage's layers are computed again, and how many stages there are is open"
            raise JobError(problem, file=self.file, key=key, fix=f"Add {key}=full, none or auto to the command")
        if layers:
            each = -(-layers // ((pp or 1) * virtual))
            strategy["recompute"] = {"kind": "full", "layers": math.ceil(each * self.again)}

    def _complete_shards(self, strategy: dict[str, Any], dp: Any, cp: int) -> None:
        """What ranks that hold the same weights share out, where that is not over all of them."""
        key = "strategy.shard"
        if strategy.get("shard") == "auto":
            return
        if dp == "auto":
            problem = "its shards are kept several times, over as many ranks as degrees leave, which are open"
            raise JobError(problem, file=self.file, key=key, fix=f"Add {key}=auto to the command")
        replicas = dp * cp
        if self.secondary:
            strategy["shard"] = _shares("fsdp", replicas) | {"secondary": self.secondary}
        elif replicas % self.instances:
            problem = f"{self.instances} do not divide the {replicas} ranks that hold the same weights"
            raise JobError(problem, file=self.file, key="copies of the shards", fix="Use a divisor of them")
        else:
            strategy["shard"] = _shares(strategy.get("shard", "ddp"), replicas // self.instances)

    def _check_model(self, model: Mapping[str, Any]) -> None:
        if not model:
            fix = "Add model.preset=NAME, or model.huggingface=FOLDER, to the command"
            raise JobError("does not say the model's shapes", file=self.file, key="model", fix=fix)
        if not {"preset", "huggingface", "vocab"} & model.keys():
            problem = "does not say how many tokens the vocabulary has"
            raise JobError(problem, file=self.file, key="model.vocab", fix="Add model.vocab=... to the command")


def settings_of(overrides: Sequence[str]) -> dict[str, str]:
    """Settings by key; those of a whole section by each key of it that a planner may choose.

    >>> settings_of(["strategy=auto", "strategy.tp=8"])["strategy.tp"]
    '8'
    """
    found = dict[str, str]()
    for one in overrides:
        key, _, text = one.partition("=")
        key, text = key.strip(), text.strip().strip("\"'")
        found |= dict.fromkeys(PLANNED, "auto") if _is_whole(one) else {key: text}
    return found


def _is_whole(override: str) -> bool:
    """Whether a setting leaves the whole strategy to the planner."""
    key, _, text = override.partition("=")
    return key.strip() == "strategy" and text.strip(" \"'") == "auto"


def _degree(value: Any, key: str) -> int | None:
    """How many ranks, 0 where nothing is said; None where it is left open. Raises JobError for others."""
    if value is None or (value == "auto" and key != "cluster.ranks"):
        return 0 if value is None else None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise JobError(f"'{value}' is no number of ranks", file=COMMAND_LINE, key=key, fix="Use a whole number from 1")
    return value


def _shares(named: str, ranks: int) -> dict[str, int]:
    """A named sharding over fewer ranks than hold the same weights."""
    params, grads = (ranks if named == "fsdp" else 1), (ranks if named in ("fsdp", "zero2") else 1)
    return {"params": params, "grads": grads, "optim": ranks if named != "ddp" else 1, "secondary": 0}


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words)


def whole_number(told: Told, key: str, text: Any) -> int:
    """A value as a whole number. Raises JobError naming file, key and value."""
    try:
        return int(str(text).replace("_", ""))
    except ValueError:
        raise told.refuse(key, f"'{text}' is not a whole number", "Write the number itself") from None


def number(told: Told, key: str, text: Any) -> float:
    """A value as a number. Raises JobError naming file, key and value."""
    try:
        return float(str(text))
    except ValueError:
        raise told.refuse(key, f"'{text}' is not a number", "Write the number itself") from None
