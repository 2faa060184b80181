"""Batch scalings of values, and the rules from scalings of operands to scalings of results.

`autopar.microbatch.batch_scaling` applies the rules to a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal as OneOf

from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import (
    broadcast_in_dim_p,
    iota_p,
    random_bits_p,
    random_split_p,
    sort_p,
)
from jax.lax import tile_p

from autopar.ir.graph import Where, aval_of
from autopar.ir.step_graph import Combine
from autopar.microbatch.created_rows import why_whole
from autopar.microbatch.example_blocks import (
    Blocks,
    blocks_of_pieces,
    blocks_of_strides,
    common_blocks,
    examples_factor,
)
from autopar.microbatch.example_loops import is_over_examples
from autopar.microbatch.inner_bodies import why_body_differs
from autopar.primitives import op_factors
from autopar.primitives.index import indexed_dims, is_scatter
from autopar.primitives.library_markers import raises_error
from autopar.primitives.linearity import algebra_of, data_operands, is_exact, is_linear

ONE_GRADIENT = (
    "If the step accumulates gradients over parts of the batch, write one gradient of the whole"
    " batch instead: num_micro_batches accumulates it"
)
"""What to write in place of the user's own microbatches."""


@dataclass(frozen=True, slots=True)
class BatchScaling:
    """How the value of the whole batch follows from the values of its microbatches.

    Attributes:
        form: "same" if all microbatches have the same value; "rows" if it has a row per example
            along `dim`; "linear" if the mean over the microbatches gives it; "function" if it is a
            scalar computed from linear ones, and is known only when these are complete; "item" if
            it belongs to one iteration of a loop over the rows of examples.
        power: the value of the whole batch has an additional factor of count ** power, for `count`
            microbatches. None for zeros, which fit any power.
        dim: the dim of the examples if the form is "rows".
        blocks: the number of blocks in that dim, each with the rows of all examples in order
            (`autopar.microbatch.example_blocks`); a fraction if it has a part of the batch; None if
            all rows are equal.
        per: statistic of the batch by which the value is divided. The other attributes describe the
            value times this scalar.
    """

    form: OneOf["same", "rows", "linear", "function", "item"]
    power: int | None = 0
    dim: int = 0
    blocks: Blocks | None = 1
    per: Var | None = None

    @property
    def combine(self) -> Combine:
        """How the values of microbatches are combined, after their division."""
        if self.form == "rows":
            return "rows"
        if self.power == 1:
            return "sum"
        return "same" if self.form == "same" else "mean"

    @property
    def divisor_power(self) -> int:
        """The power of the number of microbatches by which accumulated values are divided first.

        Rows are divided, and values that are neither a sum nor a mean over the examples, such as
        their mean divided by their number.
        """
        if not self.power or (self.power == 1 and self.form != "rows"):
            return 0
        return -self.power


class NotSeparable(Exception):
    """The value of the whole batch does not follow from those of its microbatches.

    Attributes:
        remedy: what the user may write instead.
    """

    remedy = (
        "Write the loss as a sum, a mean or one weighted mean over the examples of the batch; or"
        " return the sums that it is made of, with has_aux=True, and divide after"
        " autopar.value_and_grad: (total, weights), gradients = autopar.value_and_grad(sums,"
        " has_aux=True)(params), then gradients / weights; or, in a loop over layers, return the"
        " means of each layer from the loop, and combine them after it, or for what is not made of"
        " means, such as a maximum, write the loop in Python; or use num_micro_batches=1"
    )


class SecondGradient(NotSeparable):
    """A gradient of the batch depends on another one, otherwise than linearly."""

    remedy = (
        "A second gradient of the same batch, as in sharpness-aware steps or in the two updates of"
        " a GAN, follows in a second pass over the microbatches if both gradients are outside of"
        " loops and branches. Otherwise use num_micro_batches=1, which runs in a pipeline, too, or"
        " make a step of each update"
    )


class AcrossExamples(NotSeparable):
    """An equation reads examples that are in different microbatches."""

    remedy = (
        "A microbatch has no other examples than its own: combine neighbours only, as in"
        " scores.reshape(-1, 2), or use num_micro_batches=1, with which a loss over pairs of"
        f" examples runs in a pipeline, too. {ONE_GRADIENT}"
    )


class SortedExamples(AcrossExamples):
    """A sort arranges rows of different examples."""

    remedy = (
        "Sort the rows of each example alone, as by jax.vmap, shuffle examples before the first"
        " layer of the model, or use num_micro_batches=1, which runs in a pipeline, too. Tokens may"
        " be sorted by their experts for jax.lax.ragged_dot if its group sizes are"
        " jnp.bincount(experts, length=num_experts), and only lookups by index arrange the rows and"
        " put them back"
    )


