"""Layers: the runs of equations of a loss function that make up pipeline stages.

A layer is a named scope. JAX records the scopes around an equation in its name stack, and in the
name stacks of the equations that differentiation derives from it. So `layer_of` can tell the layer
of every equation of a traced step, forward or backward, and layers do not change what a function
computes.
"""

import re
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var
from jax.extend.core import Literal as JaxLiteral
from jax.extend.core.primitives import jit_p, remat_p
from jax.extend.source_info_util import user_context

from autopar.checks import FLAG, NONE, check, integer, items, one_of, real, satisfying
from autopar.ir.control_flow import repeats
from autopar.ir.evaluate import bind
from autopar.ir.flatten import flatten
from autopar.ir.graph import (
    Atom,
    eqns_of_call,
    is_outer_backward,
    read,
    scopes,
    source_line,
    variables,
)
from autopar.layering.equal_bodies import with_shared_bodies
from autopar.layering.layer_clustering import (
    NoLayersError,
    after_heavy,
    cluster_layers,
    received_bytes,
)
from autopar.layering.scan_layers import Iterations, recomputed_scans, seeds_of, uncut_loops
from autopar.layering.stack_cutting import cut_stacks
from autopar.primitives import is_product, kernel_of

boundary_p = Primitive("pipeline_boundary")
boundary_p.multiple_results = True
boundary_p.def_impl(lambda: [])
boundary_p.def_abstract_eval(lambda: [])

_SCOPE = "pipeline_layer_"
_LAYER = re.compile(rf"{_SCOPE}(\d+)")


class LayerError(ValueError):
    """A function can't be divided into layers as the option says."""


def mark_pipeline_boundary() -> None:
    """End a layer and start the next one.

    For functions under `manual_layer_construction` or a `ManualLayerOption`.
    """
    boundary_p.bind()


@dataclass(frozen=True, slots=True)
class ManualLayerOption:
    """Layers that end where the loss function calls `mark_pipeline_boundary`.

    Attributes:
        remat_layer: Whether the backward pass recomputes each layer. With "auto", PipeshardParallel
            takes what it predicts to be faster.
    """

    remat_layer: bool | Literal["auto"] = False

    def __post_init__(self) -> None:
        check(self, LayerError, remat_layer=FLAG | one_of("auto"))

    def assign(self, jaxpr: Jaxpr) -> list[int]:
        """Return the layer of each equation."""
        layers = []
        layer = 0
        for eqn in jaxpr.eqns:
            layers.append(layer)
            layer += eqn.primitive is boundary_p
        return layers


@dataclass(frozen=True, slots=True)
class AutoLayerOption:
    """Layers of similar work with as little data between them as possible (Alpa, OSDI'22, eq. 6).

    Attributes:
        layer_num: The number of layers. If it is larger than the number of matrix products and
            convolutions, some layers have none.
        remat_layer: Whether the backward pass recomputes each layer. With "auto", PipeshardParallel
            takes what it predicts to be faster.
        eps: The work of a layer is at most 1 + eps times the average. By default 0.6, or the
            smallest number that leaves layers if work is too uneven for it.
        cost_criteria: The measure of work: "flops", or the "count" of matrix products and
            convolutions.
    """

    layer_num: int
    remat_layer: bool | Literal["auto"] = False
    eps: float | None = None
    cost_criteria: Literal["flops", "count"] = "flops"

    def __post_init__(self) -> None:
        check(
            self,
            LayerError,
            layer_num=integer(),
            remat_layer=FLAG | one_of("auto"),
            eps=NONE | real(),
            cost_criteria=one_of("flops", "count"),
        )

    def assign(self, iterations: Iterations) -> list[int]:
        """Return the layer of each equation, and of each iteration of a scan over layers.

        Raises:
            NoLayersError: There are too few heavy equations, or their work is too uneven.
        """
        jaxpr = iterations.jaxpr
        debug_info = jaxpr.debug_info.with_unknown_names()
        flops = np.array(iterations.spread([_flops(eqn, debug_info) for eqn in jaxpr.eqns]))
        work = flops if self.cost_criteria == "flops" else (flops > 0).astype(float)
        values = iterations.values()
        received = received_bytes(iterations.total, values)
        light = after_heavy(flops > 0, values)
        numbers = np.repeat(np.arange(len(jaxpr.eqns)), iterations.counts)
        try:
            layers = cluster_layers(
                work,
                received,
                self.layer_num,
                self.eps,
                light=light,
                line_of=lambda position: source_line(jaxpr.eqns[numbers[position]]),
            )
        except NoLayersError as error:
            raise NoLayersError(f"{error}{uncut_loops(jaxpr, iterations.scans)}") from None
        return np.searchsorted(layers.stops, np.arange(iterations.total), side="right").tolist()


