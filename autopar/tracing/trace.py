"""Tracing of a Python training step to a `StepGraph`, at the batch sizes of its microbatches."""

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, Literal, Var

from autopar._cpython import builds_graphs
from autopar._plugins import assume_cudnn
from autopar.ir.array_cuts import Cut, CutTree
from autopar.ir.array_handle import ArrayHandle
from autopar.ir.flatten import constrained_lines, flatten
from autopar.ir.graph import aval_of, error_line, is_backward
from autopar.ir.step_graph import (
    EXACT,
    Exactness,
    MicrobatchError,
    StepGraph,
)
from autopar.layering.gradient_layers import gradient_layers
from autopar.layering.gradient_scans import cut_gradient_scans
from autopar.layering.layer_clustering import NoLayersError
from autopar.layering.layers import (
    Assignments,
    AutoLayerOption,
    LayerOption,
    layered,
    layering,
    num_layers,
)
from autopar.layering.stack_cutting import cut_stacks, stack_seeds
from autopar.microbatch.gradients import tracing_whole_arrays
from autopar.microbatch.row_lookups import with_own_rows
from autopar.microbatch.row_positions import POSITIONS
from autopar.microbatch.same_step import DifferentStepsError, check_same_step
from autopar.microbatch.splitting import split_once
from autopar.primitives.shard_map import SHARD_MAP
from autopar.progress import progress_part
from autopar.tracing.accumulation_loop import has_gradient_in_loop
from autopar.tracing.block_lookups import with_own_blocks
from autopar.tracing.chunk_step import ChunkStep, OwnMicrobatchesError, chunk_step
from autopar.tracing.microbatch_traces import DividedTrace, MicrobatchTraces, SplitStep
from autopar.tracing.rescaled_trace import NotAffineError, rescaled
from autopar.tracing.shared_traces import shared
from autopar.tracing.sorted_rows import without_sorted_rows
from autopar.tracing.unrolled_chunks import UnlikeChunksError


class TraceError(TypeError):
    """The step can't be traced to a jaxpr of arrays."""


def _takes_gradient(step: SplitStep) -> bool:
    """Return whether each microbatch of a step takes gradients."""
    found = step.microbatching
    return found is not None and any(is_backward(eqn) for _, eqn in found.body)


@builds_graphs
def trace(
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch_argnums: Collection[int],
    num_micro_batches: int = 1,
    layers: LayerOption | None = None,
    marked: bool = False,
    forward: bool = False,
    exactness: Exactness = EXACT,
    keeps_remat: bool = True,
    keeps_constraints: bool = False,
) -> StepGraph:
    """Return `fun`, traced for arguments like `args`.

    Args:
        fun: The step.
        args: Its arguments, pytrees of arrays or ShapeDtypeStructs.
        batch_argnums: The arguments whose arrays have the batch as their first dim.
        num_micro_batches: The number of microbatches.
        layers: How functions that `autopar.grad` differentiates are divided into layers; None if
            they are not.
        marked: Whether to mark the values that microbatches accumulate even if there is only one
            microbatch.
        forward: Whether `fun` takes no gradients. Then `fun` itself is divided into layers, and its
            results are combined from microbatches.
        exactness: In what microbatches may differ from the whole batch.
        keeps_remat: Whether `jax.checkpoint` recomputes (`autopar.ir.flatten`).
        keeps_constraints: Whether `jax.lax.with_sharding_constraint` stays.

    Raises:
        TraceError: `fun` depends on the values of its arguments, or returns something other than
            arrays.
        MicrobatchError: The batch can't be divided, or the step does not have the same result in
            microbatches.
    """
    options = layers, marked, forward, exactness, keeps_remat, keeps_constraints
    tracer, key = _tracer(fun, args, batch_argnums, *options)

    def traced() -> StepGraph:
        num_traces = 1 if num_micro_batches == 1 else _TRACES_IN_MICROBATCHES
        seconds = num_traces * len(tracer.avals) * _SECONDS_PER_ARRAY
        with progress_part(0, 1, "tracing", seconds):
            return tracer.graph(num_micro_batches)

    return shared((key, num_micro_batches), traced)


