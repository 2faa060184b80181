"""The architecture: layers of packages, unique names of modules, public names, documentation."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import autopar
from autopar import derived_methods, methods

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "simulator": {"autopar", "experiments", "tests", "jax", "jaxlib", "flax", "optax"},
    "autopar": {"experiments", "tests", "snakemake"},
    "experiments": {"tests"},
}
FILES = [path for package in FORBIDDEN for path in sorted((ROOT / package).rglob("*.py"))]


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements of a file, also those inside functions."""
    return [node for node in nodes_of(path) if isinstance(node, ast.Import | ast.ImportFrom)]


@pytest.fixture(autouse=True, scope="module")
def _dropped_trees() -> Iterator[None]:
    """Drop the syntax trees after the last test, so that later garbage collections skip them."""
    yield
    nodes_of.cache_clear()
    imports.cache_clear()


def imported(path: Path) -> set[str]:
    """Return the top-level packages that a file imports."""
    packages = set()
    for node in imports(path):
        if isinstance(node, ast.Import):
            packages.update(alias.name.split(".")[0] for alias in node.names)
        elif node.module and not node.level:
            packages.add(node.module.split(".")[0])
    return packages


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_packages_import_no_forbidden_package(path):
    package = path.relative_to(ROOT).parts[0]
    assert not imported(path) & FORBIDDEN[package]


LAYERS = (
    *(
        "simulator.hardware",
        "simulator.costs",
        "simulator.engine",
        "simulator.report",
        "simulator.hlo",
    ),
    *("simulator.transformer", "simulator.calibration", "simulator.validation"),
    *(
        "autopar.ir",
        "autopar.primitives",
        "autopar.xla_fusion",
        "autopar.layering",
        "autopar.microbatch",
        "autopar.tracing",
        "autopar.sharding",
        "autopar.recompute",
        "autopar.pipeline",
    ),
    *(
        "autopar.lowering",
        "autopar.analysis",
        "autopar.planning",
        "autopar.prediction",
        "autopar.capacity",
        "autopar.report",
    ),
    *("autopar.runtime", "autopar.checkpoint", "autopar.hosts"),
    *("autopar.manual", "autopar.directives", "autopar.model_schedules", "autopar.tuning"),
    *("experiments.models", "experiments.by_hand", "experiments.measurements", "experiments.reach"),
    *("experiments.validation", "experiments.report", "experiments.scripts"),
    "experiments.paper",
)
"""Packages from the lowest to the highest layer; each imports only those before it.

A module outside of packages is a layer of its own.
"""


def layer_of(module: str) -> str:
    """Return the package of a module, or the module itself if it is outside of packages."""
    package = module.rpartition(".")[0]
    return next(
        (name for name in LAYERS if f"{module}.".startswith(f"{name}.") and name.count(".")),
        package and module,
    )


def test_packages_are_layers():
    """No package imports a higher layer, and there is no cycle of modules outside of packages.

    Imports inside functions and for type checking count, too.
    """
    modules = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in FILES
    }
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        for node in imports(path):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [
                    full if (full := f"{node.module}.{name}") in modules else str(node.module)
                    for name in names
                ]
            graph.setdefault(layer_of(module), set()).update(
                layer_of(name) for name in names if name in modules
            )
    packages = [name for name in LAYERS if name in graph]
    upward = [(a, b) for n, a in enumerate(packages) for b in packages[n + 1 :] if b in graph[a]]
    assert not upward
    # raises CycleError
    TopologicalSorter({name: names - {name} for name, names in graph.items()}).prepare()


def test_only_one_module_uses_private_jax():
    private = [p.name for p in FILES if "jax._src" in p.read_text() or "jaxlib" in imported(p)]
    assert private == ["_plugins.py"]


