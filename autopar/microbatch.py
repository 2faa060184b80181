"""Splitting a step into microbatches, without ever changing what it computes.

How a value of the whole batch comes from those of its microbatches is told by its kind (`autopar.kinds`): they are added up,
averaged, or all the same; what is divided by a sum of weights, as a masked mean, is divided by the weights of the whole batch,
after the last microbatch (`autopar.ratios`). Whatever does not fit is refused.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal as OneOf

from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.gradients import accumulate_p
from autopar.graph import Atom, aval_of, needed
from autopar.kind_arithmetic import Kind
from autopar.kinds import Kinds, MicrobatchError
from autopar.ratios import divided_afterwards, unique

type Combine = OneOf["sum", "mean", "same", "rows"]
"""How the microbatches' values make that of the batch: added up, averaged, any of them, or put together row by row."""

type Numbered = tuple[int, JaxprEqn]


@dataclass(frozen=True, slots=True)
class Microbatching:
    """How a step runs in microbatches.

    Attributes:
        count: number of microbatches.
        body: numbered equations that run for each, up to the marked values.
        tail: numbered equations that run once, on the accumulated values.
        marks: the numbered `accumulate` equations: the body ends at their operands, the tail starts at their results.
        combine: how each of their results is put together.
        powers: for values with a row per example, told by (equation, result), the power of the batch's size that they grow with.
    """

    count: int
    body: tuple[Numbered, ...]
    tail: tuple[Numbered, ...]
    marks: tuple[Numbered, ...]
    combine: tuple[Combine, ...]
    powers: Mapping[tuple[int, int], int] = field(default_factory=dict, repr=False)


def split(
    micro: Jaxpr,
    sizes: tuple[Jaxpr, Jaxpr],
    batch: frozenset[int],
    count: int,
    out_paths: Sequence[str],
    rows: bool = False,
) -> tuple[Jaxpr, Microbatching]:
    """Split a flat jaxpr traced for one microbatch; gives it back as it runs.

    Args:
        sizes: the same step traced for two batch sizes above one, the second `count` times the first. (A microbatch of a
            single example won't do: tracing simplifies dims of size one away.)
        rows: whether marked values may have a row per example, in dim 0.

    Raises:
        MicrobatchError: nothing is marked, an output depends on the batch other than through marked values, or a marked value
            can't be put together from microbatches.
    """
    marks, body, tail = _parts(micro)
    if not marks:
        raise MicrobatchError(
            "the step takes no gradient with autopar.grad or autopar.value_and_grad; use one of them in place of jax's, so that"
            " it is known what to accumulate over microbatches"
        )
    if any(eqn.primitive is accumulate_p for _, eqn in body):
        raise MicrobatchError("a loss depends on the gradients of another autopar.grad; that can't run in microbatches")
    accumulated = tuple(var for _, eqn in marks for var in eqn.outvars)
    if count == 1:
        return micro, Microbatching(1, tuple(body), tuple(tail), tuple(marks), ("same",) * len(accumulated))
    batch_vars = {micro.invars[i] for i in batch}

    def reads_batch(eqns: Sequence[Numbered], results: Sequence[Atom]) -> bool:
        read = [*results, *(operand for _, eqn in eqns for operand in eqn.invars)]
        return any(isinstance(atom, Var) and atom in batch_vars for atom in read)

    for path, atom in zip(out_paths, micro.outvars, strict=True) if reads_batch(tail, micro.outvars) else ():
        if reads_batch(needed(tail, [atom], given=accumulated), [atom]):
            raise MicrobatchError(
                f"output {path or 'of the step'} depends on the batch outside autopar.grad / value_and_grad, so it can't be put"
                " together from microbatches; return it from the loss function with has_aux=True"
            )
    found = Kinds(*sizes, batch, count)
    same = [eqn.primitive for eqn in micro.eqns] == [eqn.primitive for eqn in sizes[0].eqns]
    powers = found.powers_of_rows(sizes[0].eqns) if same else {}
    combine: list[Combine] = []
    weights: list[list[Var | None]] = []
    for _, eqn in _named(sizes[0], accumulate_p.name):
        weights.append([found.of(atom).per for atom in eqn.invars])
        combine.extend(_combine(found.of(atom), atom, rows) for atom in (*eqn.invars, *unique(weights[-1])))
    if any(map(any, weights)):
        micro, numbers = _divided_afterwards(micro, sizes[0], found.divided, weights)
        powers = {(numbers[n], r): power for (n, r), power in powers.items()}
    marks, body, tail = _parts(micro)
    if len(combine) != sum(len(eqn.invars) for _, eqn in marks):
        raise MicrobatchError(
            "the step takes other gradients when a microbatch has a single example; use fewer microbatches"
        )
    return micro, Microbatching(count, tuple(body), tuple(tail), tuple(marks), tuple(combine), powers)


