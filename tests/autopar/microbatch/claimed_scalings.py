"""Whether the batch scalings that are derived for an equation hold for the values of its results.

An operand has a row per example, is the same for all microbatches, or is a mean or a sum over the
examples. It may have the size of the batch as a factor or divisor.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from random import Random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Var

from autopar.ir import control_flow
from autopar.ir.evaluate import evaluate, unchanged
from autopar.ir.flatten import flatten
from autopar.ir.keys import is_key
from autopar.microbatch.batch_rows import cut_rows
from autopar.microbatch.batch_scaling import BatchScalings
from autopar.microbatch.batch_scaling_rules import BatchScaling
from autopar.microbatch.example_runs import num_parts, num_runs
from autopar.microbatch.same_step import DifferentStepsError
from tests.autopar.sharding.equation_cases import Built, Case

COUNT = 3
"""Number of microbatches."""


class Operand(NamedTuple):
    """An input of a step, and the operand of an equation that the step makes of it.

    Attributes:
        whole: the input for the whole batch.
        in_batch: whether the first dim of the input is the batch.
        make: returns the operand, from the input and the number of examples.
    """

    whole: np.ndarray
    in_batch: bool
    make: Callable[[Any, int], Any]


def wrong_claims(case: Case, random: Random) -> list[str] | None:
    """Return the claims that do not hold, for operands and sizes that `random` chooses.

    None if the operands of the case have no dim of examples that can be cut.

    Args:
        case: a case of `tests.autopar.sharding.equation_cases`.
        random: a generator of random numbers.
    """
    rows = random.choice((2, 4))
    sizes = [random.choice((None, 4, 2)) for _ in range(_num_sizes(case))]
    fun, args = _built(case, sizes, rows)
    larger_fun, larger_args = _built(case, sizes, COUNT * rows)
    operands = [
        _operand(np.asarray(jnp.asarray(small)), np.asarray(jnp.asarray(whole)), rows, random)
        for small, whole in zip(args, larger_args, strict=True)
    ]
    if None in operands:
        return None
    examples = Operand(np.arange(COUNT * rows, dtype=np.float32), True, lambda x, _: x)

    def step_of(fun: Callable[..., Any]) -> Callable[..., Any]:
        def step(examples: Any, *inputs: Any) -> Any:
            pairs = zip(operands, inputs, strict=True)
            return fun(*(operand.make(x, len(examples)) for operand, x in pairs))

        return step

    inputs = [examples, *operands]
    batch = frozenset(i for i, operand in enumerate(inputs) if operand.in_batch)
    whole = [operand.whole for operand in inputs]
    first = [x[:rows] if i in batch else x for i, x in enumerate(whole)]
    small = flatten(jax.make_jaxpr(step_of(fun))(*first))
    large = flatten(jax.make_jaxpr(step_of(larger_fun))(*whole))
    try:
        found = BatchScalings(small, large, batch, COUNT)
    except DifferentStepsError:
        return []
    chunks = num_runs(found, small.eqns, [small.invars[i] for i in batch], set())
    if chunks % num_parts(found, small.eqns):
        return []
    cut = [cut_rows(x, COUNT, chunks) if i in batch else [x] * COUNT for i, x in enumerate(whole)]
    micro = list(zip(*cut, strict=True))
    names = _results(small)
    parts = [dict(zip(names, _values(small, args), strict=True)) for args in micro]
    totals = dict(zip(names, _values(large, whole), strict=True))
    maker = {var: eqn.primitive.name for eqn in small.eqns for var in eqn.outvars}
    return [
        f"{maker[var]} is not {found.kinds[var]}"
        for var in names
        if not _holds(found.kinds[var], chunks, [part[var] for part in parts], totals[var])
    ]


def _num_sizes(case: Case) -> int:
    calls = 0

    def size() -> int:
        nonlocal calls
        calls += 1
        return 4

    case(size)
    return calls


def _built(case: Case, sizes: Sequence[int | None], rows: int) -> Built:
    """Return a case with these sizes, those that are None being the number of examples."""
    remaining = iter(sizes)
    return case(lambda: next(remaining) or rows)


def _operand(small: np.ndarray, whole: np.ndarray, rows: int, random: Random) -> Operand | None:
    """Return one of the ways in which an operand may depend on the batch."""
    is_float = np.issubdtype(whole.dtype, np.floating)
    power = random.choice((0, 1, -1) if is_float else (0, 1))

    def scaled(value: Any, examples: int) -> Any:
        return (value * examples**power if power >= 0 else value / examples).astype(whole.dtype)

    if small.shape == whole.shape:
        if whole.dtype.kind in "fiu" and random.random() < 1 / 3:
            changes = np.random.default_rng(0).integers(0, 2, (COUNT * rows, *whole.shape))
            summed = jnp.mean if is_float else jnp.sum
            return Operand(
                (whole * changes).astype(whole.dtype), True, lambda x, n: scaled(summed(x, 0), n)
            )
        return Operand(whole, False, scaled)
    grown = [dim for dim, size in enumerate(small.shape) if size != whole.shape[dim]]
    dim = grown[0]
    if len(grown) > 1 or whole.shape[dim] != COUNT * small.shape[dim] or small.shape[dim] % rows:
        return None
    first = np.moveaxis(whole, dim, 0)
    per_example = small.shape[dim] // rows

    def make(x: Any, examples: int) -> Any:
        return scaled(jnp.moveaxis(x.reshape(-1, *first.shape[1:]), 0, dim), examples)

    return Operand(first.reshape(COUNT * rows, per_example, *first.shape[1:]), True, make)


def _results(jaxpr: Jaxpr) -> list[Var]:
    """Return the arrays that equations outside of loops compute."""
    depth, found = 0, []
    for eqn in jaxpr.eqns:
        depth -= eqn.primitive is control_flow.end_p
        if depth <= (eqn.primitive in control_flow.LEAVING):
            arrays = (var for var in eqn.outvars if var.aval is not control_flow.TOKEN)
            found += [var for var in arrays if not is_key(var.aval.dtype)]
        depth += eqn.primitive in control_flow.OPENING
    return found


def _values(jaxpr: Jaxpr, inputs: Sequence[Any]) -> Iterator[np.ndarray]:
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    env |= dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    evaluate(enumerate(jaxpr.eqns), env, unchanged, unchanged)
    return (np.asarray(env[var]) for var in _results(jaxpr))


def _holds(kind: Any, chunks: int, parts: Sequence[np.ndarray], total: np.ndarray) -> bool:
    """Return whether the value of the batch is what its scaling says, if it has one.

    `chunks` is the number of runs of examples in a microbatch.
    """
    if not isinstance(kind, BatchScaling) or kind.form == "function" or kind.per:
        return True
    factor = float(COUNT) ** (kind.power or 0)
    expected = {"same": list(parts), "linear": [sum(parts) / COUNT]}.get(kind.form)
    if expected is None:
        num_runs = 1 if kind.blocks is None else int(chunks * Fraction(kind.blocks))
        runs = [np.split(part, num_runs, kind.dim) for part in parts]
        joined = [np.concatenate(run, kind.dim) for run in zip(*runs, strict=True)]
        expected = [np.concatenate(joined, kind.dim)]
    largest = np.abs(np.where(np.isfinite(total), total, 0)).max(initial=0)
    return all(
        each.shape == total.shape
        and np.allclose(
            (each * factor).astype(total.dtype),
            total,
            rtol=1e-4,
            atol=1e-4 * largest,
            equal_nan=True,
        )
        for each in expected
    )
