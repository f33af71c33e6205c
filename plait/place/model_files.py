"""A fitted predictor as a folder: LightGBM's own text files, and ``model.json`` that says what they
expect."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import DataError
from plait.core.base.files import contents_within, reason_of, replacing
from plait.place.groups import GroupMeans
from plait.place.jct import JctSettings, Predictor

VERSION = 2
ABOUT = "model.json"
LARGEST = 64 << 20
"""Bytes of a file of trees: ten times those of a trace of a million jobs."""


def save(model: Predictor, folder: Path) -> None:
    """Write a model; ``model.json`` last, so that a folder with one is whole."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ABOUT).unlink(missing_ok=True)
        for name, booster in _boosters(model).items():
            with replacing(folder / name) as partial:
                partial.write_text(booster.model_to_string())
        about = {
            "version": VERSION,
            "settings": asdict(model.settings),
            "columns": list(model.columns),
            "names": {name: list(names) for name, names in model.names.items()},
            "means": model.groups.means,
            "margins": model.margins,
            "sure": list(model.sure),
        }
        with replacing(folder / ABOUT) as partial:
            partial.write_text(json.dumps(about, indent=1) + "\n")
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}. Choose another with --out.") from None


def load(folder: Path) -> Predictor:
    """Read what ``save`` has written. Raises DataError for anything else."""
    if (folder / ABOUT).exists() and not (folder / ABOUT).is_file():
        raise DataError(f"{folder} holds no model of plait queue fit: its {ABOUT} is no file")
    try:
        about = read_table(folder / ABOUT)
        if about["version"] != VERSION:
            raise DataError(f"{folder} was written in version {about['version']}; {VERSION} is read. Fit it again.")
        settings = JctSettings(**about["settings"])
        return Predictor(
            settings=settings,
            columns=tuple(about["columns"]),
            names={name: tuple(names) for name, names in about["names"].items()},
            bags=tuple(_read(folder / f"log-{bag}.txt") for bag in range(settings.bags)),
            mean=_read(folder / "buckets.txt"),
            upper=_read(folder / "upper.txt"),
            groups=GroupMeans(means=_numbers(about["means"])),
            margins=_numbers(about["margins"]),
            sure=tuple(about["sure"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"{folder} holds no model of plait queue fit: {' '.join(reason_of(error).split())}") from None


def _numbers(table: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {kind: {group: float(value) for group, value in own.items()} for kind, own in table.items()}


def _boosters(model: Predictor) -> dict[str, Any]:
    bags = {f"log-{number}.txt": bag for number, bag in enumerate(model.bags)}
    return {**bags, "buckets.txt": model.mean, "upper.txt": model.upper}


def _read(file: Path) -> Any:
    gbm = import_module("lightgbm")
    try:
        return gbm.Booster(model_str=contents_within(file, LARGEST).decode())
    except gbm.basic.LightGBMError as error:
        raise ValueError(f"{file.name}: {error}") from None
