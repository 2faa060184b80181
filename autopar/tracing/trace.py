"""From a Python training step to a `StepGraph`: one flat jaxpr and what its inputs and outputs are to the user."""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from fractions import Fraction
from functools import cache
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal

from autopar._cpython import builds_graphs
from autopar.ir.array_handle import ArrayHandle
from autopar.ir.flatten import flatten
from autopar.ir.graph import aval_of
from autopar.ir.step_graph import MicrobatchError, Microbatching, StepGraph
from autopar.layering.layers import LayerOption, layered, layering
from autopar.microbatch.gradients import marking, marking_results, telling_examples
from autopar.microbatch.splitting import check_computation, split


class TraceError(TypeError):
    """The step can't be traced to a jaxpr of arrays."""


@builds_graphs
def trace(
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch_argnums: Collection[int],
    num_micro_batches: int = 1,
    layers: LayerOption | None = None,
    marked: bool = False,
    forward: bool = False,
) -> StepGraph:
    """Trace `fun` for arguments like `args` (arrays or ShapeDtypeStructs in pytrees).

    Args:
        batch_argnums: arguments whose arrays have the batch as their first dim.
        num_micro_batches: parts that the batch will be cut into.
        layers: how functions that `autopar.grad` differentiates are cut into layers, if they are.
        marked: tell what is accumulated over microbatches even if there is only one.
        forward: `fun` takes no gradients: it is cut into layers itself, and its results are put together from microbatches.

    Raises:
        TraceError: `fun` depends on values that are known only when it runs, or returns something other than arrays.
        MicrobatchError: the batch can't be cut, or the step can't be run in microbatches with the same result.
    """
    name = _name(fun)
    if forward:
        fun, layers = (
            marking_results(
                fun if layers is None or hasattr(fun, "layer_option") else layered(fun, layers)
            ),
            None,
        )
    leaves, in_tree = jax.tree.flatten_with_path(tuple(args))
    in_keys = [path for path, _ in leaves]
    avals = [abstract(leaf) for _, leaf in leaves]
    batch = frozenset(
        i for i, key in enumerate(in_keys) if key[0].idx in batch_argnums and avals[i].ndim > 0
    )

    @cache
    def sized(scale: Fraction, marked: bool, telling: bool) -> tuple[Jaxpr, list, Any]:
        """The step for a batch that is larger by `scale`; `telling` whole arrays where it runs on shards."""
        scaled = [
            _with_rows(a, int(a.shape[0] * scale)) if i in batch else a for i, a in enumerate(avals)
        ]
        with layering(layers), telling_examples() if telling else nullcontext():
            return _flat_jaxpr(fun, in_tree, scaled, marked)

    def for_part(count: int) -> tuple[Jaxpr, list, Any]:
        """The step for one microbatch of `count`; what fails for it alone is the fault of its size."""
        try:
            return sized(Fraction(1, count), True, False)
        except Exception as error:
            sized(Fraction(1), True, False)  # raises what has nothing to do with microbatches
            rows = avals[min(batch)].shape[0]
            raise MicrobatchError(
                f"{name} can be traced for the whole batch of {rows} examples, but not for a microbatch of {rows // count}:"
                f" {type(error).__name__}: {str(error).splitlines()[0]}\n"
                "Take the size of the batch from the shape of its arrays (x.shape[0], or -1 in a reshape) instead of a number, or use"
                " num_micro_batches=1."
            ) from error

    @cache
    def graph_for(count: int) -> StepGraph:
        microbatching, whole, part = None, Fraction(1), Fraction(1, count)
        for i in batch:
            _check_divisible(avals[i], count, _text(in_keys[i]))
        jaxpr, out_keys, out_tree = for_part(count) if count > 1 else sized(whole, marked, False)
        if marked or count > 1:
            on_shards = any(eqn.primitive.name == "shard_map" for eqn in jaxpr.eqns)
            complete = sized(whole, True, False)[0]
            paths = tuple(map(_text, out_keys))

            def split_as(scale: int) -> tuple[Jaxpr, Microbatching]:
                """The step split as that for a batch that is larger by `scale`."""
                small, large = (sized(scale * size, True, on_shards)[0] for size in (part, whole))
                found = split(jaxpr, complete, (small, large), batch, count, paths, forward, marked)
                if count > 1:
                    check_computation(sized(part, True, on_shards)[0], small, batch)
                return found

            # What a microbatch makes may have a dim of size one, an example or a run of them, that tells nothing of its kind.
            if any(avals[i].shape[0] == count for i in batch):
                jaxpr, microbatching = split_as(2)
            else:
                try:
                    jaxpr, microbatching = split_as(1)
                except MicrobatchError as refused:
                    try:
                        jaxpr, microbatching = split_as(2)
                    except (MicrobatchError, TypeError, ValueError):
                        raise refused from None
        return StepGraph(
            jaxpr=jaxpr,
            in_paths=tuple(map(_text, in_keys)),
            out_paths=tuple(map(_text, out_keys)),
            batch=batch,
            carried=_carried(jaxpr, in_keys, out_keys, batch),
            in_tree=in_tree,
            out_tree=out_tree,
            name=name,
            microbatching=microbatching,
            retrace=graph_for,
        )

    return graph_for(num_micro_batches)


