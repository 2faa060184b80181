"""A check of XLA_FLAGS before XLA reads them, which aborts the process at the first flag that it doesn't know."""

import os
import re
import subprocess
import sys
from difflib import get_close_matches
from functools import cache
from importlib.metadata import distribution, version
from mmap import ACCESS_READ, mmap
from pathlib import Path

_TRY = "import jax; jax.devices()"


class XlaFlagError(ValueError):
    """XLA_FLAGS hold something that the installed jaxlib doesn't take."""


def check_xla_flags(flags: str | None = None) -> None:
    """Raise `XlaFlagError` if the installed jaxlib would abort on these flags: to be called before the first use of a device.

    The flags are tried in a process of their own, on the CPU, which takes about two seconds the first time.

    Args:
        flags: as in the environment variable XLA_FLAGS, whose value is the default.
    """
    given = os.environ.get("XLA_FLAGS", "") if flags is None else flags
    if given.strip() and (complaint := _complaint(given)):
        raise XlaFlagError(
            f"jaxlib {version('jaxlib')} would abort on XLA_FLAGS={given!r}: {complaint}"
        )


@cache
def _complaint(flags: str) -> str:
    """What is wrong with the flags and what to do about it; empty if nothing is."""
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    tried = subprocess.run(
        [sys.executable, "-c", _TRY], env=environment, text=True, capture_output=True
    )
    if tried.returncode == 0:
        return ""
    if unknown := re.search(r"Unknown flags? in XLA_FLAGS: (.*)", tried.stderr):
        names = [flag.split("=")[0] for flag in unknown[1].split()]
        return (
            "; ".join(map(_unknown, names))
            + "; remove what it doesn't know, or spell it as this version does"
        )
    if value := re.search(r"Couldn't interpret value (.*) for flag (\w+)", tried.stderr):
        return f"--{value[2]} doesn't take the value {value[1]!r}; give it one of its type (true or false, a number, ...)"
    return re.sub(
        r"^F\d{4} [^\]]*\] ", "", tried.stderr.strip().rsplit("\n", 1)[-1]
    )  # without the log's own prefix


def _unknown(flag: str) -> str:
    nearest = get_close_matches(flag.lstrip("-"), _known_flags(), n=1)
    return f"it knows no {flag}" + (f", the nearest is --{nearest[0]}" if nearest else "")


@cache
def _known_flags() -> tuple[str, ...]:
    """What looks like a flag among the strings of jaxlib's binary: there is no list of them to be had, --help is cut short."""
    libraries = Path(str(distribution("jaxlib").locate_file("jaxlib"))).glob("*.so")
    largest = max(libraries, key=lambda path: path.stat().st_size)
    with largest.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        found = set(re.findall(rb"\0(xla_[a-z0-9_]{3,})(?=\0)", content))
    return tuple(sorted(name.decode() for name in found))
