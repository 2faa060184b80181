"""What can compile a fused region: a registry."""

from collections.abc import Callable
from typing import Any

import jax

from autopar.directives.definitions import DirectiveError

type Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

_COMPILERS: dict[str, Compile] = {"xla": jax.jit}


def register_compiler(name: str, compile: Compile) -> None:
    """Make `fuse(..., compiler=name)` run fused equations as `compile(function)`.

    The function takes and returns arrays, and must stay differentiable and, for backend="manual", run inside `jax.shard_map`.
    """
    _COMPILERS[name] = compile


def compiler(name: str) -> Compile:
    """The compiler of that name. Raises DirectiveError for an unknown one."""
    if name not in _COMPILERS:
        raise DirectiveError(
            f"compiler {name!r} is none of {', '.join(sorted(_COMPILERS))}; autopar.directives.register_compiler adds one"
        )
    return _COMPILERS[name]
