"""The content of another framework's configuration as a Plait job, and the settings that were not
understood.

A reader sorts every setting of a file:

| kind | handling |
|---|---|
| understood | becomes a value of the job, or an option of the framework's time and memory |
| harmless | counted: it changes neither a step's time nor its memory (data, rates, logs, checkpoints) |
| not modelled | listed: its effect is known, but not in the prediction |
| not understood | listed: Plait does not know the setting |

Contradictions are refused with file, key and value. A missing value is asked for by its key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from plait.core.base.codec.json_text import is_table
from plait.core.base.codec.toml_text import COMMAND_LINE
from plait.core.base.errors import JobError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.job.open_keys import PLANNED
from plait.core.job.settings import PLANNABLE
from plait.core.job.spec import Job
from plait.formats.base.frameworks import Framework, framework_of

ALIKE = 0.9
"""The least similarity of an unknown name to a known name that is suggested instead."""
SHORTEST = 10
"""The least length of an unknown name that is completed to a known name."""
MISSING = {
    "data.sequence_length": "how many tokens a sequence has",
    "train.global_batch_size": "how many sequences a step has",
}
"""Keys that every prediction needs, with the words of the message if they are missing."""
MODELS = "model.preset=NAME, or model.huggingface=FOLDER,"


@dataclass
class ParsedConfig:
    """A configuration as read.

    framework: the name in ``plan.framework``. file: its name in messages. values: the job's values
    by section and key. options: the framework's options of time and memory. shard_copies: copies of
    the shards. local: sequences per step and replica, 0 if the file has no such number. rounds:
    micro-batches per replica if the file has no micro-batch size; 0 if that size is required.
    secondary_ranks: ranks that share a second copy of the parameters. recomputed_share: the
    recomputed share of a stage's layers, 0 if ``strategy.recompute`` has the answer. exempt:
    columns whose values are not checked, because the framework only resembles the file's values,
    and keys of rules that do not hold for this file. rounded_sizes: sizes of the model before
    rounding up, each with the number whose multiple by tp they round up to. required: keys of the
    job that a prediction needs, with the reason for asking.

    harmless: names of settings. unmodelled, unknown: settings as written. caveat: a sentence on
    whose rules and predictions these are, if not the file's own program's; refusals end with it.
    replicas_reason: the reason for the number of replicas. notes: sentences on what is predicted
    otherwise than the file says."""

    framework: str
    file: str
    values: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    shard_copies: int = 1
    local_batch: int = 0
    rounds: int = 1
    secondary_ranks: int = 0
    recomputed_share: float = 0.0
    exempt: tuple[str, ...] = ()
    rounded_sizes: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    required: dict[str, str] = field(default_factory=dict[str, str])
    harmless: list[str] = field(default_factory=list[str])
    unmodelled: list[str] = field(default_factory=list[str])
    unknown: list[str] = field(default_factory=list[str])
    caveat: str = ""
    replicas_reason: str = ""
    notes: list[str] = field(default_factory=list[str])

    def set(self, key: str, value: Any) -> None:
        """Set a value of the job. key: ``section.key`` or ``model.experts.key``."""
        table: dict[str, Any] = self.values
        *sections, last = key.split(".")
        for section in sections:
            table = table.setdefault(section, {})
        table[last] = value

    def round_up(self, name: str, size: int, each: int) -> int:
        """Return a size of the model rounded up to a multiple of ``each`` x tp; another planned tp
        rounds anew."""
        self.rounded_sizes[name] = size, each
        return _rounded(size, each * self.get("strategy.tp", 1))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the job, or ``default`` if it is missing. key: ``section.key``."""
        table: Any = self.values
        for part in key.split("."):
            if not is_table(table) or part not in table:
                return default
            table = table[part]
        return table

    def refuse(self, key: str, problem: str, fix: str) -> JobError:
        """Return the error for a contradiction in the file."""
        return JobError(problem, file=self.file, key=key, fix=". ".join(filter(None, (fix, self.caveat))))

    @property
    def runs(self) -> Framework | None:
        """The framework with the file's options; None for Plait's own runtime or a file with a
        model alone."""
        known = framework_of(self.framework)
        if known is None:
            return None
        has = {name: values for name, values in known.values.items() if name not in self.exempt}
        rules = [rule for rule in known.rules if rule.key not in self.exempt]
        return replace(known, options=replace(known.options, **self.options), values=has, rules=rules)

    def require(self, key: str, text: str) -> None:
        """Ask the user for a key whose value is known only in a run. text: the setting as
        written."""
        self.required[key] = f"'{text}': known only during a run"

    def note_unknown(self, name: str, text: str, keys: Mapping[str, str]) -> None:
        """Note an unknown setting; if its name resembles a known name, ask for that one's key.
        keys: the job's keys by known name."""
        self.unknown.append(text)
        begun = [key for key in keys if key.startswith(name) and len(name) >= SHORTEST]
        if near := get_close_matches(name, keys, n=1, cutoff=ALIKE) or begun:
            dashes = "--" * text.startswith("--")
            self.required[keys[near[0]]] = f"'{text}' is not understood (did you mean {dashes}{near[0]}?)"

    def ignored(self) -> IgnoredInput:
        """Return the harmless settings, counted."""
        found = IgnoredInput()
        for name in self.harmless:
            found.note("setting(s) without effect on time and memory", name)
        return found

    def lines(self) -> list[str]:
        """Return sentences for the user; settings that were not understood come first."""
        name = Path(self.file).name
        kinds = {
            f"NOT UNDERSTOOD in {name}, and not in the prediction": self.unknown,
            "Known, and not in the prediction": self.unmodelled,
        }
        return [*(f"{kind}: {', '.join(some)}" for kind, some in kinds.items() if some), *self._remarks]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "framework": self.framework, "file": self.file, "options": dict(self.options),
            "not_understood": list(self.unknown), "not_modelled": list(self.unmodelled),
            "harmless": list(self.harmless), "notes": self._remarks,
        }  # fmt: skip

    @property
    def _remarks(self) -> list[str]:
        return [*filter(None, [self.caveat]), *self.notes]

    def job(self, overrides: Sequence[str] = ()) -> Job:
        """Return the job of the file with the user's ``section.key=value`` overrides. Raises
        JobError for missing or contradictory values."""
        values, said = self.values | {"plan": {"framework": self.framework}}, settings_of(overrides)
        for key in self.required.keys() - said.keys():
            raise self.refuse(key, self.required[key], f"Set it in the file, or add {key}=... to the command")
        if searched := [one for one in overrides if _is_whole(one)]:
            train = values.get("train", {})
            if self.local_batch and "train.global_batch_size" not in said:  # keep the file's batch
                train = {"global_batch_size": self.file_job(overrides).train.global_batch_size} | train
            values |= {"strategy": dict.fromkeys(PLANNABLE, "auto"), "train": train | {"micro_batch_size": "auto"}}
            overrides = [one for one in overrides if one not in searched]
        return Job.completed(values, overrides, self._complete if self.runs else lambda _: None)

    def file_job(self, overrides: Sequence[str] = ()) -> Job:
        """Return the job with the file's own strategy. Overrides with ``auto`` are ignored; if the
        whole strategy is searched, so are overrides of keys that the file sets."""
        pairs = {one: one.partition("=") for one in overrides}
        kept = [one for one, (key, _, value) in pairs.items() if value.strip(" \"'") != "auto"
                and not (any(map(_is_whole, overrides)) and self._sets(key.strip()))]  # fmt: skip
        return self.job(kept)

    def _sets(self, key: str) -> bool:
        """True if the file sets a key of the strategy; always True for ``strategy.dp``."""
        named = key.startswith("strategy.") or key == "train.micro_batch_size"
        return key == "strategy.dp" or (named and key not in self.required and self.get(key) is not None)

    def _complete(self, values: dict[str, Any]) -> None:
        """Fill in values that follow from others: replicas, shards, the batch."""
        strategy, cluster = values.setdefault("strategy", {}), values.setdefault("cluster", {})
        degrees = {name: _degree(strategy.get(name), f"strategy.{name}") for name in ("tp", "pp", "cp")}
        dp, ranks = _degree(strategy.get("dp"), "strategy.dp"), _degree(cluster.get("ranks"), "cluster.ranks")
        each = 0 if None in degrees.values() else math.prod(one or 1 for one in degrees.values())
        ranks = ranks or (dp or 0) * each
        if not ranks:
            raise self._missing("cluster.ranks", "how many ranks there are")
        cluster["ranks"] = ranks
        if dp is None or not each:
            strategy.setdefault("dp", "auto")
        elif ranks % each or ranks != each * (dp or ranks // each):
            told = f"not tp x pp x cp x dp = {each * dp}" if dp else f"no multiple of tp x pp x cp = {each}"
            fix = f"Use {each * dp}" if dp else f"Use a multiple of {each}"
            why = f" ({self.replicas_reason})" if dp and self.replicas_reason else ""
            raise self.refuse("cluster.ranks", f"{ranks} ranks are {told}{why}", fix)
        else:
            dp = strategy["dp"] = ranks // each
        if degrees["tp"] in (0, 1):
            strategy["sequence_parallel"] = False  # the file's setting is for other degrees
        self._complete_batch(values, dp if each else None)
        self._complete_sizes(values["model"], degrees["tp"] or self.get("strategy.tp", 1))
        if self.recomputed_share and strategy.get("recompute") == self.get("strategy.recompute"):
            self._complete_recomputed(values, degrees["pp"])
        if self.shard_copies > 1 or self.secondary_ranks:
            self._complete_shards(strategy, strategy["dp"], degrees["cp"] or 1)

    def _complete_batch(self, values: dict[str, Any], dp: int | None) -> None:
        """Fill in batch and micro-batch size. dp: replicas, None if left to the planner."""
        train, strategy = values.setdefault("train", {}), values["strategy"]
        if self.local_batch and dp:
            train.setdefault("global_batch_size", self.local_batch * dp)
        for key, what in MISSING.items():
            section, name = key.split(".")
            if not values.get(section, {}).get(name):
                raise self._missing(key, what)
        model = values.get("model")
        if not model:
            raise self.refuse("model", "does not say the model's shapes", f"Add {MODELS} to the command")
        if not {"preset", "huggingface", "vocab"} & model.keys():
            raise self._missing("model.vocab", "how many tokens the vocabulary has")
        if strategy["dp"] == "auto":
            train.setdefault("micro_batch_size", "auto")
        if "micro_batch_size" in train or not isinstance(batch := train["global_batch_size"], int):
            return
        key, parts = "train.micro_batch_size", self.rounds * (dp or 1)
        if not self.rounds:
            raise self._missing(key, "how many sequences a micro-batch has")
        if batch % parts:
            problem = f"{batch:,} sequences are not {dp} replicas x {self.rounds} micro-batches of one size"
            raise self.refuse("train.global_batch_size", problem, f"Use a multiple of {parts}")
        train["micro_batch_size"] = batch // parts

    def _complete_sizes(self, model: dict[str, Any], tp: int) -> None:
        """Round the file's own sizes up for the planned tp."""
        for name, (size, each) in self.rounded_sizes.items():
            if name in model and model[name] == self.get(f"model.{name}"):
                model[name] = _rounded(size, each * tp)

    def _complete_recomputed(self, values: Mapping[str, Any], pp: int | None) -> None:
        """Turn the recomputed share of a stage's layers into their number. pp: None if left to the
        planner."""
        key, strategy = "strategy.recompute", values["strategy"]
        virtual, layers = strategy.get("virtual_stages", 1), values["model"].get("num_layers")
        if pp is None or virtual == "auto":
            problem = (
                f"{self.recomputed_share:.0%} of a stage's layers are computed again, and how many "
                f"stages there are is open"
            )
            raise self.refuse(key, problem, f"Add {key}=full, none or auto to the command")
        if layers:
            each = -(-layers // ((pp or 1) * virtual))
            strategy["recompute"] = {"kind": "full", "layers": math.ceil(each * self.recomputed_share)}

    def _complete_shards(self, strategy: dict[str, Any], dp: Any, cp: int) -> None:
        """Set the sharding if it spans fewer than all ranks that hold the same weights."""
        key = "strategy.shard"
        if strategy.get("shard") == "auto":
            return
        if dp == "auto":
            problem = "its shards are kept several times, over as many ranks as degrees leave, which are open"
            raise self.refuse(key, problem, f"Add {key}=auto to the command")
        replicas = dp * cp
        if self.secondary_ranks:
            strategy["shard"] = _shares("fsdp", replicas) | {"secondary": self.secondary_ranks}
        elif replicas % self.shard_copies:
            problem = f"{self.shard_copies} do not divide the {replicas} ranks that hold the same weights"
            raise self.refuse("copies of the shards", problem, "Use a divisor of them")
        else:
            strategy["shard"] = _shares(strategy.get("shard", "ddp"), replicas // self.shard_copies)

    def _missing(self, key: str, what: str) -> JobError:
        return self.refuse(key, f"does not say {what}", f"Add {key}=... to the command")


def settings_of(overrides: Sequence[str]) -> dict[str, str]:
    """Return the overrides by key; an override of the whole strategy counts for each key that the
    planner chooses.

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
    """True if an override leaves the whole strategy to the planner."""
    key, _, text = override.partition("=")
    return key.strip() == "strategy" and text.strip(" \"'") == "auto"


def _degree(value: Any, key: str) -> int | None:
    """Return a number of ranks: 0 if there is no value, None for ``auto``. Raises JobError for
    other values."""
    if value is None or (value == "auto" and key != "cluster.ranks"):
        return 0 if value is None else None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise JobError(f"'{value}' is no number of ranks", file=COMMAND_LINE, key=key, fix="Use a whole number from 1")
    return value


def _shares(named: str, ranks: int) -> dict[str, int]:
    """Return the shards of a named sharding over ``ranks``, fewer than all ranks that hold the same
    weights."""
    params, grads = (ranks if named == "fsdp" else 1), (ranks if named in ("fsdp", "zero2") else 1)
    return {"params": params, "grads": grads, "optim": ranks if named != "ddp" else 1, "secondary": 0}


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


def whole_number(parsed: ParsedConfig, key: str, text: Any) -> int:
    """Return a value as a whole number. Raises JobError naming file, key and value."""
    try:
        return int(str(text).replace("_", ""))
    except ValueError:
        raise parsed.refuse(key, f"'{text}' is not a whole number", "Write the number itself") from None


def number(parsed: ParsedConfig, key: str, text: Any) -> float:
    """Return a value as a number. Raises JobError naming file, key and value."""
    try:
        return float(str(text))
    except ValueError:
        raise parsed.refuse(key, f"'{text}' is not a number", "Write the number itself") from None