class PositionOfExamples(NotSeparable):
    """A value depends on the size of the batch or on the positions of its examples."""

    remedy = (
        "A loss over pairs of examples, such as a contrastive one, needs all of them: use"
        " num_micro_batches=1, which runs in a pipeline, too. Otherwise compute the value in each"
        " example, or pass it as a part of the batch. Gradients for each example are those of"
        " jax.vmap(jax.grad(loss), (None, 0)), not of jax.jacrev"
    )


class PartsOfBatch(NotSeparable):
    """A value has another number of rows per example in a larger batch, as `x.reshape(2, -1)`."""

    remedy = (
        "Keep the rows of an example together, as in x.reshape(-1, 2); or use fewer microbatches,"
        " so that each has several examples of each part of the batch; or use num_micro_batches=1."
        f" {ONE_GRADIENT}"
    )


class PartOfBatch(NotSeparable):
    """An accumulated value has a row for each example of a part of the batch, as its first half."""

    remedy = (
        "Return the rows of all examples and take the part from them after the step, or use"
        " num_micro_batches=1"
    )


class MinorExamples(NotSeparable):
    """The examples of the batch are the minor part of a dim.

    Attributes:
        eqn: an equation that combines this dim with one of another order.
        blocks: the number of blocks in the dim of the examples, for each operand with one.
    """

    remedy = (
        "Combine and return arrays with both dims, as (time, batch, ...), and merge them"
        " afterwards; or put the batch first, or use num_micro_batches=1"
    )

    def __init__(self, message: str, eqn: JaxprEqn, blocks: Mapping[int, Blocks | None]) -> None:
        super().__init__(message)
        self.eqn = eqn
        self.blocks = blocks


class IndexBySize(NotSeparable):
    """What an equation picks or solves depends on the size of the batch."""

    remedy = "Pass what it depends on as an argument of the step, or use num_micro_batches=1"


class IndexFromData(NotSeparable):
    """Data of an example are an index into the rows of the whole batch."""

    remedy = (
        "Look up rows in each example by jax.vmap; or show that an index does not leave the rows of"
        " its example: size * jnp.arange(batch)[:, None] + jnp.clip(index, 0, size - 1); or use"
        " num_micro_batches=1"
    )


class LoopOverExamples(NotSeparable):
    """A loop over examples carries more than sums, or ends by a condition on the batch."""

    remedy = (
        "Let each iteration return what it computes, or add it to a sum; or apply its body to every"
        " example by jax.vmap, or use num_micro_batches=1"
    )


class LoopUntilLastExample(NotSeparable):
    """A loop runs until its last example is done, and others change in the meantime."""

    remedy = (
        "Use while_loops='microbatch' in the method, with which each microbatch runs the loop until"
        " the last of its own examples is done; or take a fixed number of steps, as with"
        " diffrax.ConstantStepSize and diffrax.DirectAdjoint, or use num_micro_batches=1"
    )


class DependsOnOwnLoop(NotSeparable):
    """A value for all examples together depends on how often a microbatch runs a loop."""

    remedy = "Return a number for each example instead, or use num_micro_batches=1"


class ConstantDiffers(NotSeparable):
    """A constant of the step depends on the size of the batch."""


def power_of(eqn: JaxprEqn, operands: Sequence[BatchScaling], where: Where) -> int | None:
    """Return the power of the result from the powers of the operands; None if any power fits.

    Zeros fit any power, and so does what is not computed because the step ends with an error.

    Args:
        eqn: the equation.
        operands: the batch scalings of its operands.
        where: names the equation in errors.

    Raises:
        NotSeparable: the result does not scale with a power of the batch size.
    """
    if raises_error(eqn):
        return None
    data = data_operands(eqn)
    if any(kind.power for k, kind in enumerate(operands) if k not in data):
        raise IndexBySize(f"{where} has an index or a matrix that depends on the size of the batch")
    powers = [operands[k].power for k in data]
    nonzero = [power for power in powers if power is not None]
    match algebra_of(eqn):
        case "product":
            return sum(nonzero) if len(nonzero) == len(powers) else None
        case "quotient":
            return None if powers[0] is None else powers[0] - (powers[1] or 0)
        case "power":
            return None if powers[0] is None else powers[0] * eqn.params.get("y", 2)
        case "sum" | "linear" | "selection" | "homogeneous":
            if _scatters_rows(eqn, operands) and powers[0] is not None:
                raise NotSeparable(f"{where} adds a sum over examples to another array in place")
            if len(set(nonzero)) > 1:
                if is_exact(eqn.outvars[0]) and {"rows", "same"} == {k.form for k in operands}:
                    raise IndexFromData(
                        f"{where} adds the size of the batch to data, as an index such as"
                        " rows[data] does, which may be that of another example"
                    )
                raise NotSeparable(f"{where} adds a sum over examples to a mean over examples")
            return nonzero[0] if nonzero else None
        case "invariant" if len(set(nonzero)) == 1:
            return 0
    if any(powers):
        raise NotSeparable(f"{where} is not linear in the size of the batch")
    return 0