@dataclass(frozen=True, slots=True)
class FollowLayerOption:
    """Layers of a step without gradients that follow the layers of its parameters.

    An equation belongs to the last layer of the parameters that it depends on.

    Attributes:
        inputs: The layer of each array among the arguments; None for arrays without one, which the
            first layer that needs them reads.
        num_layers: The number of layers; some may be empty.
        remat_layer: Always False, because there is no backward pass.
    """

    inputs: tuple[int | None, ...]
    num_layers: int
    remat_layer: Literal[False] = False

    def __post_init__(self) -> None:
        layers = items(integer(0) | NONE, "a sequence of layers, or None, for each input")
        check(
            self,
            LayerError,
            inputs=layers,
            num_layers=integer(),
            remat_layer=satisfying("False", lambda value: value is False),
        )

    @property
    def layer_of_input(self) -> dict[int, int]:
        """The layer of each input that has one."""
        return {i: layer for i, layer in enumerate(self.inputs) if layer is not None}

    def assign(self, jaxpr: Jaxpr) -> list[int]:
        """Return the layer of each equation.

        Raises:
            LayerError: The step has another number of inputs.
        """
        if len(jaxpr.invars) != len(self.inputs):
            raise LayerError(
                f"{len(self.inputs)} layers of inputs for a step with {len(jaxpr.invars)} of them;"
                " one each"
            )
        layer_of_var = {
            var: layer
            for var, layer in zip(jaxpr.invars, self.inputs, strict=True)
            if layer is not None
        }
        layers: list[int | None] = []
        for eqn in jaxpr.eqns:
            operands = variables(eqn.invars)
            operand_layers = [layer_of_var[var] for var in operands if var in layer_of_var]
            layers.append(max(operand_layers, default=None))
            if operand_layers:
                layer_of_var.update(dict.fromkeys(eqn.outvars, max(operand_layers)))
        # Equations that depend on no parameter run in the first layer that uses their results.
        first_use: dict[Var, int] = {}
        for k, eqn in reversed(list(enumerate(jaxpr.eqns))):
            layer = layers[k]
            if layer is None:
                uses = (first_use[var] for var in eqn.outvars if var in first_use)
                layer = min(uses, default=0)
                layers[k] = layer
            for atom in eqn.invars:
                if isinstance(atom, Var):
                    first_use[atom] = min(layer, first_use.get(atom, layer))
        return [layer or 0 for layer in layers]


LayerOption = AutoLayerOption | ManualLayerOption | FollowLayerOption

type Assignments = dict[Hashable, list[int]]
"""The layers of functions that have been divided, by their equations."""

_option: ContextVar[LayerOption | None] = ContextVar("layer_option", default=None)
_assignments: ContextVar[Assignments | None] = ContextVar("assignments", default=None)


@contextmanager
def layering(option: LayerOption | None, assignments: Assignments) -> Iterator[None]:
    """Make `autopar.grad` and `value_and_grad` divide functions into layers inside the block.

    Args:
        option: How to divide them; None if they are not divided.
        assignments: The layers of functions divided so far. A function that is traced again, for
            another batch size, is divided in the same way.
    """
    tokens = _option.set(option), _assignments.set(assignments)
    try:
        yield
    finally:
        _option.reset(tokens[0])
        _assignments.reset(tokens[1])


def layered_by_context(
    fun: Callable[..., Any], weight_argnums: int | Sequence[int] | None = None
) -> Callable[..., Any]:
    """Return `fun` divided into layers inside a `layering` block, unless it already is.

    Args:
        fun: The function.
        weight_argnums: As for `layered`.
    """
    option = _option.get()
    if option is None or hasattr(fun, "layer_option"):
        return fun
    return layered(fun, option, weight_argnums)


