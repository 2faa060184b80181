"""Private names of Ray that autopar uses, and Ray's handling of `uv run` (seen in Ray 2.60).

Under `uv run`, `ray.init` uploads the working directory, and every worker rebuilds the environment
with `uv run` there. autopar's workers need neither: they run the driver's Python at its path.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_UV_RUN = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
"""Variable and constant of Ray that say whether it handles `uv run`."""


@contextmanager
def without_uv_hook() -> Iterator[None]:
    """Call `ray.init` without its handling of `uv run`, unless the user's environment asks for it.

    Ray reads the variable when it is imported, so this sets the constant, and restores it.
    """
    from ray._private import ray_constants

    enabled = getattr(ray_constants, _UV_RUN)
    if _UV_RUN not in os.environ:
        setattr(ray_constants, _UV_RUN, False)
    try:
        yield
    finally:
        setattr(ray_constants, _UV_RUN, enabled)


def runtime_env_of_workers(job: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the runtime environment of workers.

    Where the user called `ray.init` under `uv run`, the workers get the driver's Python instead of
    Ray's `uv run`, and the directories of modules that Ray then leaves out of their path.

    Args:
        job: the runtime environment of the Ray job.
        variables: environment variables of the workers.
    """
    command = (job.get("py_executable") or "").split()[:2]
    is_uv = len(command) == 2 and os.path.basename(command[0]) == "uv" and command[1] == "run"
    if not is_uv or _UV_RUN in os.environ:
        return {"env_vars": dict(variables)}
    script = os.path.dirname(os.path.realpath(sys.argv[0]))
    paths = [script] if script in sys.path else []
    paths += [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "py_executable": sys.executable,
        "env_vars": {**variables, "PYTHONPATH": os.pathsep.join(paths)},
    }


def default_address() -> str:
    """Return the address of the cluster that Ray finds by itself.

    Raises:
        ConnectionError: there is none.
    """
    from ray._private.services import canonicalize_bootstrap_address_or_die

    return canonicalize_bootstrap_address_or_die("auto")
