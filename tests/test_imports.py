"""The rules of the house that a machine can check: who may import whom, where torch and the environment live,
sizes, docstrings.

core  <-  plan, place, train, diagnose, launch, lab  <-  cli
                            diagnose  <-  view  <-  cli
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "plait").rglob("*.py"))
VERBS = {"plan", "place", "train", "diagnose", "launch", "lab"}
TRAIN = ("profile", "tune", "engine", "checkpoint", "record", "data", "model", "comm", "machine")
"""Folders of ``plait/train``: each imports only itself and those after it."""
MAX_LINES = 400

# A library that only the files listed may import: it is slow to load, heavy, or belongs to one decision.
ONLY_IN = {
    "torch": ("plait/train/",),
    "transformers": (),  # the tests' reference
    "scipy": ("plait/place/mip.py",),
    "highspy": ("plait/place/mip.py",),
    "pulp": ("plait/place/mip.py",),
    "ortools": ("plait/plan/reshard_exact.py", "plait/place/cpsat.py"),
    "matplotlib": ("plait/diagnose/plots.py", "plait/place/draw.py"),
    "lightgbm": ("plait/place/jct.py", "plait/place/model_files.py"),
    "pandas": ("plait/place/traces/",),
    "typer": ("plait/cli/",),
    "polars": ("plait/diagnose/", "plait/view/"),
    "plotly": ("plait/view/report.py",),
    **{
        name: tuple(
            f"plait/view/{file}.py"
            for file in ("app", "layout", "callbacks", "heat_callbacks", "timeline_callbacks", "key_callbacks")
        )
        for name in ("dash", "flask", "werkzeug")
    },
    "perfetto": ("plait/diagnose/perfetto.py",),
    "prometheus_client": ("plait/launch/collect/live.py",),
    "tensorboardX": ("plait/launch/collect/loggers.py",),
    "wandb": ("plait/launch/collect/loggers.py",),
    "rich": (),  # would read what users write as markup, and cut tables to the width of a terminal
    "pydantic": (
        *(
            f"plait/core/{name}.py"
            for name in (
                "job",
                "settings",
                "explain",
                "reference",
                "cluster",
                "efficiency",
                "profile",
                "placement_profile",
                "kubernetes_settings",
                "slurm_settings",
                "plan_file",
            )
        ),
        "plait/view/app.py",  # requests are anybody's
    ),
}
STARTS_FAST = {
    "torch",
    "pyarrow",
    "polars",
    "perfetto",
    "numpy",
    "pandas",
    "lightgbm",
    "safetensors",
    "tokenizers",
    "transformers",
    "dash",
    "flask",
    "werkzeug",
    "plotly",
}  # slow; core imports them inside functions


def _name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), filename=str(file))


def _imports(tree: ast.AST) -> Iterator[str]:
    """The dotted name of everything imported, wherever the import stands; ``from a import b`` gives both
    ``a`` and ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            yield from (
                arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


def _folders(tree: ast.AST) -> set[str]:
    """The folders of Plait that are imported."""
    return {
        name.split(".")[1]
        for name in _imports(tree)
        if name.startswith("plait.") and name.split(".")[1] in {*VERBS, "view", "core", "cli"}
    }


@pytest.mark.parametrize("file", FILES, ids=_name)
def test_imports_follow_the_arrows(file: Path) -> None:
    folder = file.relative_to(ROOT / "plait").parts[0]
    allowed = {"core": {"core"}, "cli": {"core", "cli", "view", *VERBS}, "view": {"core", "diagnose", "view"}} | {
        verb: {"core", verb} for verb in VERBS
    }
    assert _folders(_tree(file)) <= allowed.get(folder, set()), "data crosses between verbs, not calls"


@pytest.mark.parametrize("file", [f for f in FILES if "train" in f.parts and f.parent.name in TRAIN], ids=_name)
def test_the_folders_of_train_are_layers(file: Path) -> None:
    words = [name.split(".") for name in _imports(_tree(file)) if name.startswith("plait.train.")]
    assert {word[2] for word in words} <= set(TRAIN[TRAIN.index(file.parent.name) :])


@pytest.mark.parametrize("file", FILES, ids=_name)
def test_heavy_libraries_stay_where_they_belong(file: Path) -> None:
    wrong = {name.split(".")[0] for name in _imports(_tree(file))} & set(ONLY_IN)
    assert {library for library in wrong if not _name(file).startswith(ONLY_IN[library] or ("-",))} == set()


@pytest.mark.parametrize("file", [f for f in FILES if "train" not in f.parts], ids=_name)
def test_nothing_slow_is_imported_at_the_top(file: Path) -> None:
    top = [node for node in _tree(file).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    # What these compute on: columns of strategies, of nodes and jobs, of recordings.
    numbers = {folder: {"numpy"} for folder in ("plan", "place", "traces")} | {
        "diagnose": {"numpy", "polars"},
        "view": {"numpy", "polars", "dash", "flask", "werkzeug"},  # cli imports it inside the verb
    }
    columns = numbers.get(file.parent.name, set[str]())
    assert {name.split(".")[0] for node in top for name in _imports(node)} & (STARTS_FAST - columns) == set()


@pytest.mark.parametrize("file", [f for f in FILES if f.parent.name == "core"], ids=_name)
def test_core_needs_only_itself_and_few_libraries(file: Path) -> None:
    ours = {name.split(".")[0] for name in _imports(_tree(file))}
    assert ours <= sys.stdlib_module_names | {"plait", "numpy", "pydantic", "annotated_types", "pyarrow"}


def _attributes(file: Path, owner: str) -> set[str]:
    """The ``x`` of every ``owner.x`` in the file."""
    nodes = (node for node in ast.walk(_tree(file)) if isinstance(node, ast.Attribute))
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == owner}


@pytest.mark.parametrize("file", FILES, ids=_name)
def test_the_environment_is_read_in_one_file(file: Path) -> None:
    if _name(file) != "plait/core/env.py":
        assert _attributes(file, "os") & {"environ", "getenv", "environb", "putenv"} == set()
        assert {"os.environ", "os.getenv"} & set(_imports(_tree(file))) == set()


UNPICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNPICKLING_CALLS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
                    "send_object_list", "recv_object_list", "read_pickle"}  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=_name)
