"""Give the traces of a step the positions of the examples as one more input with a batch dim.

What a step creates with a row per example, such as the random bits of dropout, depends on where the
examples are in the batch. In the traces of a microbatch, the equations that create it are replaced
by equations that compute the microbatch's rows from the positions
(`autopar.microbatch.created_rows`). The positions are cut into microbatches, sharded and sent to
stages like any other input with a batch dim. The runtime supplies them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var

from autopar.ir import control_flow
from autopar.ir.equation_groups import dependents
from autopar.ir.graph import Atom, aval_of, variables
from autopar.microbatch.batch_rows import num_examples
from autopar.microbatch.batch_scaling_rules import (
    BatchScaling,
    MinorExamples,
    NotSeparable,
    result_shapes,
)
from autopar.microbatch.created_rows import (
    ROWS_OF,
    created_by,
    dim_of_examples,
    is_exact_by_row,
    rows_of,
    whole_of,
)
from autopar.microbatch.example_blocks import Blocks

POSITIONS = "positions of the examples"
"""The path of the input with the positions of the examples."""


class _Site(NamedTuple):
    """An equation that creates an array with a row per example.

    Attributes:
        order: its place among the equations that create arrays.
        number: the number of the equation, in the trace of the microbatch and in that of the batch.
        dim: the dim of the examples, without the dims of keys.
        blocks: the number of blocks in that dim (`autopar.microbatch.example_blocks`).
    """

    order: int
    number: tuple[int, int]
    dim: int
    blocks: Blocks


type Pair = tuple[Jaxpr, Jaxpr]
"""The traces of a step for one microbatch and for a larger batch."""


def add_positions(
    pairs: Sequence[Pair],
    batch: frozenset[int],
    count: int,
    folds: bool,
    blocks: Mapping[int, Blocks],
) -> list[Pair] | None:
    """Return traces that create the rows of a microbatch from the positions of its examples.

    The positions are one more input, the last one.

    Args:
        pairs: traces of one step, for batches of different sizes.
        batch: inputs whose first dim is the batch.
        count: the number of microbatches.
        folds: whether random bits whose rows can't be drawn alone come from keys with a position
            folded in.
        blocks: the number of blocks in the dim of the examples, if there are several, by the place
            among the equations that create arrays.

    Returns:
        The new traces; None if the step creates no such array, or if the traces don't agree.
    """
    if not batch:
        return None
    sites = [_sites(pair, batch, folds, blocks) for pair in pairs]
    if not sites[0] or len({tuple((site.order, site.dim) for site in s) for s in sites}) > 1:
        return None
    numbered = [
        (
            _with_positions(micro, {s.number[0]: s for s in of_pair}, batch, count, folds),
            _with_positions(whole, {s.number[1]: s for s in of_pair}, batch, 1, folds),
        )
        for (micro, whole), of_pair in zip(pairs, sites, strict=True)
    ]
    if any(_primitives(micro) != _primitives(whole) for micro, whole in numbered):
        return numbered
    return [(_with_whole_sizes(micro, whole, batch), whole) for micro, whole in numbered]


def _primitives(jaxpr: Jaxpr) -> list[Primitive]:
    return [eqn.primitive for eqn in jaxpr.eqns]


def _with_whole_sizes(micro: Jaxpr, whole: Jaxpr, batch: frozenset[int]) -> Jaxpr:
    """Return the trace of a microbatch with sizes of the whole batch where positions are used.

    In `arange(n) / n` the positions are those in the whole batch, and so `n` has to be its size.
    The numbers are replaced in equations that compute rows from positions without other data of the
    examples, and in what only these read, such as the limits of `jax.random.randint(key, (n,), 0,
    n)`.

    Args:
        micro: the trace of a microbatch; its last input is the positions.
        whole: the trace of the whole batch, with the same primitives.
        batch: inputs whose first dim is the batch, without the positions.
    """
    numbered = list(enumerate(micro.eqns))
    from_data = dependents(numbered, [micro.invars[i] for i in batch])
    created = dependents(numbered, micro.invars[-1:])
    read_otherwise = set(variables(micro.outvars))
    eqns = list(micro.eqns)
    for number, eqn in reversed(numbered):
        twin = whole.eqns[number]
        if not eqn.outvars or not from_data.isdisjoint(eqn.outvars):
            is_changed = False
        elif created.isdisjoint(eqn.outvars):
            is_changed = read_otherwise.isdisjoint(eqn.outvars)
        else:
            is_changed = result_shapes(eqn) != result_shapes(twin)
        if is_changed:
            eqns[number] = eqn.replace(
                invars=[
                    larger if isinstance(atom, Literal) and isinstance(larger, Literal) else atom
                    for atom, larger in zip(eqn.invars, twin.invars, strict=True)
                ]
            )
        else:
            read_otherwise.update(variables(eqn.invars))
    return micro.replace(eqns=eqns)


def blocks_of_created(
    jaxpr: Jaxpr,
    batch: frozenset[int],
    positions: int,
    kinds: Mapping[Var, BatchScaling | NotSeparable],
) -> dict[int, Blocks]:
    """Return how many blocks created arrays need, to be combined with others row by row.

    An array is created with the rows of an example next to one another. Dropout of joined arrays,
    as in `dropout(key, jnp.concatenate([x, y]))`, needs a block for each of them instead.

    Args:
        jaxpr: the trace of a microbatch with positions.
        batch: inputs whose first dim is the batch, with the positions.
        positions: the input with the positions.
        kinds: the scaling of each variable, or why it is not separable.

    Returns:
        The number of blocks by the place among the equations that create arrays; empty if none
        needs other blocks than it has.
    """
    of_batch = {jaxpr.invars[i] for i in batch if i != positions}
    made_by: dict[Var, JaxprEqn] = {}
    for eqn in jaxpr.eqns:
        made_by.update(dict.fromkeys(eqn.outvars, eqn))
        if not of_batch.isdisjoint(variables(eqn.invars)):
            of_batch.update(eqn.outvars)
    created = [eqn.outvars[0] for eqn in jaxpr.eqns if created_by(eqn) in ROWS_OF]
    examples = aval_of(jaxpr.invars[positions]).shape[0]
    needs: dict[int, Blocks] = {}
    for unfit in dict.fromkeys(kind for kind in kinds.values() if isinstance(kind, MinorExamples)):
        blocks_of = {unfit.eqn.invars[k]: blocks for k, blocks in unfit.blocks.items() if blocks}
        wanted = {blocks for var, blocks in blocks_of.items() if var in of_batch}
        if len(wanted) != 1:
            continue
        (blocks,) = wanted
        others = [var for var, of in blocks_of.items() if var not in of_batch and of != blocks]
        for creator in _rows_behind(others, made_by):
            rows, now = creator.params["shape"][creator.params["dim"]], creator.params["blocks"]
            if now != blocks and rows % (blocks * examples) == 0:
                needs.setdefault(created.index(creator.outvars[0]), blocks)
    return needs


def _rows_behind(atoms: Iterable[Atom], made_by: Mapping[Var, JaxprEqn]) -> Iterator[JaxprEqn]:
    """Yield the equations that create rows of examples which the atoms are computed from."""
    pending, seen = list(atoms), set[Var]()
    while pending:
        atom = pending.pop()
        if not isinstance(atom, Var) or atom in seen or atom not in made_by:
            continue
        seen.add(atom)
        eqn = made_by[atom]
        pending += eqn.invars
        if eqn.primitive in ROWS_OF.values():
            yield eqn


def without_positions(whole: Jaxpr) -> Jaxpr:
    """Return the trace of a whole batch with the equations that it had before `add_positions`."""
    return whole.replace(eqns=[whole_of(eqn) for eqn in whole.eqns])


def without_unread_positions(jaxpr: Jaxpr, positions: int | None) -> Jaxpr:
    """Return a jaxpr without the input number `positions`, its last one, if nothing reads it."""
    if positions is None or any(jaxpr.invars[positions] in eqn.invars for eqn in jaxpr.eqns):
        return jaxpr
    return jaxpr.replace(invars=jaxpr.invars[:positions])


def _sites(
    pair: Pair, batch: frozenset[int], folds: bool, blocks: Mapping[int, Blocks]
) -> list[_Site]:
    """Return the equations of both traces that create an array with a row per example.

    Equations of one primitive correspond to one another in the order of the traces.
    """
    first = min(batch)
    rows, more = (aval_of(trace.invars[first]).shape[0] for trace in pair)
    created = [
        [(number, eqn) for number, eqn in enumerate(trace.eqns) if eqn.primitive in ROWS_OF]
        for trace in pair
    ]
    if [eqn.primitive for _, eqn in created[0]] != [eqn.primitive for _, eqn in created[1]]:
        return []
    sites: list[_Site] = []
    for order, ((number, mine), (other_number, other)) in enumerate(zip(*created, strict=True)):
        dim = dim_of_examples(mine, other)
        if dim is None or not (folds or is_exact_by_row(mine)):
            continue
        if other.params["shape"][dim] == more // rows * mine.params["shape"][dim]:
            sites.append(_Site(order, (number, other_number), dim, blocks.get(order, 1)))
    return sites


def _with_positions(
    jaxpr: Jaxpr, sites: Mapping[int, _Site], batch: frozenset[int], count: int, folds: bool
) -> Jaxpr:
    """Return a trace in which some equations read the positions of the examples, its last input.

    Args:
        jaxpr: the trace.
        sites: these equations by their numbers.
        batch: inputs whose first dim is the batch.
        count: the number of microbatches like that of the trace in the batch.
        folds: as in `add_positions`.
    """
    rows = num_examples(jaxpr, batch)
    positions = Var(ShapedArray((rows,), jnp.dtype(jnp.int32)))
    loops = {
        token
        for token, (start, end) in control_flow.spans(jaxpr.eqns).items()
        if jaxpr.eqns[start].primitive is control_flow.loop_p
        and any(start < number < end for number in sites)
    }
    inner = [positions]  # the variable with the positions, for each of the open loops
    eqns: list[JaxprEqn] = []
    for number, eqn in enumerate(jaxpr.eqns):
        if site := sites.get(number):
            size = count * eqn.params["shape"][site.dim]
            is_folded = folds and not is_exact_by_row(eqn)
            eqn = rows_of(eqn, inner[-1], site.dim, size, is_folded, site.blocks)
        eqns.append(eqn)
        if eqn.primitive is control_flow.loop_p and eqn.outvars[0] in loops:
            local = Var(positions.aval)
            marker = {"invars": [inner[-1], eqn.outvars[0]], "outvars": [local], "params": {}}
            eqns.append(eqn.replace(primitive=control_flow.loop_const_p, **marker))
            inner.append(local)
        elif eqn.primitive is control_flow.end_p and control_flow.token_of(eqn) in loops:
            inner.pop()
    return jaxpr.replace(invars=[*jaxpr.invars, positions], eqns=eqns)
