"""A Hugging Face folder as far as its files tell, without torch and before a rank starts: which of them hold
the weights, and whether these are of the job's model.

| what a folder has | what becomes of it |
|---|---|
| ``config.json`` (may be missing) | its keys as ``core.model.huggingface`` says; shapes equal to the job's |
| ``model.safetensors``, else the index and its shards | headers checked, names and shapes compared |
| an index beside ``model.safetensors``; constants of older files | passed over, counted |
| a head beside tied embeddings | passed over if equal to the word embedding, else refused |
| a tensor that is missing, of another shape, in two files, or without a place | refused by name |
| other formats (``pytorch_model.bin``), files that the index does not name | not looked at |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np

from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import CheckpointError, JobError, written
from plait.core.base.files import check_path, kind_of, reason_of
from plait.core.base.numbers import shown
from plait.core.base.passed_over import PassedOver
from plait.core.model.families import EMBEDDING, HEAD, PREFIX
from plait.core.model.huggingface import read_config
from plait.core.model.spec import ModelSpec
from plait.train.checkpoint.weight_headers import TensorHeader, read_header
from plait.train.checkpoint.weight_names import is_constant, shapes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""dtypes that weights may have."""
FREE = ("max_sequence", "tied_embeddings", "dropout", "attention_dropout", "levels", "parallel_block")
"""Fields in which a folder and a job may differ. Whether the head is tied, the tensors tell; what no folder
has is refused by itself. Learned positions must be as many."""
_AT_ONCE = 4 << 20
"""Numbers that are compared at once."""


def check_weights(folder: Path, spec: ModelSpec) -> PassedOver:
    """Refuse at once what ranks would refuse when they have started; what was passed over.

    Raises JobError for a folder that is not there, CheckpointError for one without weights, or with those of
    another model. Of the weights themselves only a head beside tied embeddings is read.
    """
    over = PassedOver()
    try:
        if (kind := kind_of(folder)) != "folder":
            problem = f"{folder} is a {kind}, and a folder is needed" if kind else f"{folder}: no such folder"
            fix = "Name a Hugging Face folder with config.json and safetensors, or leave it out"
            raise JobError(problem, key="train.init_from", fix=fix)
        check_config(spec, folder, over)
        stored_tensors(spec, folder, over)
    except OSError as error:
        raise JobError(f"{folder} cannot be read: {error.strerror}", key="train.init_from",
                       fix="Check its permissions, or leave it out") from None  # fmt: skip
    return over


def check_config(spec: ModelSpec, folder: Path, over: PassedOver | None = None) -> None:
    """Raise CheckpointError if ``config.json`` describes another model; there may be none."""
    if not (folder / "config.json").is_file():
        return
    theirs = read_config(folder, over)
    same = [field.name for field in fields(ModelSpec) if field.name not in FREE]
    same += ["max_sequence"] if spec.learned_positions else []
    others = {name: (getattr(theirs, name), getattr(spec, name)) for name in same}
    others = {name: pair for name, pair in others.items() if pair[0] != pair[1]}
    if not others:
        return
    told = ", ".join(f"{name} is {found} there and {ours} in the job" for name, (found, ours) in others.items())
    plain = theirs.to_dict()
    changes = " and ".join(f"model.{name}={written(plain[name])}" for name in others if plain[name] is not None)
    raise CheckpointError(
        f"{folder / 'config.json'}: describes another model: {told}. Set {changes or 'the same'}, or name another "
        "folder"
    )


def stored_tensors(spec: ModelSpec, folder: Path, over: PassedOver | None = None) -> dict[str, TensorHeader]:
    """Every tensor of the model, by name without the family's prefix. Raises CheckpointError naming the file
    or tensor for what is missing, superfluous, damaged, ambiguous or of another shape."""
    over = over if over is not None else PassedOver()
    tensors = dict[str, TensorHeader]()
    for one in _stored(folder, over):
        name = one.name.removeprefix(PREFIX[spec.family])
        if other := tensors.get(name):
            raise CheckpointError(
                f"{folder}: tensor '{one.name}' stands twice, in {one.file.name} and, as '{other.name}', in "
                f"{other.file.name}. Keep one of the two"
            )
        tensors[name] = one
    wanted = shapes(spec)
    for name, shape in wanted.items():
        _check(tensors, name, shape, folder)
    for name in sorted(set(tensors) - set(wanted)):
        one = tensors.pop(name)
        if is_constant(spec, name):
            over.note("tensors that layers compute themselves", one.name)
        elif name == HEAD:  # beside tied embeddings
            _check_head(one, tensors[EMBEDDING["llama" if spec.family == "llama" else "gpt"]])
            over.note("heads equal to the word embedding, with which they are tied", one.name)
        else:
            raise CheckpointError(
                f"{one.file}: tensor '{one.name}' has no place in this model ({spec.family}, {spec.num_layers} layers)"
            )
    return tensors


