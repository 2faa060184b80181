"""Imports go experiments -> autopar -> simulator, and the simulator knows no JAX."""

import ast
from pathlib import Path

import pytest

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
