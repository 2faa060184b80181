"""Checkpoint policies: names in `jax.checkpoint_policies`, or functions of the user."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from autopar.directives.definitions import DirectiveError, Policy

_BY_NAMES = (
    "save_only_these_names",
    "save_anything_except_these_names",
    "save_any_names_but_these",
)
_OFFLOADING = "offload_dot_with_no_batch_dims"
_BOTH = "save_from_both_policies"
_FACTORIES = {
    **dict.fromkeys(_BY_NAMES, "names"),
    _OFFLOADING: "the memory kinds to offload from and to",
    _BOTH: "two policies",
}
"""The functions of `jax.checkpoint_policies` that return a policy, and their arguments."""

_POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)


def policy_of(
    policy: Policy | None, functions: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any] | None:
    """Return a policy as `jax.checkpoint` takes it.

    Args:
        policy: the policy as a `Checkpoint` directive stores it.
        functions: the user's functions by name.

    Raises:
        DirectiveError: `policy` is neither known to JAX nor one of `functions`.
    """
    match policy:
        case None:
            return None
        case str() if policy in _POLICIES:
            return getattr(jax.checkpoint_policies, policy)
        case str() if policy in functions:
            return functions[policy]
        case (str() as name, *args) if name in _FACTORIES and args:
            if name == _BOTH:
                args = [policy_of(inner, functions) for inner in args]
            elif not all(isinstance(arg, str) for arg in args):
                raise DirectiveError(
                    f"checkpoint policy {policy!r}: {name} takes {_FACTORIES[name]}, as strings"
                )
            try:
                return getattr(jax.checkpoint_policies, name)(*args)
            except TypeError as error:
                raise DirectiveError(
                    f"checkpoint policy {policy!r}: {name} takes {_FACTORIES[name]}"
                ) from error
    name = policy[0] if isinstance(policy, tuple) and policy else policy
    if name in _FACTORIES:
        raise DirectiveError(
            f"checkpoint policy {name!r} is made from {_FACTORIES[name]}: give it as a tuple with"
            f" them, ({name!r}, ...)"
        )
    if isinstance(policy, str) and ":" in policy:
        raise DirectiveError(
            f"checkpoint policy {policy!r} is a function that is not known here; give it by"
            " functions={name: function}"
        )
    raise DirectiveError(
        f"checkpoint policy {policy!r} is none of jax.checkpoint_policies: expected"
        f" {', '.join(_POLICIES)}; a tuple of {', '.join(_FACTORIES)} and its arguments;"
        " or a function"
    )