def test_module_names_are_unique():
    names = Counter(path.stem for path in FILES)
    assert {name for name, count in names.items() if count > 1} == {"__init__", "__main__"}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_class_names_are_unique_within_a_package(package):
    names = Counter(
        node.name
        for path in FILES
        if path.relative_to(ROOT).parts[0] == package and path.parent.name != "tutorials"
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def is_class_of(value: object, module: ModuleType) -> bool:
    """Return whether a value is a class that a module defines."""
    return isinstance(value, type) and value.__module__ == module.__name__


METHODS = {
    name
    for module in (methods, derived_methods)
    for name, value in vars(module).items()
    if is_class_of(value, module)
}
"""Names of the classes of methods."""


def class_tests(path: Path) -> list[str]:
    """Return "file:line" of the tests whether a value is an executable or a method of a class."""
    lines = []
    for node in nodes_of(path):
        classes: list[ast.AST] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            classes = list(ast.walk(node.args[1]))
        elif isinstance(node, ast.MatchClass):
            classes = [node.cls]
        names = {ast.unparse(part).rpartition(".")[2] for part in classes}
        if names & METHODS or any(name.endswith("Executable") for name in names):
            lines.append(f"{path.relative_to(ROOT).as_posix()}:{node.lineno}")
    return lines


def test_one_match_dispatches_over_methods_and_none_over_executables():
    """What differs between methods or executables is a method of their classes instead."""
    tests = [
        line for path in FILES if path.parent.name != "tutorials" for line in class_tests(path)
    ]
    (dispatch,) = (
        node
        for node in nodes_of(ROOT / "autopar" / "api.py")
        if isinstance(node, ast.Match) and ast.unparse(node.subject) == "self.method"
    )
    *cases, _ = dispatch.cases
    assert set(tests) == {f"autopar/api.py:{case.pattern.lineno}" for case in cases}


def test_the_layout_page_has_every_package():
    page = (ROOT / "docs" / "developing" / "layout.md").read_text()
    parents = {path.parent for path in FILES if path.relative_to(ROOT).parts[0] != "experiments"}
    packages = {path.name for path in parents if path.parent.parent == ROOT}
    assert {name for name in packages if f"`{name}`" not in page} == set()


@pytest.mark.parametrize(
    "page",
    [
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs" / "developing").glob("*.md")),
        *sorted((ROOT / "docs" / "concepts").glob("*.md")),
    ],
    ids=lambda path: path.name,
)
def test_a_file_of_the_code_that_a_page_names_exists(page):
    text = page.read_text()
    files = [path.as_posix() for path in (*FILES, *ROOT.glob("*/*.py"))]
    modules = re.findall(r"`([\w/]+\.py)`", text)
    assert [name for name in modules if not any(file.endswith(f"/{name}") for file in files)] == []
    paths = re.findall(rf"`((?:{'|'.join(FORBIDDEN)}|docs|benchmarks)/[^`]*)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


PUBLIC = {
    "autopar",
    "autopar.calibrate",
    "autopar.directives",
    "autopar.host_benchmarks",
    "autopar.manual",
    "autopar.microbenchmarks",
    "autopar.model_schedules",
    "autopar.report",
    "autopar.testing",
    "autopar.tuning",
    "autopar.util",
    "simulator",
    "simulator.calibration",
    "simulator.files",
    "simulator.hlo",
    "simulator.transformer",
    "simulator.validation",
}
"""The modules that users import from; the `__all__` of each lists its public names."""


def used_names(path: Path) -> set[tuple[str, str]]:
    """Return (module, name) pairs for the names of autopar and simulator that a file uses.

    It imports them, or accesses them as attributes of a module that it imports.
    """
    names: set[tuple[str, str]] = set()
    modules: dict[str, str] = {}
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names.add((alias.name, ""))
                modules[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add((full, "") if full in PUBLIC else (node.module, alias.name))
                modules[alias.asname or alias.name] = full
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and modules.get(ast.unparse(node.value)) in PUBLIC:
            names.add((modules[ast.unparse(node.value)], node.attr))
    return {pair for pair in names if pair[0].split(".")[0] in ("autopar", "simulator")}


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.relative_to(ROOT).parts[0] == "experiments"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_experiments_use_only_public_names(path):
    for module, name in used_names(path):
        assert module in PUBLIC, f"{path.name} imports {module}"
        assert not name or name in import_module(module).__all__, f"{module}.{name} is not public"


IMPORT = """
import sys, autopar
slow = {"flax", "optax", "orbax", "pandas", "ray", "scipy"}
print(sorted(slow & sys.modules.keys()))
from autopar import Verify, directives
assert autopar.create_schedule is directives.create_schedule
assert "build" in dir(autopar)
print(sorted({"flax"} & sys.modules.keys()))
"""


def test_slow_packages_are_imported_on_first_use():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n['flax']\n"


def test_a_name_that_autopar_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'autopar' has no attribute 'paralelize'"):
        autopar.paralelize  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("old", "new"), [("inspect", "report"), ("schedule", "directives")])
def test_a_former_name_is_refused_with_the_new_one(old, new):
    with pytest.raises(AttributeError, match=rf"autopar\.{old} is called autopar\.{new}"):
        getattr(autopar, old)


@pytest.mark.parametrize("name", autopar.__all__)
def test_every_exported_name_has_a_docstring(name):
    exported = getattr(autopar, name)
    text = vars(exported).get("__doc__") if isinstance(exported, type) else exported.__doc__
    assert text
    assert not text.startswith(f"{name}(")  # a dataclass without one documents its signature


SPELLED_WITH_S = re.compile(r"([a-z]{2,})is(?:e|es|ed|er|ers|ing|ation|ations)(?![a-z])", re.I)
"""Words that may have -ise where American English has -ize, without their ending."""

STEMS = ("w", "ra", "no", "prom", "surpr", "exerc", "digit")  # with an s in American English too


@pytest.mark.parametrize("folder", ["autopar", "simulator", "experiments", "tests", "docs"])
def test_words_are_spelled_with_ize(folder):
    paths = [path for ending in ("py", "md") for path in (ROOT / folder).rglob(f"*.{ending}")]
    stems = {stem for path in paths for stem in SPELLED_WITH_S.findall(path.read_text())}
    assert {stem for stem in stems if not stem.lower().endswith(STEMS)} <= {"ar"}