def layered(
    fun: Callable[..., Any],
    option: LayerOption,
    weight_argnums: int | Sequence[int] | None = None,
    differentiated: bool = True,
) -> Callable[..., Any]:
    """Return `fun` divided into layers.

    Inside a `layering` block, a function that runs layers in a `scan` inside of `jax.checkpoint` is
    returned as it is: its differentiated step is divided (`autopar.layering.gradient_scans`).

    Args:
        fun: The function.
        option: How to divide it.
        weight_argnums: The arguments with weights, whose slices distinguish a scan over layers from
            a scan over time. By default all arguments may have weights.
        differentiated: Whether gradients are taken of `fun`. If not, `jax.checkpoint` does nothing.

    Raises:
        LayerError: `option` has remat_layer="auto". When called: `fun` can't be divided.
    """
    if option.remat_layer == "auto":
        raise LayerError(
            "remat_layer='auto' is for the layer_option of PipeshardParallel, which tries both"
        )
    remat = option.remat_layer
    is_step_divided = _option.get() is option

    @wraps(fun)
    def in_layers(*args: Any, **kwargs: Any) -> Any:
        paths, tree = jax.tree.flatten_with_path((args, kwargs))
        leaves = [leaf for _, leaf in paths]
        # Functions, numbers and arrays keep their values, as under `jax.grad`.
        traced_leaves = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer)}

        def of_tracers(*values: Any) -> Any:
            new_leaves = list(leaves)
            for i, value in zip(traced_leaves, values, strict=True):
                new_leaves[i] = value
            args, kwargs = jax.tree.unflatten(tree, new_leaves)
            return fun(*args, **kwargs)

        tracers = list(traced_leaves.values())
        traced, shapes = jax.make_jaxpr(of_tracers, return_shape=True)(*tracers)
        inlined = _inline_calls(traced, {jit_p} if differentiated else {jit_p, remat_p})
        numbers = [i for i, leaf in enumerate(leaves) if i in traced_leaves]
        weights = [
            var
            for i, var in zip(numbers, inlined.invars, strict=True)
            if _is_weight(paths[i][0], weight_argnums, len(args))
        ]
        recomputed = recomputed_scans(inlined, weights) if is_step_divided else []
        if recomputed and remat:
            raise LayerError(
                "remat_layer=True asks to recompute layers, but jax.checkpoint recomputes the scan"
                f" at {source_line(recomputed[0])} already; use one of the two"
            )
        if recomputed:
            return fun(*args, **kwargs)
        jaxpr, layers = _divided(inlined, option, weights)
        if is_step_divided:
            jaxpr = jaxpr.replace(eqns=with_shared_bodies(jaxpr.eqns))
        env: dict[Var, Any] = dict(zip(jaxpr.invars, tracers, strict=True))
        env.update(zip(jaxpr.constvars, jaxpr.consts, strict=True))
        for layer, (eqns, results) in _layers(jaxpr, layers).items():
            with jax.named_scope(f"{_SCOPE}{layer}") if layer >= 0 else nullcontext():
                _run(eqns, results, env, remat and layer >= 0)
        return jax.tree.unflatten(
            jax.tree.structure(shapes), [read(atom, env) for atom in jaxpr.outvars]
        )

    in_layers.layer_option = option  # pyright: ignore[reportAttributeAccessIssue]
    return in_layers


def manual_layer_construction(
    fun: Callable[..., Any] | None = None, *, remat_layer: bool = False
) -> Any:
    """Divide a loss function into layers at its calls of `mark_pipeline_boundary`.

    A decorator, with or without arguments.

    Args:
        fun: The loss function.
        remat_layer: Whether the backward pass recomputes each layer.
    """
    option = ManualLayerOption(remat_layer)
    return layered(fun, option) if fun is not None else lambda fun: layered(fun, option)


def automatic_layer_construction(
    fun: Callable[..., Any] | None = None,
    *,
    layer_num: int,
    remat_layer: bool = False,
    eps: float = 0.6,
    cost_criteria: Literal["flops", "count"] = "flops",
) -> Any:
    """Divide a loss function into layers by clustering; a decorator.

    Args:
        fun: The loss function.
        layer_num: As for `AutoLayerOption`.
        remat_layer: Whether the backward pass recomputes each layer.
        eps: As for `AutoLayerOption`.
        cost_criteria: As for `AutoLayerOption`.
    """
    option = AutoLayerOption(layer_num, remat_layer, eps, cost_criteria)
    return layered(fun, option) if fun is not None else lambda fun: layered(fun, option)