def _scatters_rows(eqn: JaxprEqn, operands: Sequence[BatchScaling]) -> bool:
    """Return whether rows of examples are added into an array without a batch dim."""
    adds_rows = is_scatter(eqn) and algebra_of(eqn) == "sum"
    return adds_rows and operands[2].form == "rows" and operands[0].form != "rows"


def result_scalings(
    eqn: JaxprEqn,
    whole: JaxprEqn,
    operands: Sequence[BatchScaling],
    count: int,
    own: bool = False,
) -> list[BatchScaling]:
    """Return the scalings of the results of an equation whose operands are same, rows or linear.

    Args:
        eqn: the equation in the trace for the smaller batch.
        whole: the same equation in the trace for the larger batch.
        operands: the batch scalings of its operands, none of them `per` a statistic.
        count: ratio of the batch sizes.
        own: whether each microbatch uses statistics of its own, the means of which over the
            microbatches stand for those of the batch. Reductions over the examples are statistics.

    Raises:
        NotSeparable: the results do not follow from those of microbatches.
    """
    kinds = _result_scalings(eqn, whole, operands, count, own)
    if len(kinds) == 1 or not eqn.invars or is_exact(eqn.invars[0]):
        return kinds
    # The positions of the largest elements do not scale with these.
    pairs = zip(kinds, eqn.outvars, strict=True)
    return [replace(kind, power=0) if is_exact(var) else kind for kind, var in pairs]


def _result_scalings(
    eqn: JaxprEqn, whole: JaxprEqn, operands: Sequence[BatchScaling], count: int, own: bool
) -> list[BatchScaling]:
    """Return the scalings of results, where integers scale as what they are computed from."""
    where = Where(eqn)
    power = _own_power(eqn, operands, where) if own else power_of(eqn, operands, where)
    linear = [k for k, kind in enumerate(operands) if kind.form == "linear"]
    rows = {k: kind for k, kind in enumerate(operands) if kind.form == "rows"}
    if any(kind.form == "item" for kind in operands):
        if linear or rows or result_shapes(eqn) != result_shapes(whole):
            raise AcrossExamples(f"{where} combines the example of one iteration with others")
        return [BatchScaling("item", power)] * len(eqn.outvars)
    if linear and rows and not own:
        raise NotSeparable(
            f"{where} mixes single examples with a statistic of the whole batch, as batch"
            " normalization does"
        )
    if linear and not own:
        if not is_linear(eqn, linear):
            raise NotSeparable(
                f"{where} is not linear in a statistic of the batch (a masked mean? a ratio of"
                " sums?)"
            )
        if result_shapes(eqn) != result_shapes(whole):
            raise NotSeparable(f"{where} repeats a statistic of the batch for each example")
        return [BatchScaling("linear", power)] * len(eqn.outvars)
    if rows:
        return _of_rows(eqn, whole, rows, power, count, own)
    kind = _created(eqn, whole, BatchScaling("same", power), count)
    if linear and kind.form == "same":
        kind = replace(kind, form="linear")
    return [kind] * len(eqn.outvars)


def _own_power(eqn: JaxprEqn, operands: Sequence[BatchScaling], where: Where) -> int | None:
    """Return the power of a result that follows from statistics of each microbatch.

    A number beside a sum over the examples does not count, as in `max(count, 1)` or `count - 1`. A
    truth value does not scale.
    """
    try:
        return power_of(eqn, operands, where)
    except NotSeparable:
        if any(kind.form == "rows" for kind in operands):
            raise
        if aval_of(eqn.outvars[0]).dtype == bool:
            return 0
        powers = {kind.power for kind in operands if kind.power}
        bounded = algebra_of(eqn) in ("sum", "homogeneous", "selection") and len(powers) == 1
        statistics = {kind.power for kind in operands if kind.form == "linear"}
        if not bounded or statistics - powers:
            raise
        return powers.pop()