def _stored(folder: Path, over: PassedOver) -> Iterator[TensorHeader]:
    """The tensors of ``model.safetensors``, or of an index's shards, each from where the index has it."""
    if (folder / SINGLE).is_file():
        if (folder / INDEX).exists():
            over.note(f"indexes of shards, since {SINGLE} stands beside them", str(folder / INDEX))
        yield from read_header(folder / SINGLE).values()
        return
    where = _index(folder)
    for file in sorted(set(where.values())):
        found = read_header(folder / file)
        if absent := next((name for name, named in where.items() if named == file and name not in found), None):
            raise CheckpointError(f"{folder / file}: has no tensor {absent!r}, which {INDEX} says it has")
        for one in found.values():
            if (named := where.get(one.name)) != file:
                told = f"says it is in {named}" if named else "does not name it"
                raise CheckpointError(
                    f"{folder / file}: holds tensor '{one.name}', and {INDEX} {told}. Nobody knows which is meant; "
                    "take it out of one of the two, or fetch the folder again"
                )
            yield one


def _index(folder: Path) -> dict[str, str]:
    """Tensor -> name of its file. Raises CheckpointError where there is no such index."""
    file = folder / INDEX
    try:
        named = read_table(file, unique=True).get("weight_map")
    except FileNotFoundError:
        fix = "Other formats can be converted with save_pretrained of transformers"
        raise CheckpointError(f"{folder}: holds neither {SINGLE} nor {INDEX}. {fix}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {reason_of(error)}. Fetch it again") from None
    if not isinstance(named, dict) or not named or not all(isinstance(name, str) for name in named.values()):
        raise CheckpointError(f"{file}: its weight_map is no table of tensors and their files. Fetch it again")
    for name in set(named.values()):
        try:
            check_path(name, "weight_map")
        except JobError as error:
            raise CheckpointError(f"{file}: {error}") from None
        if Path(name).name != name or name in (".", ".."):
            raise CheckpointError(f"{file}: {shown(name)} is no name of a file beside it")
    return named


def _check(tensors: dict[str, TensorHeader], name: str, shape: tuple[int, ...], folder: Path) -> None:
    """Raise CheckpointError if a tensor is missing, of another shape, or holds no floating-point numbers."""
    if name not in tensors:
        fix = ". A model without a head of its own needs model.tied_embeddings = true" if name == HEAD else ""
        raise CheckpointError(f"{folder}: tensor '{name}' is missing{fix}")
    found = tensors[name]
    if found.shape != shape:
        raise CheckpointError(
            f"{found.file}: tensor '{found.name}' has shape {shown(list(found.shape))}, expected {list(shape)}"
        )
    if found.dtype not in FLOATS:
        raise CheckpointError(
            f"{found.file}: tensor '{found.name}' holds {found.dtype}, expected one of {', '.join(FLOATS)} "
            "(not quantised)"
        )


def _check_head(head: TensorHeader, embedding: TensorHeader) -> None:
    """Raise CheckpointError for a head that is another than the word embedding, with which it is tied."""
    if head.shape == embedding.shape and head.dtype in FLOATS and _equal(head, embedding):
        return
    raise CheckpointError(
        f"{head.file}: tensor '{head.name}' differs from '{embedding.name}', and the model ties the two. Set "
        "model.tied_embeddings = false to train both, or take the tensor out to train the embedding alone"
    )


def _equal(one: TensorHeader, other: TensorHeader) -> bool:
    """Whether two tensors of one shape hold the same numbers, read a part at a time."""
    count = int(np.prod(one.shape, dtype=np.int64))
    return all(
        np.array_equal(_numbers(one, begin, count), _numbers(other, begin, count), equal_nan=True)
        for begin in range(0, count, _AT_ONCE)
    )


def _numbers(stored: TensorHeader, begin: int, count: int) -> np.ndarray:
    """Numbers ``begin ..`` of a tensor's ``count``, at most ``_AT_ONCE`` of them, as fp64 [numbers]."""
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
    kind = np.dtype(kinds[stored.dtype])
    with open(stored.file, "rb") as file:
        file.seek(stored.start + begin * kind.itemsize)
        values = np.frombuffer(file.read(min(_AT_ONCE, count - begin) * kind.itemsize), kind)
    if stored.dtype == "BF16":  # the upper half of an fp32
        values = (values.astype("<u4") << 16).view("<f4")
    return values.astype(np.float64)
