"""Imports go experiments -> autopar -> simulator, the simulator knows no JAX, and modules have names of their own."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import autopar

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "simulator": {"autopar", "experiments", "tests", "jax", "jaxlib", "flax", "optax"},
    "autopar": {"experiments", "tests", "snakemake"},
    "experiments": {"tests"},
}
FILES = [path for package in FORBIDDEN for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Top-level packages that the file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    assert not imported(path) & FORBIDDEN[package]


def test_only_one_module_uses_private_jax():
    private = [p.name for p in FILES if "jax._src" in p.read_text() or "jaxlib" in imported(p)]
    assert private == ["_plugins.py"]


TWICE = {"cli"}  # of two command lines


def test_a_module_has_a_name_of_its_own():
    names = Counter(path.stem for path in FILES if path.relative_to(ROOT).parts[0] != "experiments")
    assert {name for name, count in names.items() if count > 1} - {"__init__"} == TWICE


IMPORT = """
import sys, autopar
slow = {"flax", "optax", "orbax", "pandas", "ray", "scipy"}
print(sorted(slow & sys.modules.keys()))
from autopar import Verify, directives
assert autopar.create_schedule is directives.create_schedule
assert "build" in dir(autopar)
print(sorted({"flax"} & sys.modules.keys()))
"""


def test_what_only_a_few_want_is_imported_when_they_do():
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n['flax']\n"


def test_a_name_that_autopar_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'autopar' has no attribute 'paralelize'"):
        autopar.paralelize  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("old", "new"), [("inspect", "report"), ("schedule", "directives")])
def test_a_name_of_before_is_refused_with_the_new_one(old, new):
    with pytest.raises(AttributeError, match=rf"autopar\.{old} is called autopar\.{new}"):
        getattr(autopar, old)
