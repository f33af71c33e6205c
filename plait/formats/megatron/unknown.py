"""Megatron-LM flags whose values only a run of the script knows: they are listed, and asked for by
the job's key."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from plait.core.base.errors import JobError
from plait.formats.base.parsed_config import ParsedConfig
from plait.formats.base.rows import count, share
from plait.formats.base.shell import ATOM, EITHER, Argument, is_unknown, source_text
from plait.formats.megatron.flags import FLAGS, PRECISIONS, SEVERAL, SWITCHES, takes_none

NAMES = frozenset(["ckpt-format", "tokenizer-type", "vocab-file", "rope-type", "nproc-per-node", "nnodes"])
"""Flags whose unknown value needs no question: without them vocabulary and ranks are asked for
anyway."""
MINOR = frozenset(
    ["rampup-batch-size", "step-batch-size-schedule", "rotary-base", "rope-scaling-factor", "norm-epsilon",
     "attention-dropout"]
)  # fmt: skip
"""Flags that change neither degrees nor sizes nor precision."""
DEFAULTS = {
    "strategy.tp": "1", "strategy.pp": "1", "strategy.cp": "1", "train.micro_batch_size": "...",
    "train.global_batch_size": "...", "data.sequence_length": "...", "train.precision": "fp32",
    "strategy.shard": "ddp", "strategy.recompute": "none", "model.preset": "...",
}  # fmt: skip
"""Keys that unknown flags may set, with their values if those flags set none of them."""
_PLURAL = re.compile(r"[@*]|ARG|OPT|FLAG|PARAM|EXTRA", re.IGNORECASE)
"""Source texts of unknown values that look like several words."""


def resolve(
    parsed: ParsedConfig, arguments: Sequence[Argument], settings: Mapping[str, str], why: Mapping[str, str]
) -> list[Argument]:
    """Return the arguments of known value. settings: the user's keys on the command line, which
    replace unknown values. why: the cause of each unknown value. Raises JobError, naming words and
    keys, for unknown values that may change degrees, sizes or precision and that no key
    replaces."""
    found, asked, words = list[Argument](), list[Argument](), list[Argument]()
    for one in arguments:
        values, behind = _split_values(one)
        words += [Argument(one.name, (word,), one.line) for word in behind if is_unknown(word)]
        parsed.unknown += [f"{word} (behind {one})" for word in behind if not is_unknown(word)]
        one = one._replace(values=values)
        if not one.name:
            continue
        if not any(map(is_unknown, values)) or one.name not in FLAGS.named:
            found.append(one)
        elif one.name in NAMES:
            found.append(one._replace(values=tuple(map(source_text, values))))
        elif one.name in MINOR:
            parsed.unknown.append(str(one))
        elif (key := FLAGS.keys.get(one.name, "")) in settings:
            found += _override(one, settings[key])
            if settings[key] == "auto":  # the file's own strategy then has no prediction
                parsed.require(key, str(one))
            parsed.notes.append(f"{one} is not known{_reason([one], why)}: {key} is the command's.")
        else:
            asked.append(one)
    if asked:
        raise _refusal(parsed, asked, why)
    unclear = any(map(is_unknown, (text for one in arguments if _sets_precision(one) for text in one.values)))
    if unclear and (flags := PRECISIONS.get(settings.get("train.precision", ""))) is not None:
        found = [one for one in found if not _sets_precision(one)]
        found += [Argument(name, () if value is True else (str(value),)) for name, value in flags.items()]
    _check_words(parsed, words, {one.name for one in found}, settings, why)
    return found


def _sets_precision(one: Argument) -> bool:
    return FLAGS.keys.get(one.name) == "train.precision"


def _split_values(one: Argument) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the values of a flag, and the words after these values."""
    if not one.name:
        return (), tuple(filter(is_unknown, one.values))
    known = FLAGS.knows(one.name)
    if takes_none(one.name):
        end = int(source_text("".join(one.values[:1])) == EITHER or not one.line)
    elif not known and _PLURAL.search("".join(one.values[:1])):
        end = 0
    elif known and one.name not in SEVERAL:
        end = 1
    else:
        unclear = (at for at, pair in enumerate(pairwise(one.values), 1) if all(map(is_unknown, pair)))
        end = next(unclear, len(one.values))
    return one.values[:end], one.values[end:]


def _override(one: Argument, text: str) -> list[Argument]:
    """Return the flag with the command line's value; empty for ``auto``, and for flags that are
    neither numbers nor switches turned on."""
    if FLAGS.named[one.name].kind in (count, share) and text != "auto":
        return [one._replace(values=(text,))]
    return [one._replace(values=())] if one.name in SWITCHES and text == "true" else []


def _reason(some: Sequence[Argument], why: Mapping[str, str]) -> str:
    sources = [source for one in some for text in one.values for source in map(source_text, ATOM.findall(text))]
    reasons = dict.fromkeys(why[source] for source in sources if source in why)
    return f" ({'; '.join(map(source_text, reasons))})" if reasons else ""


def _refusal(parsed: ParsedConfig, required: Sequence[Argument], why: Mapping[str, str]) -> JobError:
    keys = dict.fromkeys(FLAGS.keys.get(one.name, "") for one in required)
    others = f", {', '.join(map(str, required[1:]))}" if required[1:] else ""
    text = " ".join(map(source_text, required[0].values))
    problem = f"'{text}'{others}: known only during a run{_reason(required, why)}"
    fix = f"Set {'them' if others else 'it'} in the file"
    if "" not in keys:
        fix += f", or add {' '.join(f'{key}=...' for key in keys)} to the command"
    return parsed.refuse(f"{_line(required[0])}--{required[0].name}", problem, fix)


def _line(one: Argument) -> str:
    return f"line {one.line}: " if one.line else ""


def _check_words(
    parsed: ParsedConfig,
    words: Sequence[Argument],
    flags: Collection[str],
    settings: Mapping[str, str],
    why: Mapping[str, str],
) -> None:
    """Raise JobError for unknown words that may be flags, unless the command line sets every key of
    theirs."""
    if not words:
        return
    texts = ", ".join(filter(None, dict.fromkeys(source_text(one.values[0]) for one in words)))
    said = {*settings, *map(FLAGS.keys.get, flags)}
    if "num-layers" in flags or any(key.startswith("model.") for key in settings):
        said.add("model.preset")
    if keys := " ".join(f"{key}={otherwise}" for key, otherwise in DEFAULTS.items() if key not in said):
        problem = f"may stand for flags that are known only during a run{_reason(words, why)}"
        fix = f"Write them into the file, or add to the command what they say; where they say none of these: {keys}"
        raise parsed.refuse(f"{_line(words[0])}{texts}", problem, fix)
    for key in DEFAULTS:
        if settings.get(key) == "auto":
            parsed.require(key, texts)
    parsed.unknown.append(texts)
    parsed.notes.append(
        f"{texts}: flags that are known only during a run are not in the prediction{_reason(words, why)}."
    )