def own_microbatches(
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch_argnums: Collection[int],
    exactness: Exactness,
) -> int | None:
    """Return the number of chunks whose gradients a step accumulates itself; None if it does not.

    It is None, too, if the chunks are no microbatches. See `trace` for the arguments.
    """
    tracer, _ = _tracer(fun, args, batch_argnums, None, True, False, exactness, True, False)
    return tracer.num_chunks()


def _tracer(
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch_argnums: Collection[int],
    layers: LayerOption | None,
    marked: bool,
    forward: bool,
    exactness: Exactness,
    keeps_remat: bool,
    keeps_constraints: bool,
) -> "tuple[_StepTracer, Hashable]":
    """Return the shared tracer of a step, and its key; see `trace` for the arguments."""
    name = _name(fun)
    if forward:
        if layers is not None and not hasattr(fun, "layer_option"):
            weight_argnums = [i for i in range(len(args)) if i not in batch_argnums]
            fun = layered(fun, layers, weight_argnums, differentiated=False)
        layers = None
    tracer = _StepTracer(fun, name, args, batch_argnums, layers, marked, forward, exactness)
    tracer.keeps_remat = keeps_remat
    tracer.keeps_constraints = keeps_constraints
    # Numbers of microbatches share the trace of the whole batch.
    options = layers, marked, forward, exactness, keeps_remat, keeps_constraints
    key = fun, tracer.in_tree, tuple(tracer.avals), tracer.batch, options
    return shared(key, lambda: tracer), key


_SECONDS_PER_ARRAY = 3e-3
"""Usual seconds of tracing for each array among the arguments, for an estimate before tracing."""

_TRACES_IN_MICROBATCHES = 4
"""Number of traces of a step in microbatches, see `_StepTracer._split_like`."""


def with_output_cuts(step: StepGraph, cuts: Sequence[Cut | None]) -> StepGraph:
    """Return a step that computes its outputs in pieces.

    Args:
        step: A step whose outputs are in one piece.
        cuts: The cut of each output; None for an output that stays in one piece.
    """
    seeds = {
        atom: cut
        for atom, cut in zip(step.jaxpr.outvars, cuts, strict=True)
        if cut is not None and isinstance(atom, Var)
    }
    if not seeds:
        return step
    cut = cut_stacks(step.jaxpr, seeds, out_pieces=seeds)
    result = replace(step.result, cuts=cut.outputs)
    return replace(
        step,
        jaxpr=cut.jaxpr,
        result=result,
        out_paths=result.piece_paths,
        out_tree=result.piece_tree,
        carried={},
    )


class _Trace(NamedTuple):
    """A traced step, with arrays in pieces where stages have pieces of them.

    Attributes:
        jaxpr: The flat jaxpr.
        arguments: The user's arguments, in pieces.
        result: The user's result, in pieces.
        in_keys: The key path of each input.
        out_keys: The key path of each output.
        batch: The numbers of the inputs whose first dim is the batch.
        unconstrained: The lines whose `jax.lax.with_sharding_constraint` is left out.
    """

    jaxpr: Jaxpr
    arguments: CutTree
    result: CutTree
    in_keys: list[tuple[Any, ...]]
    out_keys: list[tuple[Any, ...]]
    batch: frozenset[int]
    unconstrained: tuple[str, ...]


