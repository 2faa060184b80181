"""Renamed scopes in name stacks, so that equal functions share a jaxpr but keep their names.

A renaming is a scope of its own. It says how the scopes that follow it are called, and is left out
of the stack that results.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_SCOPE = "autopar_renamed:"


def renaming_scope(names: Mapping[str, str]) -> str:
    """Return a scope that renames the scopes after it.

    Args:
        names: new name of each scope that is renamed.
    """
    return f"{_SCOPE}{json.dumps(names, sort_keys=True)}"


@lru_cache(maxsize=1 << 14)
def with_renamed_scopes(stack: Any) -> Any:
    """Return a name stack of JAX with the last renaming in it done, and all left out.

    JAX repeats the scopes around a differentiated call, with the renaming, before those inside.
    """
    if not any(_SCOPE in element.name for element in stack.stack):
        return stack
    names: dict[str, str] = {}
    elements: list[Any] = []
    for element in reversed(stack.stack):
        head, scope, text = element.name.partition(_SCOPE)
        if scope:
            if not names:
                names = json.loads(text)
                elements = [_renamed(inner, names) for inner in elements]
            if head:
                elements.append(type(element)(head.removesuffix("/")))
        else:
            elements.append(element)
    return type(stack)(tuple(reversed(elements)))


def _renamed(element: Any, names: Mapping[str, str]) -> Any:
    """Return an element of a name stack with its new name, if it is a scope that has one."""
    return type(element)(names.get(element.name, element.name)) if is_scope(element) else element


def is_scope(element: Any) -> bool:
    """Return whether an element of a name stack is a scope, not a transformation such as `jvp`."""
    return type(element).__name__ == "Scope"
