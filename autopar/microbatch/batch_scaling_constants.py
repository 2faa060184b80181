"""The batch scaling of a constant of a step, from its values for two batch sizes."""

import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from typing import Literal as OneOf

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import integer_pow_p, pad_p, slice_p

from autopar.ir.graph import Atom, aval_of, constant
from autopar.microbatch.batch_scaling_rules import BatchScaling, ConstantDiffers, NotSeparable


def atom_scaling(
    kinds: Mapping[Var, BatchScaling | NotSeparable], atom: Atom, whole: Atom, count: int
) -> BatchScaling:
    """Return the scaling of an operand, a variable or a literal.

    Args:
        kinds: the scalings of variables.
        atom: the operand for the smaller batch.
        whole: the operand for the larger batch.
        count: ratio of the batch sizes.

    Raises:
        NotSeparable: the operand is not separable.
    """
    if isinstance(atom, Var):
        kind = kinds[atom]
        if isinstance(kind, NotSeparable):
            raise kind
        return kind
    assert isinstance(whole, Literal)
    return constant_scaling(atom.val, whole.val, count)


def constant_scaling(value: Any, whole: Any, count: int) -> BatchScaling:
    """Return the scaling of a constant, an array or a number.

    Args:
        value: the constant for the smaller batch.
        whole: the constant for the larger batch.
        count: ratio of the batch sizes.

    Raises:
        ConstantDiffers: the two values do not differ by a power of `count`.
    """
    if value is whole:
        # An array of JAX stays on its device; it may also be a random key.
        has_scale = isinstance(value, jax.Array) or _has_scale(_numbers(value))
        return BatchScaling("same", 0 if has_scale else None)
    small, full = _numbers(value), _numbers(whole)
    grown = [
        dim
        for dim, sizes in enumerate(zip(small.shape, full.shape, strict=False))
        if sizes[0] != sizes[1]
    ]
    form = BatchScaling("same")
    if small.ndim != full.ndim or len(grown) > 1:
        raise ConstantDiffers(
            f"a constant of the step has shape {small.shape} for a microbatch and {full.shape}"
            " for the batch"
        )
    if grown:
        form = BatchScaling("rows", dim=grown[0], blocks=None)
        rows, small = small, small.take([0], grown[0])
        if full.shape[grown[0]] != count * rows.shape[grown[0]] or not _close(rows, small):
            raise ConstantDiffers(
                f"a constant of the step, of shape {rows.shape} for a microbatch and"
                f" {full.shape} for the batch, differs between examples"
            )
    power = power_of_constant(small, full, count)
    if power != "none":
        return replace(form, power=power)
    raise ConstantDiffers(
        f"a constant of the step is {_shown(value)} for a microbatch and {_shown(whole)} for"
        " the batch"
    )


def own_constant_scaling(value: Any, whole: Any, count: int) -> BatchScaling:
    """Return the scaling of a constant that may have another value in each microbatch.

    Such a number contains the number of examples less one, as an unbiased variance does. It scales
    as if it contained the number of examples.

    Args:
        value: the constant for the smaller batch.
        whole: the constant for the larger batch.
        count: ratio of the batch sizes.

    Raises:
        ConstantDiffers: as by `constant_scaling`, and the constant is no such number.
    """
    try:
        return constant_scaling(value, whole, count)
    except ConstantDiffers:
        small, large = _numbers(value), _numbers(whole)
        if small.shape or large.shape or np.iscomplexobj(small):
            raise
        for power, examples in _LESS_ONE:
            with np.errstate(all="ignore"):
                rows, more = examples(small), examples(large)
            if (
                rows > 1
                and np.isfinite(rows)
                and np.isclose(rows, round(float(rows)), rtol=1e-3)
                and np.isclose(more, count * rows, rtol=1e-2)
            ):
                return BatchScaling("same", power)
        raise


