"""What can't be had from Ray but by private names (seen in 2.60)."""

import os
import sys
from typing import Any

_UV_RUN = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"


def share_environment() -> None:
    """Have workers of a driver that `uv run` has started run in the environment that is there, unless this variable says otherwise.

    Ray would package the working directory and have `uv run` build the environment anew for them. It reads the variable when it is
    imported, so it is told once more if it has been.
    """
    value = os.environ.setdefault(_UV_RUN, "0")
    constants = sys.modules.get("ray._private.ray_constants")
    if constants is not None and value == "0":
        setattr(constants, _UV_RUN, False)


def python_of_workers(of_job: Any) -> dict[str, str]:
    """What the runtime environment of workers needs besides that `of_job`, if Ray was started before it could be told."""
    given = (of_job.get("py_executable") or "").split()[:2]
    is_uv = len(given) == 2 and os.path.basename(given[0]) == "uv" and given[1] == "run"
    return {"py_executable": sys.executable} if is_uv and os.environ.get(_UV_RUN) == "0" else {}


def found_address() -> str:
    """The address of the cluster that Ray finds by itself; ConnectionError if there is none."""
    from ray._private.services import canonicalize_bootstrap_address_or_die

    return canonicalize_bootstrap_address_or_die("auto")
