"""Functions that run in layers, the runs of equations of a loss that make up pipeline stages.

`layered` traces a function, gives each equation a layer, and evaluates the layers in order, each in
its named scope (`autopar.layering.layer_scopes`).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Literal

import jax
from jax.core import Tracer
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import jit_p, remat_p
from jax.extend.source_info_util import user_context

from autopar.ir.evaluate import bind
from autopar.ir.graph import (
    Atom,
    eqns_of_call,
    read,
    renamed,
    source_line,
    variables,
)
from autopar.layering.equal_bodies import with_shared_bodies
from autopar.layering.layer_options import (
    AutoLayerOption,
    LayerError,
    LayerOption,
    ManualLayerOption,
    boundary_p,
    flops_of,
)
from autopar.layering.layer_scopes import layer_scope
from autopar.layering.scan_layers import Iterations, recomputed_scans, seeds_of
from autopar.layering.stack_cutting import cut_stacks

type Checkpoint = Callable[[Callable[..., Any]], Callable[..., Any]]

type Assignments = dict[Hashable, list[int]]
"""The layers of functions that have been divided, by their equations."""

_option: ContextVar[LayerOption | None] = ContextVar("layer_option", default=None)
_assignments: ContextVar[Assignments | None] = ContextVar("assignments", default=None)


@contextmanager
def layering(option: LayerOption | None, assignments: Assignments) -> Iterator[None]:
    """Make `autopar.grad` and `value_and_grad` divide functions into layers inside the block.

    Args:
        option: how to divide them; None if they are not divided.
        assignments: the layers of functions divided so far. A function that is traced again, for
            another batch size, is divided in the same way.
    """
    tokens = _option.set(option), _assignments.set(assignments)
    try:
        yield
    finally:
        _option.reset(tokens[0])
        _assignments.reset(tokens[1])


def layered_by_context(
    fun: Callable[..., Any], weight_argnums: int | Sequence[int] | None
) -> Callable[..., Any]:
    """Return `fun` divided into layers inside a `layering` block, unless it already is.

    Args:
        fun: the function.
        weight_argnums: as for `layered`.
    """
    option = _option.get()
    if option is None or hasattr(fun, "layer_option"):
        return fun
    return layered(fun, option, weight_argnums)


@contextmanager
def _inner_gradients(option: LayerOption) -> Iterator[None]:
    """Leave the gradients that a function takes itself undivided, if it is divided automatically.

    They are a part of its layers, as in a gradient penalty.
    """
    token = _option.set(None if isinstance(option, AutoLayerOption) else _option.get())
    try:
        yield
    finally:
        _option.reset(token)


def layered(
    fun: Callable[..., Any],
    option: LayerOption,
    weight_argnums: int | Sequence[int] | None = None,
    differentiated: bool = True,
) -> Callable[..., Any]:
    """Return `fun` divided into layers.

    Inside a `layering` block, a function that runs layers in a `scan` inside of `jax.checkpoint` is
    returned as it is: its differentiated step is divided (`autopar.layering.gradient_scans`). A
    `jax.checkpoint` around everything else becomes one around each layer.

    Args:
        fun: the function.
        option: how to divide it.
        weight_argnums: the arguments with weights, whose slices distinguish a scan over layers from
            a scan over time. By default all arguments may have weights.
        differentiated: whether gradients are taken of `fun`. If not, `jax.checkpoint` does nothing.

    Raises:
        LayerError: `option` has remat_layer="auto". When called: `fun` can't be divided.
    """
    if option.remat_layer == "auto":
        raise LayerError(
            "remat_layer='auto' is for the layer_option of PipeshardParallel, which tries both;"
            " give a decorator True or False"
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
        with _inner_gradients(option):
            traced, shapes = jax.make_jaxpr(of_tracers, return_shape=True)(*tracers)
        calls = {jit_p} if differentiated else {jit_p, remat_p}
        inlined = _inline_calls(traced, lambda eqn: eqn.primitive in calls)
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
        numbers = [inlined.invars.index(var) for var in weights]
        inlined, checkpoint = _inside_checkpoint(inlined)
        checkpoint = jax.checkpoint if remat else checkpoint
        weights = [inlined.invars[number] for number in numbers]
        _check_boundaries(inlined)
        divided = _divided(inlined, option, weights)
        if is_step_divided:
            eqns = with_shared_bodies(divided.jaxpr.eqns)
            divided = replace(divided, jaxpr=divided.jaxpr.replace(eqns=eqns))
        results = _evaluated(divided, tracers, checkpoint)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    in_layers.layer_option = option  # pyright: ignore[reportAttributeAccessIssue]
    return in_layers


def manual_layer_construction(
    fun: Callable[..., Any] | None = None, *, remat_layer: bool = False
) -> Any:
    """Divide a loss function into layers at its calls of `mark_pipeline_boundary`.

    A decorator, with or without arguments.

    Args:
        fun: the loss function.
        remat_layer: whether the backward pass recomputes each layer.
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
    remat_parts: int | Literal["auto"] | None = None,
) -> Any:
    """Divide a loss function into layers by clustering; a decorator.

    Args:
        fun: the loss function.
        layer_num: as for `AutoLayerOption`.
        remat_layer: whether the backward pass recomputes each layer.
        eps: as for `AutoLayerOption`.
        cost_criteria: as for `AutoLayerOption`.
        remat_parts: as for `AutoLayerOption`.
    """
    option = AutoLayerOption(layer_num, remat_layer, eps, cost_criteria, remat_parts)
    return layered(fun, option) if fun is not None else lambda fun: layered(fun, option)


