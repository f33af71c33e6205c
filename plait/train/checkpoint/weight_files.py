"""A Hugging Face folder as far as its files tell, without torch and before a rank starts: which of them hold
the weights, and whether they are of the job's model."""

from __future__ import annotations

import json
from pathlib import Path

from plait.core.errors import CheckpointError, JobError
from plait.core.files import contents, kind_of
from plait.core.model import ModelSpec

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SAME = (
    "family",
    "num_layers",
    "hidden",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "ffn_hidden",
    "vocab",
    "tied_embeddings",
    "norm_eps",
    "rope_theta",
    "rope_scaling",
)
"""Shapes that a folder and a job must have alike."""


def check_weights(folder: Path, spec: ModelSpec) -> None:
    """Refuse at once what ranks would refuse when they have started. Raises JobError for a folder that is not
    there, CheckpointError for one without weights, or with those of another model."""
    try:
        if (kind := kind_of(folder)) != "folder":
            problem = f"{folder} is a {kind}, and a folder is needed" if kind else f"{folder}: no such folder"
            fix = "Name a Hugging Face folder with config.json and safetensors, or leave it out"
            raise JobError(problem, key="train.init_from", fix=fix)
        check_config(spec, folder)
        for file in weight_files(folder):
            if (kind := kind_of(file)) != "file":
                raise CheckpointError(f"{file}: {f'is a {kind}, no regular file' if kind else 'missing'}")
    except OSError as error:
        raise JobError(f"{folder} cannot be read: {error.strerror}", key="train.init_from") from None


def check_config(spec: ModelSpec, folder: Path) -> None:
    """Raise CheckpointError if ``config.json`` describes another model; there may be none."""
    if not (folder / "config.json").is_file():
        return
    theirs = ModelSpec.from_huggingface(folder)
    for field in SAME:
        ours, found = getattr(spec, field), getattr(theirs, field)
        if ours != found:
            raise CheckpointError(
                f"{folder / 'config.json'}: describes another model: {field} is {found} there and {ours} in the job"
            )


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, which may be missing. Raises CheckpointError where nothing names
    them."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    try:
        names = sorted(set(json.loads(contents(folder / INDEX))["weight_map"].values()))
        if outside := next((name for name in names if Path(name).name != name), None):
            raise CheckpointError(f"{folder / INDEX}: {outside!r} is no name of a file beside it")
        return [folder / name for name in names]
    except FileNotFoundError:
        fix = "Other formats can be converted with save_pretrained of transformers"
        raise CheckpointError(f"{folder}: holds neither {SINGLE} nor {INDEX}. {fix}") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder / INDEX}: cannot be read: {error}") from None
