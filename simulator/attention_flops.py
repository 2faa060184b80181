"""FLOP of fused attention: the matrix products over the pairs of queries and keys that it needs."""


def attention_flops(
    heads: int, queries: int, keys: int, sizes: tuple[float, float], backward: bool, window: int
) -> float:
    """Return the FLOP of fused attention. Masked pairs cost nothing.

    The forward pass multiplies queries by keys, and scores by values. The backward pass computes
    the scores again, and two gradients of either product.

    Args:
        heads: heads of all sequences: batch times query heads.
        queries: queries of a sequence.
        keys: keys of a sequence.
        sizes: elements of a head, of queries and keys and of values.
        backward: whether it is the backward pass.
        window: the most keys that a query sees under a causal mask; 0 without a mask.
    """
    query_size, value_size = sizes
    products = 3 * query_size + 2 * value_size if backward else query_size + value_size
    return 2.0 * products * heads * _pairs(queries, keys, window)


def _pairs(queries: int, keys: int, window: int) -> int:
    """Return the number of unmasked pairs of a query and a key.

    With a causal mask query i sees keys 0 to i, or the last of them within a sliding window.
    """
    if not window:
        return queries * keys
    window = min(keys, window)
    first = min(queries, window)  # queries that see less than a complete window
    return first * (first + 1) // 2 + (queries - first) * window