def _divided_afterwards(
    micro: Jaxpr, traced: Jaxpr, divided: Collection[int], weights: Sequence[Sequence[Var | None]]
) -> tuple[Jaxpr, list[int]]:
    """`micro` with divisions left until everything is accumulated; which ones, and by what, is told of another trace of the step.

    The two have the same divisions, if not the same equations: fewer of these are needed for a single example.
    """
    ours, theirs = _named(micro, "div"), _named(traced, "div")
    scalars = [[not aval_of(eqn.invars[1]).shape for _, eqn in each] for each in (ours, theirs)]
    if scalars[0] != scalars[1] or len(_named(micro, accumulate_p.name)) != len(weights):
        raise MicrobatchError(
            "a masked mean is computed otherwise when a microbatch has a single example, or a model runs on shards; use fewer"
            " microbatches, or for a scheduled model another backend than 'manual'"
        )
    pairs = list(zip(theirs, ours, strict=True))
    by: dict[Atom, Var] = {}
    for (number, other), (_, mine) in pairs:
        if number in divided and isinstance(mine.invars[1], Var):
            by[other.invars[1]] = mine.invars[1]
    here = {mine for (other, _), (mine, _) in pairs if other in divided}
    before = here.intersection(number for number, _ in _parts(micro)[1])
    marks = [number for number, _ in _named(micro, accumulate_p.name)]
    renamed = [[None if var is None else by[var] for var in row] for row in weights]
    return divided_afterwards(micro, before, dict(zip(marks, renamed, strict=True)))


def _parts(jaxpr: Jaxpr) -> tuple[list[Numbered], list[Numbered], list[Numbered]]:
    """The marks, and what is needed before and after them."""
    numbered, marks = list(enumerate(jaxpr.eqns)), _named(jaxpr, accumulate_p.name)
    accumulated = tuple(var for _, eqn in marks for var in eqn.outvars)
    body = needed(numbered, [atom for _, eqn in marks for atom in eqn.invars])
    return marks, body, needed(numbered, jaxpr.outvars, given=accumulated)


def _named(jaxpr: Jaxpr, primitive: str) -> list[Numbered]:
    """The equations of one primitive."""
    return [(number, eqn) for number, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == primitive]


def _combine(kind: Kind, atom: Atom, rows: bool) -> Combine:
    """How values of that kind are put together. Raises MicrobatchError if they can't be."""
    if kind.form == "rows" and rows:
        if kind.dim or kind.power or kind.per:
            raise MicrobatchError(
                f"a result has a row per example in dim {kind.dim}, or rows that grow with the batch size, of shape"
                f" {aval_of(atom).shape} for a microbatch; return it with the batch as its first dim, or use"
                " num_micro_batches=1"
            )
        return "rows"
    if kind.form == "rows":
        raise MicrobatchError(
            f"autopar.grad returns a value with one row per example, of shape {aval_of(atom).shape} for a microbatch;"
            " return sums or means over the batch, or use num_micro_batches=1"
        )
    match kind.power:
        case 0 | None:
            return "same" if kind.form == "same" else "mean"
        case 1:
            return "sum"
        case power:
            raise MicrobatchError(
                f"a loss or gradient that grows with the batch size to the power {power} can't be accumulated over"
                " microbatches; write the loss as a sum or a mean over the examples"
            )
