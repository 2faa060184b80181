"""The traces of a step for batches of several sizes, flat and with stacked arrays in pieces."""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr

from autopar._plugins import assume_cudnn
from autopar.ir.array_cuts import Cut, CutTree
from autopar.ir.flatten import constrained_lines, flatten
from autopar.ir.graph import error_line
from autopar.ir.step_graph import EXACT, Exactness, MicrobatchError
from autopar.layering.forward_derivatives import without_forward_derivative
from autopar.layering.gradient_scans import cut_gradient_scans
from autopar.layering.layer_options import AutoLayerOption, LayerOption
from autopar.layering.layered_functions import Assignments, layered, layering
from autopar.layering.loss_checkpoints import without_loss_checkpoint
from autopar.layering.recomputed_scalars import without_recomputed_scalars
from autopar.layering.stack_cutting import cut_stacks, stack_seeds
from autopar.microbatch.gradients import tracing_whole_arrays
from autopar.microbatch.row_lookups import with_own_rows
from autopar.microbatch.same_step import DifferentStepsError, check_same_step
from autopar.tracing.argument_arrays import abstract, path_name
from autopar.tracing.block_lookups import with_own_blocks
from autopar.tracing.rescaled_trace import NotAffineError, rescaled
from autopar.tracing.sorted_rows import without_sorted_rows


class TraceError(TypeError):
    """The step can't be traced to a jaxpr of arrays."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The options of a trace.

    Attributes:
        layers: how functions that `autopar.grad` differentiates are divided into layers; None if
            they are not.
        marked: whether to mark the values that microbatches accumulate even if there is only one
            microbatch.
        forward: whether the step takes no gradients. Then the step itself is divided into layers,
            and its results are combined from microbatches.
        exactness: in what microbatches may differ from the whole batch.
        keeps_remat: whether `jax.checkpoint` recomputes (`autopar.ir.flatten`).
        keeps_constraints: whether `jax.lax.with_sharding_constraint` stays.
    """

    layers: LayerOption | None = None
    marked: bool = False
    forward: bool = False
    exactness: Exactness = EXACT
    keeps_remat: bool = True
    keeps_constraints: bool = False


class TracedStep(NamedTuple):
    """A traced step, with arrays in pieces where stages have pieces of them.

    Attributes:
        jaxpr: the flat jaxpr.
        arguments: the user's arguments, in pieces.
        result: the user's result, in pieces.
        in_keys: the key path of each input.
        out_keys: the key path of each output.
        batch: the numbers of the inputs whose first dim is the batch.
        unconstrained: the lines whose `jax.lax.with_sharding_constraint` is left out.
    """

    jaxpr: Jaxpr
    arguments: CutTree
    result: CutTree
    in_keys: list[tuple[Any, ...]]
    out_keys: list[tuple[Any, ...]]
    batch: frozenset[int]
    unconstrained: tuple[str, ...]


