"""Layers: the runs of equations of a loss function that pipeline stages are made of.

A layer is a named scope. JAX writes the scopes in which an equation was made into its name stack, and into that of everything
that differentiation makes of it, so that the layer of every equation of a traced step, forward or backward, can be read off
(`layer_of`), and a function computes the same with layers as without.
"""

import re
from collections.abc import Callable, Iterator, Sequence
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
from jax.extend.core.primitives import jit_p

from autopar.checks import FLAG, NONE, check, integer, items, one_of, real, satisfying
from autopar.ir.array_sizes import array_bytes
from autopar.ir.control_flow import MARKERS, repeats
from autopar.ir.flatten import flatten
from autopar.ir.graph import Atom, aval_of, read
from autopar.layering.layer_clustering import Received, cluster_layers, received_bytes
from autopar.primitives import kernel_of

boundary_p = Primitive("pipeline_boundary")
boundary_p.multiple_results = True
boundary_p.def_impl(lambda: [])
boundary_p.def_abstract_eval(lambda: [])

_SCOPE = "pipeline_layer_"
_LAYER = re.compile(rf"{_SCOPE}(\d+)")


class LayerError(ValueError):
    """A function can't be cut into layers as asked."""


def mark_pipeline_boundary() -> None:
    """Ends a layer here and starts the next; for functions under `manual_layer_construction` or a `ManualLayerOption`."""
    boundary_p.bind()


@dataclass(frozen=True, slots=True)
class ManualLayerOption:
    """Layers end where the loss function calls `mark_pipeline_boundary`.

    Attributes:
        remat_layer: recompute each layer in the backward pass instead of keeping what is inside; "auto": as PipeshardParallel finds
            it faster.
    """

    remat_layer: bool | Literal["auto"] = False

    def __post_init__(self) -> None:
        check(self, LayerError, remat_layer=FLAG | one_of("auto"))

    def cut(self, jaxpr: Jaxpr) -> list[int]:
        """The layer of each equation."""
        found, layer = [], 0
        for eqn in jaxpr.eqns:
            found.append(layer)
            layer += eqn.primitive is boundary_p
        return found


@dataclass(frozen=True, slots=True)
class AutoLayerOption:
    """Layers as equal in work as asked, with as little as possible to hand from one to the next (Alpa, OSDI'22, equation 6).

    Attributes:
        layer_num: number of layers.
        remat_layer: recompute each layer in the backward pass instead of keeping what is inside; "auto": as PipeshardParallel finds
            it faster.
        eps: how much more than its share of the work a layer may have, relative.
        cost_criteria: what counts as work: "flops", or the "count" of matrix products and convolutions.
    """

    layer_num: int
    remat_layer: bool | Literal["auto"] = False
    eps: float = 0.6
    cost_criteria: Literal["flops", "count"] = "flops"

    def __post_init__(self) -> None:
        check(
            self,
            LayerError,
            layer_num=integer(),
            remat_layer=FLAG | one_of("auto"),
            eps=real(),
            cost_criteria=one_of("flops", "count"),
        )

    def cut(self, jaxpr: Jaxpr) -> list[int]:
        """The layer of each equation. Raises NoLayersError when there are too few for so many layers."""
        debug_info = jaxpr.debug_info.with_unknown_names()
        flops = np.array([_flops(eqn, debug_info) for eqn in jaxpr.eqns])
        work = flops if self.cost_criteria == "flops" else (flops > 0).astype(float)
        found = cluster_layers(work, _handed_on(jaxpr), self.layer_num, self.eps)
        return np.searchsorted(found.stops, np.arange(len(jaxpr.eqns)), side="right").tolist()


@dataclass(frozen=True, slots=True)
class FollowLayerOption:
    """For a step without gradients: each equation belongs to the layer of the parameters it reads, or one that it waits for.

    Attributes:
        inputs: for each array among the arguments its layer, None for those that go wherever they are needed.
        num_layers: number of layers; some may be empty.
        remat_layer: has no meaning without a backward pass.
    """

    inputs: tuple[int | None, ...]
    num_layers: int
    remat_layer: Literal[False] = False

    def __post_init__(self) -> None:
        homes = items(integer(0) | NONE, "a sequence of layers, or None, for each input")
        check(
            self,
            LayerError,
            inputs=homes,
            num_layers=integer(),
            remat_layer=satisfying("False", lambda value: value is False),
        )

    @property
    def homes(self) -> dict[int, int]:
        """The layer of each input that has one."""
        return {i: layer for i, layer in enumerate(self.inputs) if layer is not None}

    def cut(self, jaxpr: Jaxpr) -> list[int]:
        """The layer of each equation. Raises LayerError for a step with another number of inputs."""
        if len(jaxpr.invars) != len(self.inputs):
            raise LayerError(
                f"{len(self.inputs)} layers of inputs for a step with {len(jaxpr.invars)} of them; one each"
            )
        layer = {
            var: home
            for var, home in zip(jaxpr.invars, self.inputs, strict=True)
            if home is not None
        }
        found: list[int | None] = []
        for eqn in jaxpr.eqns:
            waits_for = [layer[a] for a in eqn.invars if isinstance(a, Var) and a in layer]
            found.append(max(waits_for, default=None))
            if waits_for:
                layer.update(dict.fromkeys(eqn.outvars, max(waits_for)))
        first: dict[Var, int] = {}  # what reads the batch only goes where it is needed first
        for k, eqn in reversed(list(enumerate(jaxpr.eqns))):
            number = found[k]
            if number is None:
                number = found[k] = min(
                    (first[var] for var in eqn.outvars if var in first), default=0
                )
            for atom in eqn.invars:
                if isinstance(atom, Var):
                    first[atom] = min(number, first.get(atom, number))
        return [number or 0 for number in found]


