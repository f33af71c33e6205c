"""Export a run's checkpoint as a Hugging Face folder, in one process, whatever the run's parallel
degrees were.

The tokenizer is written as files that transformers' ``AutoTokenizer`` reads: the same text gives
the same ids.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import DataError, JobError
from plait.core.base.files import check_target, reason_of
from plait.core.job.plan import Plan
from plait.core.model.families import huggingface_config
from plait.core.runs.folder import check_started
from plait.train.checkpoint.folder import MANIFEST
from plait.train.checkpoint.huggingface import check_no_model, config_text, save
from plait.train.checkpoint.whole import check_step, load_whole
from plait.train.data.chat_template import TEMPLATE
from plait.train.data.chats import readers_of
from plait.train.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer

PLAN, CHECKPOINTS = "plan.json", "checkpoints"
"""Names in every run's folder; ``plan.json`` alone may be in any folder."""
FILE, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
TOKEN_IDS = re.compile(r"_ids?$|suppress_tokens$|^sequence_bias$")
"""Names of generation settings whose values are token ids."""


class Exported(NamedTuple):
    """The step that was written, and a line for each peculiarity of the export."""

    step: int
    warnings: tuple[str, ...]


def export_run(run: Path, out: Path, step: int | None = None) -> Exported:
    """Write the model of ``step`` (None: of the newest intact checkpoint) and its tokenizer to the
    folder ``out``.

    Raises CheckpointError, before anything is written, for a run without such a checkpoint, a model
    that transformers does not have, and a folder that already holds a model. Raises JobError for a
    folder that belongs to a run; LaunchError if the folder cannot be written, DataError for a
    folder without a run.
    """
    check_step(step)
    check_started(run)
    plan = Plan.read(run / PLAN)
    huggingface_config(plan.model, "float32")  # refuses unsupported models before weights are loaded
    _check_apart(out, run)
    check_no_model(out)
    check_target(out / "config.json", fix="Choose another folder")
    whole = load_whole(run, step)
    warnings = (*whole.warnings, *_lost_settings(plan))
    try:
        tokenizer = _tokenizer(plan)
    except DataError as error:  # export the weights in any case
        save(whole.model, out)
        told = f"{error}. So {out} has no tokenizer, and its config.json no end-of-text id"
        return Exported(whole.step, (*warnings, told))
    tokens, chats = {"eos_token_id": tokenizer.end_of_text}, _chats(plan, tokenizer)
    generation, told = _generation(plan, tokenizer, [tokenizer.end_of_text, *chats.stops])
    files = {**tokenizer_files(tokenizer), **chats.files, GENERATION: config_text(generation)}
    save(whole.model, out, extra=tokens, files=files)
    return Exported(whole.step, (*warnings, *told))


def _generation(plan: Plan, tokenizer: Tokenizer, stops: Sequence[int]) -> tuple[dict[str, Any], list[str]]:
    """Return the generation settings, and a line on settings that were left out. Settings come from
    the folder of the initial weights, else from the tokenizer's folder. stops: token ids that end a
    text, put before the settings' own."""
    own = tokenizer.path.parent if isinstance(tokenizer, FileTokenizer) else None
    first = Path(plan.settings.train.init_from) if plan.settings and plan.settings.train.init_from else None
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
    """Return the settings with these tokens first among the end-of-text tokens."""
    theirs = settings.get("eos_token_id", [])
    ends = list(dict.fromkeys([*stops, *(theirs if isinstance(theirs, list) else [theirs])]))
    return {**settings, "eos_token_id": ends if len(ends) > 1 else ends[0]}


class _ChatFiles(NamedTuple):
    """The files of a chat model besides its tokenizer. stops: token ids that end an answer."""

    files: dict[str, bytes]
    stops: list[int]


def _chats(plan: Plan, tokenizer: Tokenizer) -> _ChatFiles:
    """Return the chat template that the run was trained with, or else the template file beside its
    tokenizer."""
    assert plan.settings is not None
    data = plan.settings.data
    if "chats" in data.chat_rows:
        chats = readers_of(data, tokenizer)["chats"]
        assert chats.template is not None
        stops = [int(tokenizer.encode(end)[0]) for end in chats.ends]
        return _ChatFiles({TEMPLATE: chats.template.source.encode()}, stops)
    beside = tokenizer.path.with_name(TEMPLATE) if isinstance(tokenizer, FileTokenizer) else None
    return _ChatFiles({TEMPLATE: beside.read_bytes()} if beside and beside.is_file() else {}, [])


def _lost_settings(plan: Plan) -> list[str]:
    """Return a line on settings for which ``config.json`` of the model's family has no key. None of
    them affects the model outside of training."""
    if plan.model.family != "llama" or not plan.model.dropout:
        return []
    return [
        f"config.json of a Llama has no place for model.dropout = {plan.model.dropout:g}; set it where you train on"
    ]


def _check_apart(out: Path, run: Path) -> None:
    """Raise JobError for a folder that is, or lies in, a run or a checkpoint: files written there
    would be taken for parts of it."""
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
    if plan.settings is None:
        raise DataError("plan.json was made without a job, and names no tokenizer")
    return load_tokenizer(plan.settings.data.tokenizer)


END_OF_TEXT = "<|endoftext|>"  # the byte tokenizer's; no text can contain the token, whatever its name


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return ``tokenizer.json`` and ``tokenizer_config.json``: name -> content."""
    if isinstance(tokenizer, FileTokenizer):
        return _copied(tokenizer)
    assert isinstance(tokenizer, ByteTokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "split_special_tokens": True,  # the token's name, spelled out in a text, is thirteen ordinary bytes
        "clean_up_tokenization_spaces": False,
    }
    return {FILE: _byte_level(), SETTINGS: config_text(settings)}


def _copied(tokenizer: FileTokenizer) -> dict[str, bytes]:
    """Return the tokenizer's file unchanged, and its settings with the corpus's end-of-text
    token."""
    beside = tokenizer.path.with_name(SETTINGS)
    settings: dict[str, Any] = read_table(beside) if beside.is_file() else {}
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    if not settings.get("eos_token"):
        settings["eos_token"] = tokenizer.token(tokenizer.end_of_text)
    return {FILE: tokenizer.path.read_bytes(), SETTINGS: config_text(settings)}


def _byte_level() -> bytes:
    """Return the byte tokenizer in the format of ``tokenizers``: byte-level BPE without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE(vocab={name: byte for byte, name in enumerate(_characters())}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    made.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return made.to_str(pretty=True).encode()


def _characters() -> list[str]:
    """Return GPT-2's character for each byte: the byte itself if it is printable, else a character
    from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
