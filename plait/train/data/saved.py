"""Folders that Hugging Face ``datasets`` has saved (``Dataset.save_to_disk``): which Arrow files, in which
order.

| file | what it says |
|---|---|
| ``state.json`` | ``_data_files``: the Arrow files in order; ``_indices_data_files``: a selection of rows |
| ``dataset_info.json`` | what the data are; is there |
| ``dataset_dict.json`` | ``splits``: folders of several such datasets |

Source: datasets 4.0, ``arrow_dataset.py`` and ``dataset_dict.py`` (https://github.com/huggingface/datasets).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import DataError
from plait.core.base.numbers import shown
from plait.core.base.passed_over import PassedOver

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
OTHERS = "split(s) of a saved dataset, which are read where their folder is named"


def saved_files(root: Path, over: PassedOver) -> list[tuple[Path, str]]:
    """The Arrow files of a saved dataset, each with its name; none for another folder. Of several splits
    that of training. Raises DataError for one that is damaged or was saved with a selection of its rows."""
    if (root / SPLITS).is_file():
        splits = _listed(root / SPLITS, "splits")
        if "train" not in splits:
            raise DataError(
                f"{root}: is a saved dataset with the splits {', '.join(map(shown, splits))}; name one of these folders"
            )
        for other in splits:
            if other != "train":
                over.note(OTHERS, str(root / str(other)))
        root = root / "train"
    if not ((root / STATE).is_file() and (root / INFO).is_file()):
        return []
    files = _listed(root / STATE, "_data_files")
    if _table(root / STATE).get("_indices_data_files"):
        raise DataError(f"{root}: was saved with a selection of its rows; save it again after flatten_indices()")
    found = list[tuple[Path, str]]()
    for file in files:
        name = cast("dict[str, Any]", file).get("filename") if isinstance(file, dict) else None
        if not isinstance(name, str) or Path(name).name != name or not (root / name).is_file():
            raise DataError(f"{root / STATE}: names the file {shown(name)}, which is not in its folder; fetch it again")
        found.append((root / name, name))
    return found


def _table(file: Path) -> dict[str, Any]:
    try:
        return read_table(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error}); fetch the dataset again") from None


def _listed(file: Path, key: str) -> list[Any]:
    found = _table(file).get(key)
    if not isinstance(found, list) or not found:
        raise DataError(f"{file}: has no {shown(key)}; fetch the dataset again")
    return cast("list[Any]", found)
