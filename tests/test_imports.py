"""The rules of the house that a machine can check: who may import whom, where torch and the environment live,
sizes, docstrings.

core  <-  plan, place, train, diagnose, launch, lab  <-  cli
                            diagnose  <-  view  <-  cli
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "plait").rglob("*.py"))
VERBS = {"plan", "place", "train", "diagnose", "launch", "lab"}
TRAIN = ("profile", "tune", "engine", "checkpoint", "record", "data", "model", "comm", "machine")
"""Folders of ``plait/train``: each imports only itself and those after it."""
MAX_LINES = 600

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


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), filename=str(file))


def rule(files: list[Path]) -> Callable[[Callable[[Path], object]], Callable[[], None]]:
    """A test that holds every file to a rule: the function gives what breaks it in one file."""

    def decorated(broken_in: Callable[[Path], object]) -> Callable[[], None]:
        @wraps(broken_in)
        def test() -> None:
            broken = {_name(file): found for file in files if (found := broken_in(file))}
            assert broken == {}, broken_in.__doc__ or ""

        del test.__wrapped__  # pytest would take the file for a fixture
        return test

    return decorated


@cache
def _imported(file: Path) -> list[str]:
    return list(_imports(_tree(file)))


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


def _folders(file: Path) -> set[str]:
    """The folders of Plait that are imported."""
    return {
        name.split(".")[1]
        for name in _imported(file)
        if name.startswith("plait.") and name.split(".")[1] in {*VERBS, "view", "core", "cli"}
    }


@rule(FILES)
def test_imports_follow_the_arrows(file: Path) -> object:
    """Data crosses between verbs, not calls."""
    folder = file.relative_to(ROOT / "plait").parts[0]
    allowed = {"core": {"core"}, "cli": {"core", "cli", "view", *VERBS}, "view": {"core", "diagnose", "view"}} | {
        verb: {"core", verb} for verb in VERBS
    }
    return _folders(file) - allowed.get(folder, set())


@rule([file for file in FILES if "train" in file.parts and file.parent.name in TRAIN])
def test_the_folders_of_train_are_layers(file: Path) -> object:
    words = [name.split(".") for name in _imported(file) if name.startswith("plait.train.")]
    return {word[2] for word in words} - set(TRAIN[TRAIN.index(file.parent.name) :])


@rule(FILES)
def test_heavy_libraries_stay_where_they_belong(file: Path) -> object:
    found = {name.split(".")[0] for name in _imported(file)} & set(ONLY_IN)
    return {library for library in found if not _name(file).startswith(ONLY_IN[library] or ("-",))}


@rule([file for file in FILES if "train" not in file.parts])
def test_nothing_slow_is_imported_at_the_top(file: Path) -> object:
    top = [node for node in _tree(file).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    # What these compute on: columns of strategies, of nodes and jobs, of recordings.
    numbers = {folder: {"numpy"} for folder in ("plan", "place", "traces")} | {
        "diagnose": {"numpy", "polars"},
        "view": {"numpy", "polars", "dash", "flask", "werkzeug"},  # cli imports it inside the verb
    }
    columns = numbers.get(file.parent.name, set[str]())
    return {name.split(".")[0] for node in top for name in _imports(node)} & (STARTS_FAST - columns)


@rule([file for file in FILES if file.parent.name == "core"])
def test_core_needs_only_itself_and_few_libraries(file: Path) -> object:
    ours = {name.split(".")[0] for name in _imported(file)}
    return ours - sys.stdlib_module_names - {"plait", "numpy", "pydantic", "annotated_types", "pyarrow", "yaml"}


def _attributes(file: Path, owner: str) -> set[str]:
    """The ``x`` of every ``owner.x`` in the file."""
    nodes = (node for node in ast.walk(_tree(file)) if isinstance(node, ast.Attribute))
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == owner}


@rule([file for file in FILES if _name(file) != "plait/core/env.py"])
def test_the_environment_is_read_in_one_file(file: Path) -> object:
    read = _attributes(file, "os") & {"environ", "getenv", "environb", "putenv"}
    return read | {"os.environ", "os.getenv"} & set(_imported(file))


UNPICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNPICKLING_CALLS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
                    "send_object_list", "recv_object_list", "read_pickle"}  # fmt: skip


@rule(FILES)
def test_nothing_is_unpickled(file: Path) -> object:
    """Whoever unpickles runs what somebody else has written: not from files, not from other ranks."""
    tree = _tree(file)
    imported = {part for name in _imported(file) for part in name.split(".")}
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    keywords = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    return (
        (imported & (UNPICKLES | UNPICKLING_CALLS))
        | {name for name in _imported(file) if name.startswith("torch.distributed.checkpoint")}
        | (called & UNPICKLING_CALLS)
        | (_attributes(file, "torch") & {"load"})
        | (keywords & {"allow_pickle"})
    )


@rule([file for file in FILES if _name(file) not in ("plait/train/machine/device.py", "plait/train/machine/gpu.py")])
def test_torch_cuda_is_named_by_devices_alone(file: Path) -> object:
    read = _attributes(file, "torch") & {"cuda"}
    return read | {name for name in _imported(file) if name.startswith("torch.cuda")}


@rule(FILES)
def test_a_file_can_be_read_in_one_sitting(file: Path) -> object:
    lines = len(file.read_text().splitlines())
    return lines if lines > MAX_LINES else 0


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


@rule(FILES)
def test_public_names_are_documented(file: Path) -> object:
    """A method may lean on the docstring of the same method of another class in its file, or of a base of its
    class: the interface it implements."""
    found = list(_public(_tree(file).body))
    documented = {name.rpartition(".")[2] for name, has in [*found, *_inherited(file)] if has}
    return [name for name, has in found if not has and not ("." in name and name.rpartition(".")[2] in documented)]


@rule([file for file in FILES if file.read_text().strip()])
def test_every_module_says_what_it_is_for(file: Path) -> object:
    return not ast.get_docstring(_tree(file))