def result_shapes(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """Return the shapes of the results of an equation."""
    return [aval_of(var).shape for var in eqn.outvars]


def _of_rows(
    eqn: JaxprEqn,
    whole: JaxprEqn,
    rows: Mapping[int, BatchScaling],
    power: int | None,
    count: int,
    own: bool,
) -> list[BatchScaling]:
    """Return the scalings of results of operands with examples, whose scalings are `rows`."""
    where, factors = Where(eqn), op_factors(eqn)
    dims = {k: (kind.dim, kind.blocks) for k, kind in rows.items()}
    places = blocks_of_pieces(eqn, whole, dims) or blocks_of_strides(eqn, whole, dims)
    if places is not None:
        kinds = [BatchScaling("rows", power, *place) for place in places]
        _check_all_rows(kinds, eqn, whole, count, where)
        return kinds
    batch = {factors.operands[k][kind.dim] for k, kind in rows.items()}
    blocks = common_blocks(kind.blocks for kind in rows.values())
    if blocks == "none":
        raise MinorExamples(
            f"{where} combines a dim of examples with one that has another dim merged into it",
            eqn,
            {k: kind.blocks for k, kind in rows.items()},
        )
    if () in batch:
        raise PartsOfBatch(f"{where} reads a single example of a part of the batch")
    # The operands of a grouped convolution have the examples beside channels or features.
    found = {examples_factor(factors, op_factors(whole), dim, blocks) for dim in batch}
    examples = found.pop()
    if found or examples is None:
        reason = SortedExamples if eqn.primitive is sort_p else AcrossExamples
        raise reason(f"{where} pairs examples with one another")
    if reason := why_body_differs(eqn, whole):
        raise NotSeparable(f"{where} {reason}")
    results = [examples.dim_of(result) for result in factors.results]
    known = (blocks, *(place[1] for place in results if place))
    if _parts(examples.blocks) not in map(_parts, known):
        raise AcrossExamples(f"{where} treats each of several parts of the batch differently")
    if 0 in rows and rows[0].dim in indexed_dims(eqn):
        raise AcrossExamples(f"{where} looks up examples by their positions in the batch")
    same_shapes = result_shapes(eqn) == result_shapes(whole)
    match factors.kinds[examples.number]:
        case "sum":
            if not same_shapes:
                raise NotSeparable(
                    f"{where} makes something whose shape depends on the size of the batch"
                )
            return [BatchScaling("linear", None if power is None else power + 1)] * len(eqn.outvars)
        case "parallel":
            kinds = []
            for place in results:
                # A shard_map saves values for its backward pass without a dim of examples.
                if place is None:
                    raise NotSeparable(f"{where} has a result without a dim of examples")
                kinds.append(BatchScaling("rows", power, *place))
            _check_all_rows(kinds, eqn, whole, count, where)
            return kinds
        case "max" | "min" if own and same_shapes:
            return [BatchScaling("linear", power)] * len(eqn.outvars)
        case _ if is_over_examples(eqn):
            raise LoopUntilLastExample(f"{where} depends on whether any example is not done")
        case _:
            raise AcrossExamples(f"{where} works across the examples of the batch")


def _parts(blocks: Blocks | None) -> int:
    """Return into how many equal parts a batch has to be divided for that number of blocks."""
    return 1 if blocks is None else blocks.denominator


def _check_all_rows(
    kinds: Sequence[BatchScaling], eqn: JaxprEqn, whole: JaxprEqn, count: int, where: Where
) -> None:
    """Raise PartsOfBatch if a result with these scalings grows in another dim than its examples."""
    for kind, var, big in zip(kinds, eqn.outvars, whole.outvars, strict=True):
        _check_rows(kind.dim, aval_of(var).shape, aval_of(big).shape, count, where)


def _check_rows(
    dim: int, micro: tuple[int, ...], whole: tuple[int, ...], count: int, where: Where
) -> None:
    """Raise PartsOfBatch unless only `dim` is larger in `whole`, by the factor `count`."""
    if (*micro[:dim], count * micro[dim], *micro[dim + 1 :]) != whole:
        raise PartsOfBatch(
            f"{where} has a result of shape {micro} for a microbatch and of shape {whole} for"
            " the batch: the dims that grow with the batch don't have a fixed number of rows"
            " per example"
        )


def _created(eqn: JaxprEqn, whole: JaxprEqn, kind: BatchScaling, count: int) -> BatchScaling:
    """Return the scaling of results of operands without examples: rows if their shape grows."""
    if result_shapes(eqn) == result_shapes(whole):
        return kind
    where = Where(eqn)
    if len(eqn.outvars) > 1:
        raise PositionOfExamples(f"{where} {why_whole(eqn)}")
    (shape,), (full,) = result_shapes(eqn), result_shapes(whole)
    grown = [dim for dim, (a, b) in enumerate(zip(shape, full, strict=True)) if a != b]
    uniform = eqn.primitive in (broadcast_in_dim_p, tile_p) or (
        eqn.primitive is iota_p and eqn.params["dimension"] not in grown
    )
    if len(grown) > 1 or not uniform:
        is_random = eqn.primitive in (random_bits_p, random_split_p)
        raise (NotSeparable if is_random else PositionOfExamples)(f"{where} {why_whole(eqn)}")
    _check_rows(grown[0], shape, full, count, where)
    blocks = 1 if eqn.primitive is tile_p else None
    return replace(kind, form="rows", dim=grown[0], blocks=blocks)
