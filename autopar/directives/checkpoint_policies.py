"""What a checkpoint keeps: policies of `jax.checkpoint_policies` by name, made by name with arguments, or functions of the user."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from autopar.directives.definitions import DirectiveError, Policy

_NAMED = ("save_only_these_names", "save_anything_except_these_names", "save_any_names_but_these")
_OFFLOADING = "offload_dot_with_no_batch_dims"
_BOTH = "save_from_both_policies"
_MADE = {
    **dict.fromkeys(_NAMED, "names"),
    _OFFLOADING: "the memory kinds to offload from and to",
    _BOTH: "two policies",
}
"""Those that make policies, and what they are given."""

_POLICIES = (
    *("everything_saveable", "nothing_saveable", "dots_saveable", "checkpoint_dots"),
    *("dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims"),
)


def policy_of(
    policy: Policy | None, functions: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any] | None:
    """What `jax.checkpoint` takes. Raises DirectiveError for what is no policy."""
    match policy:
        case None:
            return None
        case str() if policy in _POLICIES:
            return getattr(jax.checkpoint_policies, policy)
        case str() if policy in functions:
            return functions[policy]
        case (str() as name, *given) if name in _MADE and given:
            if name == _BOTH:
                given = [policy_of(each, functions) for each in given]
            elif not all(isinstance(each, str) for each in given):
                raise DirectiveError(
                    f"checkpoint policy {policy!r}: {name} takes {_MADE[name]}, as strings"
                )
            try:
                return getattr(jax.checkpoint_policies, name)(*given)
            except TypeError as error:
                raise DirectiveError(
                    f"checkpoint policy {policy!r}: {name} takes {_MADE[name]}"
                ) from error
    name = policy[0] if isinstance(policy, tuple) and policy else policy
    if name in _MADE:
        raise DirectiveError(
            f"checkpoint policy {name!r} is made from {_MADE[name]}: give it as a tuple with them, ({name!r}, ...)"
        )
    if isinstance(policy, str) and ":" in policy:
        raise DirectiveError(
            f"checkpoint policy {policy!r} is a function that is not known here; give it by functions={{name: function}}"
        )
    raise DirectiveError(
        f"checkpoint policy {policy!r} is none of jax.checkpoint_policies: expected {', '.join(_POLICIES)};"
        f" a tuple of {', '.join(_MADE)} and what it takes; or a function"
    )
