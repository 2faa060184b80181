"""The start of the command `autopar`, in a package that can be imported without JAX.

Every module of the package `autopar` imports JAX.
"""

import sys
from importlib import import_module


def main() -> None:
    """Run the command `autopar`; without one of its packages, say in a line what to install."""
    try:
        application = import_module("autopar.command_line").app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith(("autopar", "simulator")):
            raise
        sys.exit(_missing(error.name.partition(".")[0]))
    except KeyboardInterrupt:
        sys.exit(130)
    application()


def _missing(package: str) -> int:
    """Report that a package is not installed, and return the exit code of bad input."""
    print(
        f"autopar: {package} is not installed; run `pip install autopar`, or `pip install"
        f" {package}` for it alone. `python -m simulator` has the subcommands that need no JAX.",
        file=sys.stderr,
    )
    return 2