class _StepTracer:
    """Traces of a step for several numbers of microbatches; see `trace` for the arguments.

    Attributes:
        batch: The numbers of the inputs whose first dim is the batch.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        name: str,
        args: Sequence[Any],
        batch_argnums: Collection[int],
        layers: LayerOption | None,
        marked: bool,
        forward: bool,
        exactness: Exactness,
    ) -> None:
        leaves, self.in_tree = jax.tree.flatten_with_path(tuple(args))
        self.fun = fun
        self.name = name
        self.layers = layers
        self.marked = marked
        self.forward = forward
        self.exactness = exactness
        self.keeps_remat = True
        self.keeps_constraints = False
        self.in_keys = [path for path, _ in leaves]
        self.avals = [abstract(leaf) for _, leaf in leaves]
        self.batch = frozenset(
            i
            for i, key in enumerate(self.in_keys)
            if key[0].idx in batch_argnums and self.avals[i].ndim > 0
        )
        self._assignments: Assignments = {}
        self._scan_assignments: Assignments = {}
        self.graph = cache(self._graph)
        self._traced = cache(self._trace)
        self._chunked = cache(self._chunk_step)

    def _trace(self, scale: Fraction, in_microbatches: bool, whole_arrays: bool) -> _Trace:
        """Return the step for a batch that is larger by `scale`, or smaller if that is below one.

        JAX traces a single example otherwise than more of them, and may order a product or a
        solution of linear equations by the sizes of its operands. A microbatch is to compute what
        the whole batch does. So if its equations are other ones, its trace is that of a larger
        batch, scaled down, where traces for two sizes show how.

        Args:
            scale: The factor.
            in_microbatches: Whether the step runs in microbatches.
            whole_arrays: Whether functions that run on shards are traced for whole arrays.
        """
        options = in_microbatches, whole_arrays
        if scale >= 1:
            return self._own_trace(scale, *options)
        if any(self.avals[i].shape[0] * scale == 1 for i in self.batch):
            larger = Fraction(2 if 2 * scale == 1 else 1)
            scaled_down = self._scaled_down(scale, 2 * scale, larger, *options)
            return scaled_down or self._own_trace(scale, *options)
        try:
            traced = self._own_trace(scale, *options)
        except Exception:
            if not in_microbatches:
                raise
            # The largest five losses, for example, can't be traced for a microbatch of four.
            scaled_down = self._scaled_down(scale, Fraction(1), Fraction(2), *options)
            if scaled_down is None:
                raise
            return scaled_down
        if in_microbatches:
            try:
                check_same_step(traced.jaxpr, self._traced(Fraction(1), *options).jaxpr)
            except DifferentStepsError:
                return self._scaled_down(scale, Fraction(1), Fraction(2), *options) or traced
        return traced

    def _own_trace(self, scale: Fraction, in_microbatches: bool, whole_arrays: bool) -> _Trace:
        """Return what JAX traces for a batch of this size; see `_trace`."""
        scaled = [
            _with_rows(aval, int(aval.shape[0] * scale)) if i in self.batch else aval
            for i, aval in enumerate(self.avals)
        ]
        whole = tracing_whole_arrays() if whole_arrays else nullcontext()
        with layering(self.layers, self._assignments), whole:
            traced = self._flat(*_traced_jaxpr(self.fun, self.in_tree, scaled))
        if not in_microbatches:
            return traced
        own = with_own_blocks(with_own_rows(traced.jaxpr, traced.batch), traced.batch)
        return traced._replace(jaxpr=own)

    def _flat(self, jaxpr: Jaxpr, out_keys: list[Any], out_tree: Any) -> _Trace:
        """Return a traced step with its scans divided into layers, and flat.

        Args:
            jaxpr: the step, which may take more inputs than the arguments.
            out_keys: the key paths of its outputs.
            out_tree: the structure of its outputs.
        """
        if isinstance(self.layers, AutoLayerOption):
            weights = [i for i in range(len(self.avals)) if i not in self.batch]
            cut = cut_gradient_scans(jaxpr, self.layers, weights, self._scan_assignments)
            jaxpr = jaxpr if cut is None else cut
        unconstrained = () if self.keeps_constraints else constrained_lines(jaxpr)
        jaxpr = flatten(
            jaxpr, keeps_remat=self.keeps_remat, keeps_constraints=self.keeps_constraints
        )
        jaxpr = without_sorted_rows(jaxpr)
        arguments = jaxpr.invars[: len(self.avals)]
        in_pieces = [var for i, var in enumerate(arguments) if i not in self.batch]
        seeds = stack_seeds(jaxpr)
        cut = cut_stacks(jaxpr, seeds, in_pieces=in_pieces, out_pieces=jaxpr.outvars)
        inputs = cut.inputs[: len(self.avals)]
        arguments = CutTree(self.in_tree, tuple(map(_text, self.in_keys)), inputs)
        batch = arguments.numbers_of_pieces(self.batch)
        return _Trace(
            cut.jaxpr,
            arguments,
            CutTree(out_tree, tuple(map(_text, out_keys)), cut.outputs),
            _piece_keys(self.in_keys, inputs),
            _piece_keys(out_keys, cut.outputs),
            batch,
            unconstrained,
        )

    def _scaled_down(
        self, scale: Fraction, size: Fraction, larger: Fraction, *options: bool
    ) -> _Trace | None:
        """Return the step for a batch, from its traces for two larger ones; see `_trace`.

        None if they do not say what it is, or if the step can't be traced for these sizes.
        """
        try:
            base, other = self._traced(size, *options), self._traced(larger, *options)
        except Exception:
            return None  # if it is an error for any size, the trace for this one raises it
        if base[1:] != other[1:]:
            return None
        try:
            jaxpr = rescaled(base.jaxpr, other.jaxpr, larger / size, scale / size)
        except NotAffineError:
            return None
        return base._replace(jaxpr=jaxpr)

    def _trace_of_part(self, scale: Fraction, whole_arrays: bool) -> _Trace:
        """Return the step for a part of the batch in microbatches; see `_trace`.

        Raises:
            MicrobatchError: The step can be traced for the whole batch, but not for this part.
        """
        try:
            return self._traced(scale, True, whole_arrays)
        except Exception as error:
            # Raises an error that has nothing to do with the size of microbatches.
            self._traced(Fraction(1), True, False)
            rows = self.avals[min(self.batch)].shape[0]
            raise MicrobatchError(
                f"{self.name} can be traced for the whole batch of {rows} examples, but not for a"
                f" microbatch of {rows * scale}: {error_line(error)} raises"
                f" {type(error).__name__}: {str(error).partition('\n')[0]}\n"
                "Take the size of the batch from the shape of its arrays (x.shape[0], or -1 in a"
                f" reshape) instead of a number{self._other_batches(rows)}, or use"
                " num_micro_batches=1."
            ) from error

    def _other_batches(self, rows: int) -> str:
        """Return a hint at arguments that may be batches, for an error; "" without any.

        Args:
            rows: the number of examples.
        """
        numbers = [_text(key[:1]) for key in self.in_keys]
        examples = {numbers[i] for i in self.batch}
        others = dict.fromkeys(
            number
            for number, aval in zip(numbers, self.avals, strict=True)
            if number not in examples and aval.shape[:1] == (rows,)
        )
        if not others:
            return ""
        return (
            f", or name all arguments with examples in batch_argnums: {', '.join(others)} has"
            f" arrays of {rows} rows, too"
        )

    def _graph(self, count: int) -> StepGraph:
        """Return the step in `count` microbatches."""
        if count > 1 and not self.batch:
            raise MicrobatchError(
                f"{count} microbatches were asked for, but no argument of {self.name} is a batch;"
                " pass the examples after the model, or name their argument in batch_argnums"
            )
        for i in self.batch:
            _check_divisible(self.avals[i], count, _text(self.in_keys[i]))
        traced, step = self._in_parts(count)
        out_paths = traced.result.piece_paths
        jaxpr = step.jaxpr
        paths = [*traced.arguments.piece_paths, *step.prepared_paths]
        has_positions = len(jaxpr.invars) > len(paths)
        positions = len(paths) if has_positions else None
        return StepGraph(
            jaxpr=jaxpr,
            in_paths=(*paths, *([POSITIONS] if has_positions else [])),
            out_paths=out_paths,
            batch=traced.batch | step.rows | ({len(paths)} if has_positions else set()),
            carried=_carried(jaxpr, traced.in_keys, traced.out_keys, traced.batch),
            positions=positions,
            preparation=step.preparation,
            first_pass=step.first_pass,
            unconstrained=traced.unconstrained,
            in_tree=traced.arguments.piece_tree,
            out_tree=traced.result.piece_tree,
            arguments=traced.arguments,
            result=traced.result,
            name=self.name,
            microbatching=step.microbatching,
            retrace=self.graph,
        )

    def _in_parts(self, count: int) -> tuple[_Trace, SplitStep]:
        """Return the trace of one microbatch in layers, and the step as it runs in `count`."""
        try:
            if count > 1:
                traced = self._trace_of_part(Fraction(1, count), False)
            else:
                traced = self._traced(Fraction(1), self.marked, False)
            if self.marked and has_gradient_in_loop(traced.jaxpr):
                own = self._in_chunks(count)
                if own is not None:
                    return own
            whole = self._in_microbatches(traced, count)
        except (MicrobatchError, NoLayersError) as error:
            refused = error
        else:
            if count == 1 or _takes_gradient(whole[1]):
                return whole
            own = self._in_chunks(count)
            unlike = self._unlike_chunks(count) if self.marked and own is None else None
            if unlike is not None:
                raise unlike
            return own or whole
        own = self._in_chunks(count)
        if own is not None:
            return own
        unlike = self._unlike_chunks(count)
        raise MicrobatchError(f"{refused}. As it is, {unlike}") if unlike else refused

    def _in_microbatches(self, traced: _Trace, count: int) -> tuple[_Trace, SplitStep]:
        """Return the step in layers, and as it runs in microbatches; `traced` is one of them."""
        try:
            traced = self._in_layers(traced)
        except NoLayersError as error:
            raise NoLayersError(f"{error}{self._why_not_split(traced, count)}") from None
        if self.marked or count > 1:
            return traced, self._split(traced, count)
        return traced, SplitStep(traced.jaxpr, None)

    def _in_chunks(self, count: int) -> tuple[_Trace, SplitStep] | None:
        """Return the step with the chunks whose gradients it accumulates as microbatches.

        Args:
            count: the number of microbatches that were asked for.

        Returns:
            The trace of one microbatch in layers, and as it runs; None if the step does not
            accumulate gradients of chunks.

        Raises:
            MicrobatchError: The chunks are no microbatches, or not as many as were asked for.
        """
        if self.forward:
            return None
        chunks, *outputs = self._chunked()
        if not isinstance(chunks, ChunkStep):
            return None
        if chunks.length != count:
            raise OwnMicrobatchesError(self.name, chunks.line, chunks.length, count)
        traced = self._in_layers(self._flat(chunks.jaxpr, *outputs))
        return traced, chunks.in_microbatches(traced.jaxpr, traced.arguments)

    def _unlike_chunks(self, count: int) -> UnlikeChunksError | None:
        """Return why `count` gradients that the step adds are not those of chunks, if it is so."""
        unlike = None if self.forward else self._chunked()[0]
        if not isinstance(unlike, UnlikeChunksError) or unlike.count != count:
            return None
        return unlike

    def num_chunks(self) -> int | None:
        """Return the number of chunks whose gradients the step accumulates; None if it does not."""
        try:
            chunks, *_ = self._chunked()
        except MicrobatchError:
            return None
        return chunks.length if isinstance(chunks, ChunkStep) else None

    def _chunk_step(self) -> tuple[ChunkStep | UnlikeChunksError | None, list[Any], Any]:
        """Return one iteration of the step's own loop, with the key paths and tree of its outputs.

        It is the same for any number of microbatches that is asked for. Instead of the iteration,
        return why gradients that the step adds are not those of chunks.
        """
        with layering(self.layers, self._assignments):
            jaxpr, out_keys, out_tree = _traced_jaxpr(self.fun, self.in_tree, self.avals)
        whole = flatten(jaxpr, loops=False, keeps_remat=self.keeps_remat)
        try:
            chunks = chunk_step(whole, self.batch)
        except UnlikeChunksError as error:
            chunks = error
        return chunks, out_keys, out_tree

    def _in_layers(self, traced: _Trace) -> _Trace:
        """Return a step whose gradients JAX took, divided into layers; others as they are."""
        jaxpr = traced.jaxpr
        if not isinstance(self.layers, AutoLayerOption) or (
            num_layers(jaxpr) and not self._scan_assignments
        ):
            return traced
        return traced._replace(jaxpr=gradient_layers(jaxpr, self.layers))

    def _split(self, traced: _Trace, count: int) -> SplitStep:
        """Return the step as it runs in microbatches; `traced` is the step for one of them.

        Values of a microbatch with a single example, or a single run of examples, may have dims of
        size one that hide how they scale with the batch. The split then follows the step for a
        batch twice as large.
        """
        if any(self.avals[i].shape[0] == count for i in self.batch):
            return self._split_like(2, traced, count)
        try:
            return self._split_like(1, traced, count)
        except MicrobatchError as refused:
            try:
                return self._split_like(2, traced, count)
            except (MicrobatchError, TypeError, ValueError) as other:
                # Dims of size one may hide the reason from the smaller trace.
                kinds = [isinstance(e, DifferentStepsError) for e in (refused, other)]
                is_told = isinstance(other, MicrobatchError) and kinds == [True, False]
                reason = other if is_told else refused
                raise MicrobatchError(f"{reason}{self._unlike_rows()}") from None

    def _why_not_split(self, traced: _Trace, count: int) -> str:
        """Return why a step does not run in microbatches, for an error; "" if it does."""
        try:
            if count > 1:
                self._split(traced, count)
        except MicrobatchError as refused:
            return f".\nNor does the step run in {count} microbatches: {refused}"
        return ""

    def _unlike_rows(self) -> str:
        """Return what to do if inputs have different numbers of rows, such as those of graphs."""
        paths: dict[int, str] = {}
        for i in sorted(self.batch):
            paths.setdefault(self.avals[i].shape[0], _text(self.in_keys[i]))
        if len(paths) == 1:
            return ""
        sizes = ", ".join(f"{path} has {rows} rows" for rows, path in paths.items())
        return (
            f"\nInputs of the batch differ in their rows: {sizes}. If rows of one refer to those of"
            " another, as the edges of graphs to nodes, stack examples of equal size, such as"
            " padded graphs, and apply the model to each by jax.vmap."
        )

    def _split_like(self, scale: int, traced: _Trace, count: int) -> SplitStep:
        """Return the step, split like the step for a batch that is larger by `scale`.

        What the step computes from the whole batch alone is computed before its microbatches, if
        these can't be right otherwise.
        """
        micro = traced.jaxpr
        on_shards = any(eqn.primitive.name == SHARD_MAP for eqn in micro.eqns)
        if count == 1:
            return SplitStep(*split_once(micro, traced.batch, self.forward))
        whole = self._traced(Fraction(1), True, False).jaxpr
        part = self._traced(Fraction(1, count), True, on_shards).jaxpr
        small = self._trace_of_part(Fraction(scale, count), on_shards).jaxpr
        large = self._traced(Fraction(scale), True, on_shards).jaxpr
        part_of = self._traced(Fraction(1), True, on_shards).jaxpr
        unlabelled, in_layers = self._trace_of_part(Fraction(1, count), False).jaxpr, None
        if isinstance(self.layers, AutoLayerOption) and unlabelled is not micro:
            in_layers = DividedTrace(unlabelled, partial(gradient_layers, option=self.layers))
        splitter = MicrobatchTraces(
            traces=(micro, whole, part, part_of, small, large),
            paths=traced.arguments.piece_paths,
            batch=traced.batch,
            count=count,
            exactness=self.exactness,
            stages=self.marked,
            gradient_free=self.forward or not self.marked,
            name=self.name,
            retrace=self.graph,
            in_layers=in_layers,
        )
        return splitter.split()


def _traced_jaxpr(
    fun: Callable[..., Any], in_tree: Any, avals: list[Any]
) -> tuple[Jaxpr, list[Any], Any]:
    """Return the jaxpr of `fun`, the key paths of its outputs, and their tree."""
    try:
        # JAX caches traces by function. A new function keeps traces with other layers apart.
        with assume_cudnn():
            jaxpr, result = jax.make_jaxpr(lambda *args: fun(*args), return_shape=True)(
                *jax.tree.unflatten(in_tree, avals)
            )
    except jax.errors.JAXTypeError as error:
        raise TraceError(
            f"{_name(fun)} can't be traced: {str(error).splitlines()[0]}\n"
            "It depends on the value of an argument; use jnp.where or jax.lax.cond on arrays, or"
            " make the argument static with static_argnums."
        ) from error
    except TypeError as error:
        if "not a valid JAX type" not in str(error):
            raise
        raise TraceError(
            f"{_name(fun)} can't be traced: {str(error).splitlines()[0]}\n"
            "Compute with and return only arrays and numbers, in dicts, tuples, lists or other"
            " pytrees."
        ) from error
    outputs, out_tree = jax.tree.flatten_with_path(result)
    return jaxpr, [path for path, _ in outputs], out_tree


def _piece_keys(
    keys: Sequence[tuple[Any, ...]], cuts: Sequence[Cut | None]
) -> list[tuple[Any, ...]]:
    """Return the key path of each piece: that of the user's array and the number of the piece."""
    paths: list[tuple[Any, ...]] = []
    for key, cut in zip(keys, cuts, strict=True):
        if cut is None:
            paths.append(key)
        else:
            paths += [(*key, jax.tree_util.SequenceKey(k)) for k in range(len(cut.sizes))]
    return paths


