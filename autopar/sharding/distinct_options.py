"""Map a function over options, evaluating it once per distinct option."""

from collections.abc import Callable, Hashable, Sequence


def each_once[T: Hashable, R](function: Callable[[T], R], items: Sequence[T]) -> tuple[R, ...]:
    """Return `function` of each item, evaluated once for equal items."""
    results = {item: function(item) for item in dict.fromkeys(items)}
    return tuple([results[item] for item in items])