class StepTraces:
    """The traces of a step for batches of several sizes.

    Attributes:
        name: the name of the user's function.
        options: the options. Its layers are None if the step itself is in layers.
        in_tree: the structure of the arguments.
        in_keys: the key path of each array among them.
        avals: the type of each array, for the whole batch.
        batch: the numbers of the arrays whose first dim is the batch.
        scan_assignments: the layers of scans whose gradients are divided.
        rounded_scales: the parts of the batch, as fractions, whose traces have rounded sizes. They
            are not made of whole groups of examples that the step puts together.
        trace: see `_trace`; a trace is made once for the same arguments.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        batch_argnums: Collection[int],
        options: TraceOptions,
    ) -> None:
        """Trace nothing yet.

        Args:
            fun: the step.
            args: its arguments, pytrees of arrays or ShapeDtypeStructs.
            batch_argnums: the arguments whose arrays have the batch as their first dim.
            options: the options.
        """
        leaves, self.in_tree = jax.tree.flatten_with_path(tuple(args))
        self.name = getattr(fun, "__name__", "the step")
        if options.forward:
            if options.layers is not None and not hasattr(fun, "layer_option"):
                weight_argnums = [i for i in range(len(args)) if i not in batch_argnums]
                fun = layered(fun, options.layers, weight_argnums, differentiated=False)
            options = replace(options, layers=None)
        self.options = options
        self._fun = fun
        self.in_keys = [path for path, _ in leaves]
        self.avals = [abstract(leaf) for _, leaf in leaves]
        self.batch = frozenset(
            i
            for i, key in enumerate(self.in_keys)
            if key[0].idx in batch_argnums and self.avals[i].ndim > 0
        )
        self.scan_assignments: Assignments = {}
        self.rounded_scales: set[Fraction] = set()
        self._assignments: Assignments = {}
        self.trace = cache(self._trace)
        self._flat_trace = cache(self._make_flat_trace)
        self._flat_scales: list[tuple[Fraction, bool]] = []

    def _trace(self, scale: Fraction, in_microbatches: bool, whole_arrays: bool) -> TracedStep:
        """Return the step for a batch that is larger by `scale`, or smaller if that is below one.

        JAX traces a single example otherwise than more of them, and may order a product or a
        solution of linear equations by the sizes of its operands. A microbatch is to compute what
        the whole batch does. So if its equations are other ones, its trace is that of a larger
        batch, scaled down, where traces for two sizes show how.

        Args:
            scale: the factor.
            in_microbatches: whether the step runs in microbatches.
            whole_arrays: whether functions that run on shards are traced for whole arrays.
        """
        mode = in_microbatches, whole_arrays
        if scale >= 1:
            return self._own_trace(scale, *mode)
        is_single = any(self.avals[i].shape[0] * scale == 1 for i in self.batch)
        if is_single:
            larger = Fraction(2 if 2 * scale == 1 else 1)
            scaled_down = self._scaled_down(scale, 2 * scale, larger, *mode)
            if scaled_down is not None:
                return scaled_down
        whole, double = Fraction(1), Fraction(2)
        try:
            traced = self._own_trace(scale, *mode)
        except Exception:
            if not in_microbatches:
                raise
            # The largest five losses, for example, can't be traced for a microbatch of four.
            for rounds in (False, True):
                scaled_down = self._scaled_down(scale, whole, double, *mode, rounds=rounds)
                if scaled_down is not None:
                    return scaled_down
            raise
        if in_microbatches and not is_single:
            try:
                check_same_step(traced.jaxpr, self.trace(whole, *mode).jaxpr)
            except DifferentStepsError:
                return self._scaled_down(scale, whole, double, *mode) or traced
        return traced

    def _own_trace(self, scale: Fraction, in_microbatches: bool, whole_arrays: bool) -> TracedStep:
        """Return what JAX traces for a batch of this size; see `_trace`."""
        traced = self._flat_trace(scale, whole_arrays)
        if not in_microbatches:
            return traced
        own = with_own_rows(traced.jaxpr, traced.batch)
        resized = partial(self._resized, scale, whole_arrays)
        return traced._replace(jaxpr=with_own_blocks(own, traced.batch, resized))

    def _resized(self, scale: Fraction, whole_arrays: bool) -> Jaxpr | None:
        """Return the step for a batch of another size than `scale`; None if it can't be traced.

        A size that is traced already is taken if the step has as many equations for it.
        """
        own = self._flat_trace(scale, whole_arrays)
        for other in self._flat_scales:
            if other != (scale, whole_arrays) and other[1] == whole_arrays:
                traced = self._flat_trace(*other)
                if len(traced.jaxpr.eqns) == len(own.jaxpr.eqns):
                    return with_own_rows(traced.jaxpr, traced.batch)
        try:
            traced = self._flat_trace(Fraction(2) if scale == 1 else Fraction(1), whole_arrays)
        except Exception:
            return None  # the size that is wanted may be traced nonetheless
        return with_own_rows(traced.jaxpr, traced.batch)

    def _make_flat_trace(self, scale: Fraction, whole_arrays: bool) -> TracedStep:
        """Return what JAX traces for a batch of this size, flat; see `_trace`."""
        scaled = [
            _with_rows(aval, int(aval.shape[0] * scale)) if i in self.batch else aval
            for i, aval in enumerate(self.avals)
        ]
        whole = tracing_whole_arrays() if whole_arrays else nullcontext()
        with layering(self.options.layers, self._assignments), whole:
            traced = self.flat(*self._jaxpr(scaled))
        self._flat_scales.append((scale, whole_arrays))
        return traced

    def flat(self, jaxpr: Jaxpr, out_keys: list[Any], out_tree: Any) -> TracedStep:
        """Return a traced step with its scans divided into layers, and flat.

        Args:
            jaxpr: the step, which may take more inputs than the arguments.
            out_keys: the key paths of its outputs.
            out_tree: the structure of its outputs.
        """
        options = self.options
        if isinstance(options.layers, AutoLayerOption):
            weights = [i for i in range(len(self.avals)) if i not in self.batch]
            cut = cut_gradient_scans(jaxpr, options.layers, weights, self.scan_assignments)
            jaxpr = jaxpr if cut is None else cut
        unconstrained = () if options.keeps_constraints else constrained_lines(jaxpr)
        jaxpr = flatten(
            jaxpr, keeps_remat=options.keeps_remat, keeps_constraints=options.keeps_constraints
        )
        jaxpr = without_forward_derivative(jaxpr)
        if isinstance(options.layers, AutoLayerOption):
            jaxpr = without_loss_checkpoint(jaxpr)
        jaxpr = without_recomputed_scalars(jaxpr)
        jaxpr = without_sorted_rows(jaxpr)
        arguments = jaxpr.invars[: len(self.avals)]
        in_pieces = [var for i, var in enumerate(arguments) if i not in self.batch]
        seeds = stack_seeds(jaxpr)
        cut = cut_stacks(jaxpr, seeds, in_pieces=in_pieces, out_pieces=jaxpr.outvars)
        inputs = cut.inputs[: len(self.avals)]
        arguments = CutTree(self.in_tree, tuple(map(path_name, self.in_keys)), inputs)
        batch = arguments.numbers_of_pieces(self.batch)
        return TracedStep(
            cut.jaxpr,
            arguments,
            CutTree(out_tree, tuple(map(path_name, out_keys)), cut.outputs),
            _piece_keys(self.in_keys, inputs),
            _piece_keys(out_keys, cut.outputs),
            batch,
            unconstrained,
        )

    def _scaled_down(
        self, scale: Fraction, size: Fraction, larger: Fraction, *mode: bool, rounds: bool = False
    ) -> TracedStep | None:
        """Return the step for a batch, from its traces for two larger ones; None if that fails.

        Args:
            scale: the size of the batch, as in `_trace`.
            size: the size of the smaller one of the larger batches.
            larger: the size of the other one.
            mode: the other arguments of `_trace`.
            rounds: whether sizes are rounded up, as in `rescaled`.
        """
        try:
            base, other = self.trace(size, *mode), self.trace(larger, *mode)
        except Exception:
            return None  # if it is an error for any size, the trace for this one raises it
        if base[1:] != other[1:]:
            return None
        try:
            jaxpr = rescaled(base.jaxpr, other.jaxpr, larger / size, scale / size, rounds)
        except NotAffineError:
            return None
        if rounds or size in self.rounded_scales:
            self.rounded_scales.add(scale)
        return base._replace(jaxpr=jaxpr)

    def trace_of_part(self, scale: Fraction, whole_arrays: bool) -> TracedStep:
        """Return the step for a part of the batch in microbatches; see `_trace`.

        A part of twice the batch shows how a microbatch of a single example scales.

        Raises:
            MicrobatchError: The step can be traced for the whole batch, but not for this part.
        """
        try:
            return self.trace(scale, True, whole_arrays)
        except Exception as error:
            # Raises an error that has nothing to do with the size of microbatches.
            self.trace(Fraction(1), True, False)
            rows = self.avals[min(self.batch)].shape[0]
            part, fewer = "microbatch", "num_micro_batches=1"
            if scale >= 1:
                part, fewer = "batch", "fewer microbatches, with several examples each"
            raise MicrobatchError(
                f"{self.name} can be traced for the whole batch of {rows} examples, but not for a"
                f" {part} of {rows * scale}: {error_line(error)} raises"
                f" {type(error).__name__}: {str(error).partition('\n')[0]}\n"
                "Take the size of the batch from the shape of its arrays (x.shape[0], or -1 in a"
                " reshape) instead of a number, pass arrays without examples in another argument"
                f" than the batch, which is argument {' and '.join(self._batch_arguments())}, name"
                f" all arguments with examples in batch_argnums{self._other_batches(rows)}, or use"
                f" {fewer}."
            ) from error

    def _batch_arguments(self) -> list[str]:
        """Return the numbers of the arguments with examples, for an error."""
        return list(dict.fromkeys(path_name(self.in_keys[i][:1]) for i in sorted(self.batch)))

    def _other_batches(self, rows: int) -> str:
        """Return a hint at arguments that may be batches, for an error; "" without any.

        Args:
            rows: the number of examples.
        """
        numbers = [path_name(key[:1]) for key in self.in_keys]
        examples = self._batch_arguments()
        fits = {
            (number, aval.shape[:1] == (rows,))
            for number, aval in zip(numbers, self.avals, strict=True)
        }
        others = sorted(number for number, has_rows in fits if has_rows and number not in examples)
        if not others:
            return ""
        is_mixed = any((number, False) in fits for number in others)
        apart = "; if these are examples, pass them in an argument of their own" if is_mixed else ""
        return f" ({', '.join(others)} has arrays of {rows} rows, too{apart})"

    def jaxpr_of_batch(self) -> tuple[Jaxpr, list[Any], Any]:
        """Return the jaxpr of the whole batch, and the key paths and structure of its outputs."""
        with layering(self.options.layers, self._assignments):
            return self._jaxpr(self.avals)

    def _jaxpr(self, avals: Sequence[jax.ShapeDtypeStruct]) -> tuple[Jaxpr, list[Any], Any]:
        """Return the jaxpr for arguments of some types; see `jaxpr_of_batch`."""
        # JAX caches traces by function. A new function keeps traces with other layers apart.
        fun = jax.make_jaxpr(lambda *args: self._fun(*args), return_shape=True)
        try:
            with assume_cudnn():
                jaxpr, result = fun(*jax.tree.unflatten(self.in_tree, avals))
        except jax.errors.JAXTypeError as error:
            raise TraceError(
                f"{self.name} can't be traced: {str(error).splitlines()[0]}\n"
                "It depends on the value of an argument; use jnp.where or jax.lax.cond on arrays,"
                " or make the argument static with static_argnums."
            ) from error
        except TypeError as error:
            if "not a valid JAX type" not in str(error):
                raise
            raise TraceError(
                f"{self.name} can't be traced: {str(error).splitlines()[0]}\n"
                "Compute with and return only arrays and numbers, in dicts, tuples, lists or other"
                " pytrees."
            ) from error
        outputs, out_tree = jax.tree.flatten_with_path(result)
        return jaxpr, [path for path, _ in outputs], out_tree


def _piece_keys(
    keys: Sequence[tuple[Any, ...]], cuts: Sequence[Cut | None]
) -> list[tuple[Any, ...]]:
    """Return the key path of each piece: the path of its array, and the number of the piece."""
    paths: list[tuple[Any, ...]] = []
    for key, cut in zip(keys, cuts, strict=True):
        if cut is None:
            paths.append(key)
        else:
            paths += [(*key, jax.tree_util.SequenceKey(k)) for k in range(len(cut.sizes))]
    return paths


def _with_rows(aval: jax.ShapeDtypeStruct, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *aval.shape[1:]), aval.dtype, weak_type=aval.weak_type)
