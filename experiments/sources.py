"""A hash of the code, on which the results of the workflow depend beside their inputs.

Snakemake reruns a rule when an input or a parameter changes, but does not see what a script
imports.
"""

from functools import cache
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parent.parent


@cache
def code_hash(*packages: str) -> str:
    """Return a hash of the Python files of packages.

    A rule that has it as a parameter runs again when one of the files changes.
    """
    digest = sha256()
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


CODE = "autopar", "simulator", "experiments"
"""The packages that compute the results."""
