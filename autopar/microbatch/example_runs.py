"""The runs of neighbouring examples that a step combines, and so keeps in one microbatch.

A step that puts pairs of neighbouring examples together, as `x.reshape(-1, 2)` does, has half as
many runs as examples. A microbatch takes whole runs.
"""

from collections.abc import Iterable, Sequence, Set
from fractions import Fraction
from math import gcd, lcm

from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.ir.graph import Atom, Where, aval_of
from autopar.ir.step_graph import MicrobatchError
from autopar.microbatch.batch_scaling import BatchScalings
from autopar.microbatch.batch_scaling_rules import BatchScaling
from autopar.microbatch.example_blocks import parts_of_pieces
from autopar.microbatch.marked_steps import mark_of, step_parts


def example_runs(
    micro: Jaxpr, traced: Jaxpr, found: BatchScalings, batch: frozenset[int]
) -> tuple[int, int]:
    """Return the number of runs of examples in a microbatch, and of equal parts that it needs.

    If a step takes the first half of the batch, a microbatch needs two parts: the runs of each half
    are to be at the same place in it.

    Args:
        micro: the marked step for one microbatch.
        traced: the marked trace that `found` describes; its batch may be larger.
        found: the batch scalings.
        batch: inputs whose first dim is the batch.

    Raises:
        MicrobatchError: a microbatch has a part of a run, or can't be divided into the parts.
    """
    if not batch:
        return 1, 1
    body = [eqn for _, eqn in step_parts(traced, batch).body]
    _, mark = mark_of(traced)
    accumulated = {atom for atom in mark.invars if isinstance(atom, Var)}
    inputs = [traced.invars[i] for i in batch]
    runs = num_runs(found, body, inputs, accumulated)
    first = min(batch)
    rows, larger = (aval_of(each.invars[first]).shape[0] for each in (micro, traced))
    if runs * rows % larger:
        where = next(
            Where(eqn)
            for eqn in body
            if num_runs(found, [eqn], inputs, accumulated) * rows % larger
        )
        raise MicrobatchError(
            f"{where} puts {larger // runs} neighbouring examples together, and a microbatch has"
            f" {rows}; use fewer microbatches"
        )
    runs = runs * rows // larger
    parts = num_parts(found, body)
    if parts > 1 and rows != larger:
        raise single_example_error()
    if runs % parts:
        where = next(Where(eqn) for eqn in body if runs % num_parts(found, [eqn]))
        raise MicrobatchError(
            f"{where} takes one of {parts} equal parts of the batch, as x[: len(x) // {parts}] and"
            f" x.reshape({parts}, -1) do, and a microbatch has {runs}"
            f" {'examples' if runs == rows else 'runs of examples'}; use a number of microbatches"
            f" with which {parts} divides that number"
        )
    return runs, parts


def single_example_error(refused: MicrobatchError | None = None) -> MicrobatchError:
    """Return the error for a step that JAX traces otherwise for a single example.

    Args:
        refused: why the step is not separable without changes of equations, if it isn't.
    """
    reason = "" if refused is None else f"{refused}. "
    return MicrobatchError(
        f"{reason}The step is computed otherwise when a microbatch has a single example; use fewer"
        " microbatches, which have more examples each"
    )


def num_runs(
    found: BatchScalings, eqns: Iterable[JaxprEqn], batch: Sequence[Var], accumulated: Set[Var]
) -> int:
    """Return the number of runs in the batch of the trace that `found` describes.

    Args:
        found: the batch scalings.
        eqns: the equations of the body.
        batch: the inputs whose first dim is the batch.
        accumulated: the values of microbatches that are put together.
    """
    sizes = [aval_of(var).shape[0] for var in batch]
    for var in (var for eqn in eqns for var in eqn.outvars):
        kind = _rows(found, var)
        if kind and (kind.blocks is not None or var in accumulated):
            of_block = aval_of(var).shape[kind.dim] / Fraction(kind.blocks or 1)
            assert of_block.denominator == 1, f"{of_block} rows of {var}"
            sizes.append(found.copies.get(var) or int(of_block))
    return gcd(*sizes)


def num_parts(found: BatchScalings, eqns: Iterable[JaxprEqn]) -> int:
    """Return the number of equal parts that a microbatch has to be divided into.

    Args:
        found: the batch scalings.
        eqns: the equations of the body.
    """
    parts = 1
    for eqn in eqns:
        operands = [_rows(found, atom) for atom in eqn.invars]
        rows = {k: (kind.dim, kind.blocks) for k, kind in enumerate(operands) if kind}
        results = [kind for var in eqn.outvars if (kind := _rows(found, var))]
        blocks = (kind.blocks.denominator for kind in results if kind.blocks is not None)
        parts = lcm(parts, parts_of_pieces(eqn, rows), *blocks)
    return parts


def _rows(found: BatchScalings, atom: Atom) -> BatchScaling | None:
    """Return the scaling of a value that has a row per example; None for other values."""
    kind = found.kinds[atom] if isinstance(atom, Var) else None
    return kind if isinstance(kind, BatchScaling) and kind.form == "rows" else None