LayerOption = AutoLayerOption | ManualLayerOption | FollowLayerOption

_option: ContextVar[LayerOption | None] = ContextVar("layer_option", default=None)


@contextmanager
def layering(option: LayerOption | None) -> Iterator[None]:
    """While it lasts, `autopar.grad` and `value_and_grad` cut the functions that they differentiate into layers."""
    token = _option.set(option)
    try:
        yield
    finally:
        _option.reset(token)


def layered_if_asked(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, in layers while `layering` lasts, unless it is so already."""
    option = _option.get()
    return fun if option is None or hasattr(fun, "layer_option") else layered(fun, option)


def layered(fun: Callable[..., Any], option: LayerOption) -> Callable[..., Any]:
    """`fun`, cut into layers. Raises LayerError for an option that is left open, and when called, if `fun` can't be cut."""
    if option.remat_layer == "auto":
        raise LayerError(
            "remat_layer='auto' is for the layer_option of PipeshardParallel, which tries both"
        )
    remat = option.remat_layer

    @wraps(fun)
    def in_layers(*args: Any, **kwargs: Any) -> Any:
        every, tree = jax.tree.flatten((args, kwargs))
        traced_at = [i for i, leaf in enumerate(every) if isinstance(leaf, Tracer)]
        leaves = [every[i] for i in traced_at]

        def flat(*leaves: Any) -> Any:
            """`fun` closed over what is no tracer: functions, numbers and arrays keep their values, as under `jax.grad`."""
            given = dict(zip(traced_at, leaves, strict=True))
            args, kwargs = jax.tree.unflatten(
                tree, [given.get(i, leaf) for i, leaf in enumerate(every)]
            )
            return fun(*args, **kwargs)

        traced, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        jaxpr = _without_calls(traced)
        env: dict[Var, Any] = dict(zip(jaxpr.invars, leaves, strict=True))
        env.update(zip(jaxpr.constvars, jaxpr.consts, strict=True))
        for number, (eqns, results) in enumerate(_layers(jaxpr, option.cut(jaxpr))):
            with jax.named_scope(f"{_SCOPE}{number}"):
                _run(eqns, results, env, remat)
        return jax.tree.unflatten(
            jax.tree.structure(shapes), [read(atom, env) for atom in jaxpr.outvars]
        )

    in_layers.layer_option = option  # pyright: ignore[reportAttributeAccessIssue]
    return in_layers


def manual_layer_construction(
    fun: Callable[..., Any] | None = None, *, remat_layer: bool = False
) -> Any:
    """A loss function whose layers end where it calls `mark_pipeline_boundary`; a decorator, with or without arguments."""
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
    """A loss function in `layer_num` layers that are found; a decorator. See `AutoLayerOption`."""
    option = AutoLayerOption(layer_num, remat_layer, eps, cost_criteria)
    return layered(fun, option) if fun is not None else lambda fun: layered(fun, option)


def manual_remat(fun: Callable[..., Any] | None = None) -> Any:
    """`manual_layer_construction` in which each layer is recomputed in the backward pass; a decorator."""
    return manual_layer_construction(fun, remat_layer=True)


def automatic_remat(
    fun: Callable[..., Any] | None = None, *, layer_num: int, eps: float = 0.6
) -> Any:
    """`automatic_layer_construction` in which each layer is recomputed in the backward pass; a decorator."""
    return automatic_layer_construction(fun, layer_num=layer_num, eps=eps, remat_layer=True)


def layer_of(eqn: JaxprEqn) -> tuple[int, bool] | None:
    """The layer of an equation of a traced step, and whether it belongs to the backward pass; None outside of layers."""
    text = str(eqn.source_info.name_stack)
    found = _LAYER.search(text)
    return (int(found[1]), "transpose(" in text) if found else None


def _without_calls(jaxpr: Jaxpr) -> Jaxpr:
    """`jaxpr` with `jit`s inlined, and nothing else: how functions are differentiated stays as it is."""
    eqns: list[JaxprEqn] = []
    constants: dict[Var, Any] = {}

    def inline(jaxpr: Jaxpr, args: Sequence[Atom]) -> list[Atom]:
        env: dict[Var, Atom] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, jaxpr.consts, strict=True):
            env[var] = new = Var(var.aval)
            constants[new] = value
        for eqn in jaxpr.eqns:
            invars = [a if isinstance(a, JaxLiteral) else env[a] for a in eqn.invars]
            if eqn.primitive is jit_p:
                outvars = inline(eqn.params["jaxpr"], invars)
            else:
                if eqn.primitive is not boundary_p and _has_boundary(eqn):
                    raise LayerError(
                        f"mark_pipeline_boundary inside {eqn.primitive.name} (a loop, a branch or jax.checkpoint): layers are"
                        " cut from the function itself; mark the boundary outside of it"
                    )
                outvars = [Var(v.aval) for v in eqn.outvars]
                eqns.append(eqn.replace(invars=invars, outvars=list(outvars)))
            env.update(zip(eqn.outvars, outvars, strict=True))
        return [a if isinstance(a, JaxLiteral) else env[a] for a in jaxpr.outvars]

    invars = [Var(v.aval) for v in jaxpr.invars]
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
    def inner(value: Any) -> Iterator[Jaxpr]:
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, Jaxpr):
                yield each

    jaxprs = [each for value in eqn.params.values() for each in inner(value)]
    return any(
        e.primitive is boundary_p or _has_boundary(e) for jaxpr in jaxprs for e in jaxpr.eqns
    )