def _check_divisible(aval: jax.ShapeDtypeStruct, count: int, path: str) -> None:
    if aval.shape[0] % count:
        raise MicrobatchError(
            f"batch input {path} has shape {aval.shape}: its first dim can't be cut into {count}"
            " microbatches; pad the batch, choose a divisor as num_micro_batches, or map the"
            " argument to the dim of its examples, as in batch_argnums={1: 1}"
        )


def _with_rows(aval: jax.ShapeDtypeStruct, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *aval.shape[1:]), aval.dtype, weak_type=aval.weak_type)


def named_inputs(
    args: Sequence[Any], batch_argnums: Collection[int]
) -> list[tuple[str, jax.ShapeDtypeStruct, bool]]:
    """Return the path and aval of each array of `args`, and whether its first dim is the batch."""
    leaves, _ = jax.tree.flatten_with_path(tuple(args))
    avals = [(path, abstract(leaf)) for path, leaf in leaves]
    return [
        (_text(path), aval, path[0].idx in batch_argnums and bool(aval.shape))
        for path, aval in avals
    ]


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and weak type of an array, number or ShapeDtypeStruct."""
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct | ArrayHandle) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", "the step")


def _text(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _carried(
    jaxpr: Jaxpr, in_paths: list, out_paths: list, batch: frozenset[int]
) -> dict[int, int]:
    """Return the input for each output that is the input's next value.

    Such an output has the path, shape and dtype of the input, as when `params` of argument 0 is
    returned as `params` of result 0. Paths are compared without the position of the argument or, in
    a tuple, of the result. If a path is only a position, only the first argument and the first
    result match.
    """
    by_name: dict[tuple[str, Any, Any], int] = {}
    arguments = jaxpr.invars[: len(in_paths)]
    for i, (path, var) in enumerate(zip(in_paths, arguments, strict=True)):
        if i not in batch and (path[1:] or path[0].idx == 0):
            by_name.setdefault((_text(path[1:]), aval_of(var).shape, aval_of(var).dtype), i)
    carried: dict[int, int] = {}
    for o, (path, atom) in enumerate(zip(out_paths, jaxpr.outvars, strict=True)):
        if isinstance(atom, Literal):
            continue
        names = [_text(path)]
        if path and (path[1:] or _text(path) == "0"):
            names.append(_text(path[1:]))
        for name in names:
            match = by_name.get((name, aval_of(atom).shape, aval_of(atom).dtype))
            if match is not None and match not in carried.values():
                carried[o] = match
                break
    return carried
