"""The rules of the house that a machine can check: where torch and the environment live, sizes,
docstrings, programs, faces. Who may import whom stands in pyproject.toml, for import-linter.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

from plait.core.base import programs

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "plait").rglob("*.py"))
FACES = sorted(file for file in (ROOT / "plait" / "core").rglob("__init__.py") if file.parent.name != "core")
MAX_LINES = 600
MOST_NAMES = 12
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
    """The dotted name of everything imported, wherever the import stands; ``from a import b`` gives
    both ``a`` and ``a.b``."""
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


@rule([file for file in FILES if "train" not in file.parts])
def test_nothing_slow_is_imported_at_the_top(file: Path) -> object:
    top = [node for node in _tree(file).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    # What these compute on: columns of strategies, of nodes and jobs, of recordings.
    numbers = {folder: {"numpy"} for folder in ("plan", "place", "job_traces", "columns", "memory", "seconds")} | {
        "diagnose": {"numpy", "polars"}, "formats": {"numpy", "polars"},
        "view": {"numpy", "polars", "dash", "flask", "werkzeug"},  # cli imports it inside the verb
    }  # fmt: skip
    columns = set[str]().union(*(numbers[part] for part in file.parts if part in numbers))
    return {name.split(".")[0] for node in top for name in _imports(node)} & (STARTS_FAST - columns)


@rule([file for file in FILES if "core" in file.parts])
def test_core_needs_only_itself_and_few_libraries(file: Path) -> object:
    ours = {name.split(".")[0] for name in _imported(file)}
    return (
        ours
        - sys.stdlib_module_names
        - {"plait", "numpy", "pydantic", "pydantic_core", "annotated_types", "pyarrow", "yaml"}
    )


BROUGHT = {"yaml": "pyyaml", "flask": "dash", "werkzeug": "dash", "urllib3": "kubernetes", "google": "perfetto",
           "pydantic_core": "pydantic", "annotated_types": "pydantic"}  # fmt: skip
"""Distributions of packages that have another name, or come with them."""


def _declared() -> set[str]:
    """Distributions that pyproject.toml names, for everybody or in an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    names = [re.match(r"[\w.-]+", one) for each in lists for one in each]
    return {name[0].lower().replace("-", "_") for name in names if name}


@rule(FILES)
def test_what_is_imported_is_declared(file: Path) -> object:
    """An extra's package that is missing is named by its extra."""
    ours = {name.split(".")[0] for name in _imported(file)} - sys.stdlib_module_names
    return {name for name in ours if BROUGHT.get(name, name).lower() not in _declared()}


def _attributes(file: Path, owner: str) -> set[str]:
    """The ``x`` of every ``owner.x`` in the file."""
    nodes = (node for node in ast.walk(_tree(file)) if isinstance(node, ast.Attribute))
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == owner}


@rule([file for file in FILES if _name(file) not in ("plait/core/base/env.py", "plait/core/base/cluster_env.py")])
def test_the_environment_is_read_in_two_files(file: Path) -> object:
    read = _attributes(file, "os") & {"environ", "getenv", "environb", "putenv"}
    return read | {"os.environ", "os.getenv"} & set(_imported(file))


UNPICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNPICKLING_CALLS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
                    "send_object_list", "recv_object_list", "read_pickle"}  # fmt: skip


@rule(FILES)
def test_nothing_is_unpickled(file: Path) -> object:
    """Whoever unpickles runs what somebody else has written: not from files, not from other
    ranks."""
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
    """A method may lean on the docstring of the same method of another class in its file, or of a
    base of its class: the interface it implements."""
    found = list(_public(_tree(file).body))
    documented = {name.rpartition(".")[2] for name, has in [*found, *_inherited(file)] if has}
    return [name for name, has in found if not has and not ("." in name and name.rpartition(".")[2] in documented)]


@rule([file for file in FILES if file.read_text().strip()])
def test_every_module_says_what_it_is_for(file: Path) -> object:
    return not ast.get_docstring(_tree(file))


def test_the_contracts_of_imports_are_kept() -> None:
    assert lint_imports(str(ROOT / "pyproject.toml"), cache_dir=None, no_logo=True) == EXIT_STATUS_SUCCESS


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.parent.name)
def test_a_package_names_the_modules_that_others_may_import(face: Path) -> None:
    names = import_module(".".join(face.relative_to(ROOT).parent.parts)).__all__
    there = {path.stem for path in face.parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert len(names) <= MOST_NAMES
    assert set(names) <= there


PROGRAMS = {name: value for name, value in vars(programs).items() if name.isupper()}


@pytest.mark.parametrize("module", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_are_there(module: str) -> None:
    assert find_spec(module)


@rule(FILES)
def test_a_program_starts_at_the_end_of_its_file(file: Path) -> object:
    """What stands behind is not defined yet when it runs."""
    return [
        node.lineno
        for node in _tree(file).body[:-1]
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
    ]


@rule([file for file in FILES if file.name != "programs.py"])
def test_programs_are_named_in_one_file(file: Path) -> object:
    """A module that another starts is an import that no linter sees."""
    texts = {node.value for node in ast.walk(_tree(file)) if isinstance(node, ast.Constant)}
    return texts & set(PROGRAMS.values())
