"""A run's checkpoint as a Hugging Face folder, assembled in one process whatever the run's degrees were.

The tokenizer becomes the files that transformers' ``AutoTokenizer`` reads: the same text gives the same ids.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import CheckpointError, DataError, JobError
from plait.core.base.files import check_target, explained, reason_of
from plait.core.job.plan import Plan
from plait.core.model.families import huggingface_config
from plait.train.checkpoint import dcp, torchtitan, torchtitan_names
from plait.train.checkpoint.folder import MANIFEST
from plait.train.checkpoint.huggingface import save
from plait.train.checkpoint.safetensors_folder import check_no_model
from plait.train.checkpoint.whole import check_step, load_whole
from plait.train.comm.wire import NullWire
from plait.train.data.chat_template import TEMPLATE
from plait.train.data.chats import readers_of
from plait.train.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer

PLAN, CHECKPOINTS = "plan.json", "checkpoints"
"""What every run's folder has; a plan alone may lie anywhere."""
FILE, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
TOKEN_IDS = re.compile(r"_ids?$|suppress_tokens$|^sequence_bias$")
"""Names of settings of generation that mean tokens by their numbers."""


class Exported(NamedTuple):
    """Which step was written, and lines on what is not as one would expect."""

    step: int
    warnings: tuple[str, ...]


def export_torchtitan(run: Path, out: Path, step: int | None = None) -> Exported:
    """Write ``out`` as a torch.distributed.checkpoint in torchtitan's names: its
    ``checkpoint.initial_load_path``. Raises as ``export_run``."""
    check_step(step)
    plan = Plan.read(run / PLAN)
    torchtitan_names.check_model(plan.model)
    _check_apart(out, run)
    if (out / dcp.METADATA).exists():
        raise CheckpointError(f"{out} holds a checkpoint already. Choose another folder")
    check_target(out / dcp.METADATA, fix="Choose another folder")
    whole = load_whole(run, step)
    with explained(f"{out} cannot be written", fix="Choose another folder"):
        torchtitan.save(whole.model, out)
    return Exported(whole.step, whole.warnings)


def export_run(run: Path, out: Path, step: int | None = None) -> Exported:
    """Write ``out``: the model after ``step`` (None: the newest checkpoint that is whole) and its tokenizer.

    Raises CheckpointError, before anything is written, for a run without such a checkpoint, a model that
    transformers has not, and a folder that holds a model already; JobError for one that belongs to a run;
    LaunchError where it cannot be written.
    """
    check_step(step)
    plan = Plan.read(run / PLAN)
    huggingface_config(plan.model, "float32")  # what it refuses need not be loaded first
    _check_apart(out, run)
    check_no_model(out)
    check_target(out / "config.json", fix="Choose another folder")
    whole = load_whole(run, step)
    warnings = (*whole.warnings, *_unsaid(plan))
    try:
        tokenizer = _tokenizer(plan)
    except DataError as error:  # the weights are what counts
        save(whole.model, NullWire(), out)
        told = f"{error}. So {out} has no tokenizer, and its config.json no end-of-text id"
        return Exported(whole.step, (*warnings, told))
    tokens, chats = {"eos_token_id": tokenizer.end_of_text}, _chats(plan, tokenizer)
    generation, told = _generation(plan, tokenizer, [tokenizer.end_of_text, *chats.stops])
    files = {**tokenizer_files(tokenizer), **chats.files, GENERATION: _json(generation)}
    save(whole.model, NullWire(), out, extra=tokens, files=files)
    return Exported(whole.step, (*warnings, *told))


def _generation(plan: Plan, tokenizer: Tokenizer, stops: Sequence[int]) -> tuple[dict[str, Any], list[str]]:
    """The settings of generation beside the weights that were trained on, else beside the tokenizer, and a
    line on what of them is left out. stops: tokens that end a text, before those of the settings."""
    own = tokenizer.path.parent if isinstance(tokenizer, FileTokenizer) else None
    first = Path(plan.job.train.init_from) if plan.job and plan.job.train.init_from else None
    file = next((one / GENERATION for one in (first, own) if one and (one / GENERATION).is_file()), None)
    if file is None:
        return _with_stops({}, stops), []
    try:
        settings = read_table(file)
    except (OSError, ValueError) as error:
        return _with_stops({}, stops), [f"{file} cannot be read ({reason_of(error)}), and was left out"]
    theirs = file.with_name(FILE)
    same = own is not None and theirs.is_file() and theirs.read_bytes() == (own / FILE).read_bytes()
    ids = [] if same else [key for key in settings if TOKEN_IDS.search(key)]
    kept = {key: value for key, value in settings.items() if key not in ids}
    told = [f"{', '.join(ids)} of {file} are ids of another tokenizer, and were left out"] if ids else []
    return _with_stops(kept, stops), told