def _layers(jaxpr: Jaxpr, layer: Sequence[int]) -> Iterator[tuple[list[JaxprEqn], list[Var]]]:
    """For each layer its equations, and those of its results that are used after it."""
    last_use: dict[Atom, int] = {}
    for eqn, number in zip(jaxpr.eqns, layer, strict=True):
        last_use.update(
            (atom, max(number, last_use.get(atom, 0)))
            for atom in eqn.invars
            if isinstance(atom, Var)
        )
    last_use.update((atom, len(layer)) for atom in jaxpr.outvars if isinstance(atom, Var))
    for number in range(max(layer, default=-1) + 1):
        eqns = [
            e
            for e, n in zip(jaxpr.eqns, layer, strict=True)
            if n == number and e.primitive is not boundary_p
        ]
        yield eqns, [var for eqn in eqns for var in eqn.outvars if last_use.get(var, -1) > number]


def _run(
    eqns: Sequence[JaxprEqn], results: Sequence[Var], env: dict[Var, Any], remat: bool
) -> None:
    """Evaluate the equations of a layer and add its results to `env`."""
    made = {var for eqn in eqns for var in eqn.outvars}
    needed = list(
        dict.fromkeys(a for eqn in eqns for a in eqn.invars if isinstance(a, Var) and a not in made)
    )

    def layer(*values: Any) -> list[Any]:
        inner: dict[Var, Any] = dict(zip(needed, values, strict=True))
        for eqn in eqns:
            scope = str(eqn.source_info.name_stack)
            with eqn.ctx.manager, jax.named_scope(scope) if scope else nullcontext():
                operands = [read(atom, inner) for atom in eqn.invars]
                result = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            inner.update(
                zip(
                    eqn.outvars, result if eqn.primitive.multiple_results else [result], strict=True
                )
            )
        return [inner[var] for var in results]

    values = (jax.checkpoint(layer) if remat else layer)(*(env[var] for var in needed))
    env.update(zip(results, values, strict=True))


def _handed_on(jaxpr: Jaxpr) -> Received:
    """What layers receive from one another."""
    users: dict[Var, dict[int, None]] = {var: {} for eqn in jaxpr.eqns for var in eqn.outvars}
    for number, eqn in enumerate(jaxpr.eqns):
        for atom in eqn.invars:
            if isinstance(atom, Var) and atom in users:
                users[atom][number] = None
    made = ((number, var) for number, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars)
    sizes = [
        (n, array_bytes(aval_of(var).shape, aval_of(var).dtype), tuple(users[var]))
        for n, var in made
        if users[var]
    ]
    return received_bytes(len(jaxpr.eqns), sizes)


def _flops(eqn: JaxprEqn, debug_info: Any) -> float:
    """FLOP of the matrix products and convolutions in an equation, those of what it calls included."""
    read = list(dict.fromkeys(a for a in eqn.invars if isinstance(a, Var)))
    flat = flatten(Jaxpr([], read, eqn.outvars, [eqn], debug_info=debug_info))
    kernels = (
        (times, kernel_of(e, [aval_of(a).shape for a in e.invars], 0.0))
        for e, times in zip(flat.eqns, repeats(flat.eqns), strict=True)
        if e.primitive not in MARKERS and e.outvars
    )
    return sum(times * kernel.flops for times, kernel in kernels if kernel.kind in ("gemm", "conv"))


def num_layers(jaxpr: Jaxpr) -> int:
    """Return the number of layers that a traced step has; 0 if it has none."""
    found = (layer_of(eqn) for eqn in jaxpr.eqns)
    return max((each[0] for each in found if each is not None), default=-1) + 1