def test_nothing_is_unpickled(file: Path) -> None:
    """Whoever unpickles runs what somebody else has written: not from files, not from other ranks."""
    tree = _tree(file)
    imported = {part for name in _imports(tree) for part in name.split(".")}
    assert imported & (UNPICKLES | UNPICKLING_CALLS) == set()
    assert not any(name.startswith("torch.distributed.checkpoint") for name in _imports(tree))
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert called & UNPICKLING_CALLS == set()
    assert "load" not in _attributes(file, "torch")
    keywords = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    assert "allow_pickle" not in keywords


@pytest.mark.parametrize("file", FILES, ids=_name)
def test_torch_cuda_is_named_by_devices_alone(file: Path) -> None:
    if _name(file) not in ("plait/train/machine/device.py", "plait/train/machine/gpu.py"):
        assert "cuda" not in _attributes(file, "torch")
        assert not any(name.startswith("torch.cuda") for name in _imports(_tree(file)))


@pytest.mark.parametrize("file", FILES, ids=_name)
def test_a_file_can_be_read_in_one_sitting(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= MAX_LINES


def _public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Every public definition and whether it is documented."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield prefix + node.name, ast.get_docstring(node) is not None
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body, f"{node.name}.")


def _inherited(file: Path) -> Iterator[tuple[str, bool]]:
    """The methods of classes of other files from which a file's classes inherit."""
    tree = _tree(file)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {base.id for node in classes for base in node.bases if isinstance(base, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("plait."):
            other = ROOT / f"{str(node.module).replace('.', '/')}.py"
            wanted = bases & {alias.name for alias in node.names}
            for name, has in _public(_tree(other).body) if wanted and other.is_file() else ():
                if name.partition(".")[0] in wanted:
                    yield name, has


@pytest.mark.parametrize("file", FILES, ids=_name)
def test_public_names_are_documented(file: Path) -> None:
    """A method may lean on the docstring of the same method of another class in its file, or of a base of its
    class: the interface it implements."""
    found = list(_public(_tree(file).body))
    documented = {name.rpartition(".")[2] for name, has in [*found, *_inherited(file)] if has}
    missing = [name for name, has in found if not has and not ("." in name and name.rpartition(".")[2] in documented)]
    assert missing == []


@pytest.mark.parametrize("file", FILES, ids=_name)
def test_every_module_says_what_it_is_for(file: Path) -> None:
    if file.read_text().strip():
        assert ast.get_docstring(_tree(file))