def _with_stops(settings: dict[str, Any], stops: Sequence[int]) -> dict[str, Any]:
    """The settings with these tokens as the first that end a text."""
    theirs = settings.get("eos_token_id", [])
    ends = list(dict.fromkeys([*stops, *(theirs if isinstance(theirs, list) else [theirs])]))
    return {**settings, "eos_token_id": ends if len(ends) > 1 else ends[0]}


class _ChatFiles(NamedTuple):
    """What a model for chats has beside its tokenizer. stops: tokens that end an answer."""

    files: dict[str, bytes]
    stops: list[int]


def _chats(plan: Plan, tokenizer: Tokenizer) -> _ChatFiles:
    """The chat template that the run was trained with, or that its tokenizer has as a file."""
    assert plan.job is not None
    data = plan.job.data
    if "chats" in data.chat_rows:
        chats = readers_of(data, tokenizer)["chats"]
        assert chats.template is not None
        stops = [int(tokenizer.encode(end)[0]) for end in chats.ends]
        return _ChatFiles({TEMPLATE: chats.template.source.encode()}, stops)
    beside = tokenizer.path.with_name(TEMPLATE) if isinstance(tokenizer, FileTokenizer) else None
    return _ChatFiles({TEMPLATE: beside.read_bytes()} if beside and beside.is_file() else {}, [])


def _unsaid(plan: Plan) -> list[str]:
    """A line on what a ``config.json`` of the model's family has no key for; none of it changes what the
    model computes but in training."""
    if plan.model.family != "llama" or not plan.model.dropout:
        return []
    return [
        f"config.json of a Llama has no place for model.dropout = {plan.model.dropout:g}; set it where you train on"
    ]


def _check_apart(out: Path, run: Path) -> None:
    """Raise JobError for a folder that is a run's, or a checkpoint's, or lies in one: what is written there
    would be taken for a part of it."""
    real, own = Path(os.path.realpath(out)), Path(os.path.realpath(run))
    for folder in (real, *real.parents):
        if folder == own or all((folder / name).exists() for name in (PLAN, CHECKPOINTS)):
            noun = "run"
        elif (folder / MANIFEST).is_file():
            noun = "checkpoint"
        else:
            continue
        where = f"is the folder of a {noun}" if folder == real else f"lies in the {noun} {folder}"
        raise JobError(f"{out} {where}", key="OUT", fix="Choose a folder of its own")


def _tokenizer(plan: Plan) -> Tokenizer:
    if plan.job is None:
        raise DataError("plan.json was made without a job, and names no tokenizer")
    return load_tokenizer(plan.job.data.tokenizer)


END_OF_TEXT = "<|endoftext|>"  # the byte tokenizer's: no text can contain the token, whatever it is called


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Name -> content of ``tokenizer.json`` and ``tokenizer_config.json``."""
    if isinstance(tokenizer, FileTokenizer):
        return _copied(tokenizer)
    assert isinstance(tokenizer, ByteTokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "split_special_tokens": True,  # its name, spelled out in a text, is thirteen bytes like any other
        "clean_up_tokenization_spaces": False,
    }
    return {FILE: _json(_byte_level()), SETTINGS: _json(settings)}


def _copied(tokenizer: FileTokenizer) -> dict[str, bytes]:
    """The file as it is; the settings beside it, with the end of text that the corpus has."""
    beside = tokenizer.path.with_name(SETTINGS)
    settings: dict[str, Any] = read_table(beside) if beside.is_file() else {}
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    if not settings.get("eos_token"):
        settings["eos_token"] = tokenizer.token(tokenizer.end_of_text)
    return {FILE: tokenizer.path.read_bytes(), SETTINGS: _json(settings)}


def _byte_level() -> dict[str, Any]:
    """The byte tokenizer in the words of ``tokenizers``: byte-level BPE without a single merge."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = {"id": ByteTokenizer.end_of_text, "content": END_OF_TEXT, "special": True, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, "single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_characters())},
            "merges": [],
        },
    }


def _characters() -> list[str]:
    """GPT-2's name of each byte: itself where that can be printed, else one of the characters from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