def manual_remat(fun: Callable[..., Any] | None = None) -> Any:
    """Recompute the layers of `manual_layer_construction` in the backward pass; a decorator."""
    return manual_layer_construction(fun, remat_layer=True)


def automatic_remat(
    fun: Callable[..., Any] | None = None, *, layer_num: int, eps: float = 0.6
) -> Any:
    """Recompute the layers of `automatic_layer_construction` in the backward pass; a decorator."""
    return automatic_layer_construction(fun, layer_num=layer_num, eps=eps, remat_layer=True)


def _inline_calls(jaxpr: Jaxpr, is_inlined: Callable[[JaxprEqn], bool]) -> Jaxpr:
    """Return `jaxpr` with some calls inlined, which have a parameter `jaxpr`.

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
            invars = renamed(eqn.invars, env)
            if is_inlined(eqn):
                outvars = inline(eqn.params["jaxpr"], invars, eqn.source_info.traceback)
            else:
                outvars = [Var(var.aval) for var in eqn.outvars]
                eqns.append(eqn.replace(invars=invars, outvars=list(outvars)))
            env.update(zip(eqn.outvars, outvars, strict=True))
        return renamed(jaxpr.outvars, env)

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


def _inside_checkpoint(jaxpr: Jaxpr) -> tuple[Jaxpr, Checkpoint | None]:
    """Return a function without a `jax.checkpoint` around all of its products and boundaries.

    Returns:
        The function, and the same `jax.checkpoint` for each layer; None if there was none.
    """
    if not any(eqn.primitive is remat_p for eqn in jaxpr.eqns):
        return jaxpr, None
    debug_info = jaxpr.debug_info.with_unknown_names()
    dividing = [
        eqn
        for eqn in jaxpr.eqns
        if eqn.primitive is boundary_p or _has_boundary(eqn) or flops_of(eqn, debug_info) > 0
    ]
    if len(dividing) != 1 or dividing[0].primitive is not remat_p:
        return jaxpr, None
    (outer,) = dividing
    inlined = _inline_calls(jaxpr, lambda eqn: eqn is outer or eqn.primitive is jit_p)
    options = {name: outer.params[name] for name in ("policy", "prevent_cse")}
    return _inside_checkpoint(inlined)[0], partial(jax.checkpoint, **options)


def _check_boundaries(jaxpr: Jaxpr) -> None:
    """Refuse boundaries inside of equations.

    Raises:
        LayerError: There is one.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive is not boundary_p and _has_boundary(eqn):
            raise LayerError(
                f"mark_pipeline_boundary inside {eqn.primitive.name} (a loop, a branch or"
                " jax.checkpoint): layers are cut from the function itself; mark the"
                " boundary outside of it"
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


@dataclass(frozen=True, slots=True)
class _Divided:
    """A function in layers, each of one or more parts that the backward pass may recompute.

    Attributes:
        jaxpr: the function, whose scans over layers are cut between parts.
        parts: the part of each equation; -1 for equations before all layers, which cut arrays into
            the pieces of parts.
        layer_of_part: the layer of each part.
    """

    jaxpr: Jaxpr
    parts: list[int]
    layer_of_part: Sequence[int]


def _divided(jaxpr: Jaxpr, option: LayerOption, weights: Sequence[Var]) -> _Divided:
    """Return a function in the layers and parts that an option says."""
    if not isinstance(option, AutoLayerOption):
        layers = option.assign(jaxpr)
        return _Divided(jaxpr, layers, range(max(layers, default=-1) + 1))
    iterations = Iterations(jaxpr, weights)
    known = _assignments.get()
    assignments: Assignments = {} if known is None else known
    layers = assigned_layers(iterations, option, assignments)
    parts = _assigned_parts(iterations, option, assignments, layers)
    of_part = dict(zip(parts, layers, strict=True))
    layer_of_part = [of_part.get(part, 0) for part in range(max(parts) + 1)]
    of_equation, scans = iterations.cuts(parts)
    if not scans:
        return _Divided(jaxpr, of_equation, layer_of_part)
    cut = cut_stacks(jaxpr, seeds_of(jaxpr, scans), layers=of_equation, scans=scans)
    return _Divided(cut.jaxpr, cut.layers, layer_of_part)


def assigned_layers(
    iterations: Iterations, option: AutoLayerOption, assignments: Assignments
) -> list[int]:
    """Return the layer of each equation and iteration, which is the same for all batch sizes.

    Args:
        iterations: the equations and iterations of a function.
        option: how to divide it.
        assignments: the layers of the functions divided so far, to which this one is added.
    """
    key = "layers", option, *_structure(iterations)
    if key not in assignments:
        assignments[key] = option.assign(iterations)
    return assignments[key]


def _assigned_parts(
    iterations: Iterations, option: AutoLayerOption, assignments: Assignments, layers: list[int]
) -> list[int]:
    """Return the recomputed part of each equation and iteration; see `assigned_layers`."""
    if not option.remat_layer or option.remat_parts is None:
        return layers
    key = "parts", option, *_structure(iterations)
    if key not in assignments:
        assignments[key] = option.assign_parts(iterations, layers)
    return assignments[key]


def _structure(iterations: Iterations) -> tuple[Hashable, Hashable]:
    """Return what is the same of a function for all batch sizes."""
    primitives = tuple(eqn.primitive for eqn in iterations.jaxpr.eqns)
    return tuple(iterations.counts), primitives


def _is_weight(
    path: Sequence[Any], weight_argnums: int | Sequence[int] | None, num_args: int
) -> bool:
    """Whether a leaf of (args, kwargs) belongs to one of the arguments with weights."""
    if weight_argnums is None:
        return True
    argnums = (weight_argnums,) if isinstance(weight_argnums, int) else weight_argnums
    return path[0].idx == 0 and path[1].idx in [i % num_args for i in argnums]


def _evaluated(divided: _Divided, args: Sequence[Any], checkpoint: Checkpoint | None) -> list[Any]:
    """Evaluate a function part by part, each in the scope of its layer, and return its results.

    Args:
        divided: the function.
        args: the arguments.
        checkpoint: makes the function of a part one that the backward pass recomputes; None if it
            does not.
    """
    jaxpr = divided.jaxpr
    env: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
    env.update(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    for part, (eqns, results) in _parts(jaxpr, divided.parts).items():
        if part < 0:
            _run(eqns, results, env, None)
        else:
            with layer_scope(divided.layer_of_part[part]):
                _run(eqns, results, env, checkpoint)
    return [read(atom, env) for atom in jaxpr.outvars]


def _parts(jaxpr: Jaxpr, parts: Sequence[int]) -> dict[int, tuple[list[JaxprEqn], list[Var]]]:
    """Map each part, in order, to its equations and to their results that later parts use.

    Args:
        jaxpr: the function.
        parts: the part of each equation.
    """
    last = max(parts, default=-1)
    last_use: dict[Atom, int] = {}
    for eqn, part in zip(jaxpr.eqns, parts, strict=True):
        for var in variables(eqn.invars):
            last_use[var] = max(part, last_use.get(var, -1))
    last_use.update(dict.fromkeys(variables(jaxpr.outvars), last + 1))
    eqns_by_part: dict[int, list[JaxprEqn]] = {part: [] for part in range(-1, last + 1)}
    for eqn, part in zip(jaxpr.eqns, parts, strict=True):
        if eqn.primitive is not boundary_p:
            eqns_by_part[part].append(eqn)
    return {
        part: (
            eqns,
            [var for eqn in eqns for var in eqn.outvars if last_use.get(var, -2) > part],
        )
        for part, eqns in eqns_by_part.items()
    }


def _run(
    eqns: Sequence[JaxprEqn],
    results: Sequence[Var],
    env: dict[Var, Any],
    checkpoint: Checkpoint | None,
) -> None:
    """Evaluate the equations of a part and add its results to `env`."""
    defined = {var for eqn in eqns for var in eqn.outvars}
    operands = variables(atom for eqn in eqns for atom in eqn.invars)
    inputs = [var for var in dict.fromkeys(operands) if var not in defined]

    def run_part(*values: Any) -> list[Any]:
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

    run = run_part if checkpoint is None else checkpoint(run_part)
    values = run(*(env[var] for var in inputs))
    env.update(zip(results, values, strict=True))
