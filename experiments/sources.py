"""A hash of the code and its data, on which the workflow's results depend beside their inputs.

Snakemake reruns a rule when an input or a parameter changes, but does not see what a script
imports.
"""

from functools import cache
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parent.parent


@cache
def code_hash(*packages: str) -> str:
    """Return a hash of the Python files of packages, and of the hardware profiles that they ship.

    A single file may stand in place of a package.

    A rule that has it as a parameter runs again when one of the files changes. Descriptions of
    clusters and devices don't count: they are inputs of the cells that use them.
    """
    digest = sha256()
    for package in packages:
        digest.update(package_content(package))
    return digest.hexdigest()[:16]


@cache
def package_content(package: str) -> bytes:
    """Return the names and the contents of the files of a package, or of a single file."""
    path = ROOT / package
    files = [path] if path.is_file() else path.rglob("*.py")
    profiles = path.rglob("profiles/*/*.yaml")
    return b"".join(
        f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes()
        for file in sorted((*files, *profiles))
    )


CODE = "autopar", "simulator", "experiments"
"""The packages that compute the results."""