def with_constants_of(larger: Jaxpr, jaxpr: Jaxpr, count: int) -> Jaxpr | None:
    """Return a trace with numbers of the trace for a batch that is `count` times as large.

    It takes the numbers that do not scale with the batch, such as the root of its size. A
    microbatch then computes with the number of the whole batch.

    Args:
        larger: the flat jaxpr for the larger batch.
        jaxpr: the flat jaxpr.
        count: ratio of the batch sizes.

    Returns:
        None if the traces have other equations; `jaxpr` itself if there are no such numbers.
    """
    pairs = list(zip(jaxpr.eqns, larger.eqns, strict=False))
    if len(jaxpr.eqns) != len(larger.eqns) or any(a.primitive is not b.primitive for a, b in pairs):
        return None

    def chosen(atom: Atom, other: Atom) -> Atom:
        if isinstance(atom, Literal) and isinstance(other, Literal):
            try:
                constant_scaling(atom.val, other.val, count)
            except ConstantDiffers:
                return other if aval_of(atom) == aval_of(other) else atom
        return atom

    def with_chosen(eqn: JaxprEqn, other: JaxprEqn) -> JaxprEqn:
        invars = list(map(chosen, eqn.invars, other.invars))
        unchanged = all(map(operator.is_, invars, eqn.invars))
        return eqn if unchanged else eqn.replace(invars=invars)

    eqns = list(itertools.starmap(with_chosen, pairs))
    return jaxpr if all(map(operator.is_, eqns, jaxpr.eqns)) else jaxpr.replace(eqns=eqns)


_LESS_ONE: tuple[tuple[int, Callable[[np.ndarray], np.ndarray]], ...] = (
    (1, lambda number: number + 1),
    (-1, lambda number: 1 / number + 1),
    (0, lambda number: number / (number - 1)),
    (0, lambda number: 1 / (1 - number)),
)
"""The number of examples n from n - 1, 1 / (n - 1), n / (n - 1) and (n - 1) / n.

Each has the power of n with which the number scales.
"""


def check_parameters(eqn: JaxprEqn, whole: JaxprEqn) -> None:
    """Check that numbers in the parameters of an equation do not depend on the size of the batch.

    Sizes in the parameters of equations whose operands or results grow may depend on it. A power
    may not, nor may where a slice begins along a dim that does not grow, as in `table[n - 1]`, nor
    where its gradient is padded.

    Args:
        eqn: the equation for the smaller batch.
        whole: the equation for the larger batch.

    Raises:
        ConstantDiffers: a number does.
    """
    for name, value in eqn.params.items():
        other = whole.params[name]
        if not _is_numeric(value) or value == other or np.array_equal(value, other, equal_nan=True):
            continue
        sides = [[aval_of(atom).shape for atom in (*e.invars, *e.outvars)] for e in (eqn, whole)]
        if (
            sides[0] == sides[1]
            or eqn.primitive is integer_pow_p
            or (eqn.primitive in (slice_p, pad_p) and _moves_in_fixed_dims(eqn, whole, name))
        ):
            raise ConstantDiffers(
                f"a constant of the step, {name}, is {value} for a microbatch and {other} for the"
                " batch"
            )


def _moves_in_fixed_dims(eqn: JaxprEqn, whole: JaxprEqn, name: str) -> bool:
    """Return whether a slice or pad differs along a dim that does not grow with the batch.

    A slice has the dims of its operand, and a pad has the dims of its result.
    """
    end = eqn.invars if eqn.primitive is slice_p else eqn.outvars
    other_end = whole.invars if eqn.primitive is slice_p else whole.outvars
    sizes = zip(aval_of(end[0]).shape, aval_of(other_end[0]).shape, strict=True)
    return any(
        size == larger and eqn.params[name][dim] != whole.params[name][dim]
        for dim, (size, larger) in enumerate(sizes)
    )


def _is_numeric(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_numeric, value))
    return isinstance(value, int | float | np.number)


def power_of_constant(small: Any, large: Any, count: int) -> int | OneOf["none"] | None:
    """Return the power of `count` that is the ratio of two constants.

    Args:
        small: the constant for the smaller batch.
        large: the constant for the larger batch.
        count: ratio of the batch sizes.

    Returns:
        0, 1 or -1; None for zeros, infinities and NaN, which fit any power; "none" if no power
        fits.
    """
    a, b = _numbers(small), _numbers(large)
    if not _has_scale(a) and not _has_scale(b):
        return None if _close(a, b) else "none"
    if a.shape == b.shape and (a == b).all():  # a tolerance takes longer
        return 0
    for power in (0, 1, -1):
        if _close(a * float(count) ** power, b):
            return power
    return "none"


def _numbers(value: Any) -> np.ndarray:
    """Return a constant as an array of float64 or complex128.

    Random keys become their data, and gradients of integers (float0) zeros.
    """
    array = constant(value)
    if array.dtype == jax.dtypes.float0:
        return np.zeros(array.shape)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _has_scale(array: np.ndarray) -> bool:
    """Return whether some element changes if it is multiplied."""
    return bool((array[np.isfinite(array)] != 0).any())


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a, b, rtol=1e-6, atol=0, equal_nan=True)


def _shown(value: Any) -> str:
    return str(value) if not np.ndim(value) else f"an array of shape {np.shape(value)}"