def manual_remat(fun: Callable[..., Any] | None = None) -> Any:
    """Recompute the layers of `manual_layer_construction` in the backward pass; a decorator."""
    return manual_layer_construction(fun, remat_layer=True)


def automatic_remat(
    fun: Callable[..., Any] | None = None, *, layer_num: int, eps: float = 0.6
) -> Any:
    """Recompute the layers of `automatic_layer_construction` in the backward pass; a decorator."""
    return automatic_layer_construction(fun, layer_num=layer_num, eps=eps, remat_layer=True)


def layer_of(eqn: JaxprEqn) -> tuple[int, bool] | None:
    """Return the layer of an equation, if any, and whether it is in the backward pass."""
    match = _LAYER.search(scopes(eqn))
    return (int(match[1]), is_outer_backward(eqn)) if match else None


def in_layer(eqn: JaxprEqn, layer: int) -> JaxprEqn:
    """Return an equation without a layer as one of that layer."""
    scopes = eqn.source_info.name_stack.extend(f"{_SCOPE}{layer}")
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=scopes))


def _inline_calls(jaxpr: Jaxpr, calls: Collection[Primitive]) -> Jaxpr:
    """Return `jaxpr` with calls of some kinds inlined, of those with a parameter `jaxpr`.

    Functions with derivative rules stay calls.
    """
    eqns: list[JaxprEqn] = []
    constants: dict[Var, Any] = {}

    def inline(jaxpr: Jaxpr, args: Sequence[Atom], caller: Any = None) -> list[Atom]:
        env: dict[Var, Atom] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, jaxpr.consts, strict=True):
            env[var] = new = Var(var.aval)
            constants[new] = value
        for eqn in eqns_of_call(jaxpr, caller):
            invars = [atom if isinstance(atom, JaxLiteral) else env[atom] for atom in eqn.invars]
            if eqn.primitive in calls:
                outvars = inline(eqn.params["jaxpr"], invars, eqn.source_info.traceback)
            else:
                if eqn.primitive is not boundary_p and _has_boundary(eqn):
                    raise LayerError(
                        f"mark_pipeline_boundary inside {eqn.primitive.name} (a loop, a branch or"
                        " jax.checkpoint): layers are cut from the function itself; mark the"
                        " boundary outside of it"
                    )
                outvars = [Var(var.aval) for var in eqn.outvars]
                eqns.append(eqn.replace(invars=invars, outvars=list(outvars)))
            env.update(zip(eqn.outvars, outvars, strict=True))
        return [atom if isinstance(atom, JaxLiteral) else env[atom] for atom in jaxpr.outvars]

    invars = [Var(var.aval) for var in jaxpr.invars]
    outvars = inline(jaxpr, invars)
    return Jaxpr(
        list(constants),
        invars,
        outvars,
        eqns,
        consts=list(constants.values()),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def _has_boundary(eqn: JaxprEqn) -> bool:
    """Return whether a jaxpr among the parameters of `eqn` has a pipeline boundary."""
    for param in eqn.params.values():
        for jaxpr in param if isinstance(param, tuple | list) else (param,):
            if isinstance(jaxpr, Jaxpr) and any(
                inner.primitive is boundary_p or _has_boundary(inner) for inner in jaxpr.eqns
            ):
                return True
    return False


def _divided(jaxpr: Jaxpr, option: LayerOption, weights: Sequence[Var]) -> tuple[Jaxpr, list[int]]:
    """Return a function whose scans over layers are cut between layers, and its equations' layers.

    Equations of layer -1 run before all layers; they cut arrays into the pieces of layers.
    """
    if not isinstance(option, AutoLayerOption):
        return jaxpr, option.assign(jaxpr)
    iterations = Iterations(jaxpr, weights)
    assignments = _assignments.get()
    assigned = assigned_layers(iterations, option, {} if assignments is None else assignments)
    layers, scans = iterations.cuts(assigned)
    if not scans:
        return jaxpr, layers
    cut = cut_stacks(jaxpr, seeds_of(jaxpr, scans), layers=layers, scans=scans)
    return cut.jaxpr, cut.layers


def assigned_layers(
    iterations: Iterations, option: AutoLayerOption, assignments: Assignments
) -> list[int]:
    """Return the layer of each equation and iteration, which is the same for all batch sizes.

    Args:
        iterations: The equations and iterations of a function.
        option: How to divide it.
        assignments: The layers of the functions divided so far, to which this one is added.
    """
    eqns = iterations.jaxpr.eqns
    key = option, tuple(iterations.counts), tuple(eqn.primitive for eqn in eqns)
    if key not in assignments:
        assignments[key] = option.assign(iterations)
    return assignments[key]


def _is_weight(
    path: Sequence[Any], weight_argnums: int | Sequence[int] | None, num_args: int
) -> bool:
    """Whether a leaf of (args, kwargs) belongs to one of the arguments with weights."""
    if weight_argnums is None:
        return True
    argnums = (weight_argnums,) if isinstance(weight_argnums, int) else weight_argnums
    return path[0].idx == 0 and path[1].idx in [i % num_args for i in argnums]


def _layers(jaxpr: Jaxpr, layers: Sequence[int]) -> dict[int, tuple[list[JaxprEqn], list[Var]]]:
    """Map each layer, in order, to its equations and to their results that later layers use.

    Args:
        jaxpr: The function.
        layers: The layer of each equation.
    """
    last = max(layers, default=-1)
    last_use: dict[Atom, int] = {}
    for eqn, layer in zip(jaxpr.eqns, layers, strict=True):
        for var in variables(eqn.invars):
            last_use[var] = max(layer, last_use.get(var, -1))
    last_use.update(dict.fromkeys(variables(jaxpr.outvars), last + 1))
    eqns_by_layer: dict[int, list[JaxprEqn]] = {layer: [] for layer in range(-1, last + 1)}
    for eqn, layer in zip(jaxpr.eqns, layers, strict=True):
        if eqn.primitive is not boundary_p:
            eqns_by_layer[layer].append(eqn)
    return {
        layer: (
            eqns,
            [var for eqn in eqns for var in eqn.outvars if last_use.get(var, -2) > layer],
        )
        for layer, eqns in eqns_by_layer.items()
    }


def _run(
    eqns: Sequence[JaxprEqn], results: Sequence[Var], env: dict[Var, Any], remat: bool
) -> None:
    """Evaluate the equations of a layer and add its results to `env`."""
    defined = {var for eqn in eqns for var in eqn.outvars}
    operands = variables(atom for eqn in eqns for atom in eqn.invars)
    inputs = [var for var in dict.fromkeys(operands) if var not in defined]

    def layer(*values: Any) -> list[Any]:
        inner: dict[Var, Any] = dict(zip(inputs, values, strict=True))
        for eqn in eqns:
            scope = str(eqn.source_info.name_stack)
            with (
                user_context(eqn.source_info.traceback),
                eqn.ctx.manager,
                jax.named_scope(scope) if scope else nullcontext(),
            ):
                operands = [read(atom, inner) for atom in eqn.invars]
                outputs = bind(eqn, operands)
            inner.update(zip(eqn.outvars, outputs, strict=True))
        return [inner[var] for var in results]

    values = (jax.checkpoint(layer) if remat else layer)(*(env[var] for var in inputs))
    env.update(zip(results, values, strict=True))


def _flops(eqn: JaxprEqn, debug_info: Any) -> float:
    """Return the FLOP of all matrix products and convolutions in an equation and its calls."""
    invars = list(dict.fromkeys(variables(eqn.invars)))
    flat = flatten(Jaxpr([], invars, eqn.outvars, [eqn], debug_info=debug_info))
    counted = zip(flat.eqns, repeats(flat.eqns), strict=True)
    return sum(times * kernel_of(inner).flops for inner, times in counted if is_product(inner))


def num_layers(jaxpr: Jaxpr) -> int:
    """Return the number of layers that a traced step has; 0 if it has none."""
    layers = (layer_of(eqn) for eqn in jaxpr.eqns)
    return max((layer[0] for layer in layers if layer is not None), default=-1) + 1


def has_light_layers(jaxpr: Jaxpr) -> bool:
    """Return whether a layer of a traced step has no matrix product or convolution."""
    heavy = {
        layer[0] for eqn in jaxpr.eqns if (layer := layer_of(eqn)) is not None if is_product(eqn)
    }
    return len(heavy) < num_layers(jaxpr)