def _flat_jaxpr(
    fun: Callable[..., Any], in_tree: Any, avals: list, marked: bool
) -> tuple[Jaxpr, list, Any]:
    """The flat jaxpr of `fun`, the paths of its outputs and their tree."""
    try:
        with marking() if marked else nullcontext():
            # A function of its own: JAX remembers traces by function, and must not mix marked with unmarked ones.
            jaxpr, result = jax.make_jaxpr(lambda *args: fun(*args), return_shape=True)(
                *jax.tree.unflatten(in_tree, avals)
            )
    except jax.errors.JAXTypeError as error:
        raise TraceError(
            f"{_name(fun)} can't be traced: {str(error).splitlines()[0]}\n"
            "It depends on the value of an argument; use jnp.where or jax.lax.cond on arrays, or make the argument static"
            " with static_argnums."
        ) from error
    except TypeError as error:
        if "not a valid JAX type" not in str(error):
            raise
        raise TraceError(
            f"{_name(fun)} can't be traced: {str(error).splitlines()[0]}\n"
            "Return only arrays and numbers, in dicts, tuples, lists or other pytrees."
        ) from error
    outputs, out_tree = jax.tree.flatten_with_path(result)
    return flatten(jaxpr), [path for path, _ in outputs], out_tree


def _check_divisible(aval: jax.ShapeDtypeStruct, count: int, path: str) -> None:
    if aval.shape[0] % count:
        raise MicrobatchError(
            f"batch input {path} has shape {aval.shape}: its first dim can't be cut into {count} microbatches; pad the batch or"
            " choose a divisor as num_micro_batches"
        )


def _with_rows(aval: jax.ShapeDtypeStruct, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *aval.shape[1:]), aval.dtype, weak_type=aval.weak_type)


def named_inputs(
    args: Sequence[Any], batch_argnums: Collection[int]
) -> list[tuple[str, jax.ShapeDtypeStruct, bool]]:
    """For each array of `args` what the user calls it, what it is, and whether its first dim is the batch."""
    leaves, _ = jax.tree.flatten_with_path(tuple(args))
    found = [(_text(path), abstract(leaf), path[0].idx in batch_argnums) for path, leaf in leaves]
    return [(path, aval, is_batch and bool(aval.shape)) for path, aval, is_batch in found]


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of an array, number or ShapeDtypeStruct."""
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct | ArrayHandle) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", "the step")


def _text(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _carried(
    jaxpr: Jaxpr, in_paths: list, out_paths: list, batch: frozenset[int]
) -> dict[int, int]:
    """Outputs that have the name and type of an input: `params` of argument 0, returned as `params` of result 0, goes on.

    Names are compared without the position of the argument or, in a tuple, of the result. What has no other name than its
    position goes on when it is the first of both.
    """
    by_name: dict[tuple[str, Any, Any], int] = {}
    for i, (path, var) in enumerate(zip(in_paths, jaxpr.invars, strict=True)):
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
