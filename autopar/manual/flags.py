"""A check of XLA_FLAGS. XLA itself aborts the process at an unknown flag."""

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
    """XLA_FLAGS contain a flag or a value that the installed jaxlib rejects."""


def check_xla_flags(flags: str | None = None) -> None:
    """Check flags before the first use of a device.

    A subprocess tries the flags on the CPU, which takes about two seconds the first time.

    Args:
        flags: flags in the format of the environment variable XLA_FLAGS, whose value is the
            default.

    Raises:
        XlaFlagError: The installed jaxlib would abort on these flags.
    """
    if flags is None:
        flags = os.environ.get("XLA_FLAGS", "")
    problem = _problem(flags) if flags.strip() else ""
    if problem:
        raise XlaFlagError(
            f"jaxlib {version('jaxlib')} would abort on XLA_FLAGS={flags!r}: {problem}"
        )


@cache
def _problem(flags: str) -> str:
    """Return what is wrong with the flags and how to fix it; empty if nothing is."""
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    trial = subprocess.run(
        [sys.executable, "-c", _TRY], env=environment, text=True, capture_output=True
    )
    if trial.returncode == 0:
        return ""
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", trial.stderr)
    if unknown:
        names = [flag.split("=")[0] for flag in unknown[1].split()]
        return (
            "; ".join(map(_unknown, names))
            + "; remove what it doesn't know, or spell it as this version does"
        )
    value = re.search(r"Couldn't interpret value (.*) for flag (\w+)", trial.stderr)
    if value:
        return (
            f"--{value[2]} doesn't take the value {value[1]!r}; give it one of its type (true or"
            " false, a number, ...)"
        )
    last_line = trial.stderr.strip().rsplit("\n", 1)[-1]
    log_prefix = r"^F\d{4} [^\]]*\] "
    return re.sub(log_prefix, "", last_line)


def _unknown(flag: str) -> str:
    nearest = get_close_matches(flag.lstrip("-"), _known_flags(), n=1)
    return f"it knows no {flag}" + (f", the nearest is --{nearest[0]}" if nearest else "")


@cache
def _known_flags() -> tuple[str, ...]:
    """Return all strings in jaxlib's binary that look like flags.

    jaxlib has no list of flags: the output of --help is truncated.
    """
    libraries = Path(str(distribution("jaxlib").locate_file("jaxlib"))).glob("*.so")
    largest = max(libraries, key=lambda path: path.stat().st_size)
    with largest.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        names = set(re.findall(rb"\0(xla_[a-z0-9_]{3,})(?=\0)", content))
    return tuple(sorted(name.decode() for name in names))
