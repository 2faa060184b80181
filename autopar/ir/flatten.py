"""Flattening: one list of equations in which every value has one name.

Calls (`jit`, `custom_jvp_call`, `custom_vjp_call`) are inlined, because JAX has taken the
derivatives by the time a whole step is traced, and `custom_linear_solve` becomes its solver. A
differentiated `jax.checkpoint` becomes an `optimization_barrier` on its inputs followed by its
body, as JAX lowers it, so that the recomputation stays. A `reshape` that reads its operand in
another order of dims becomes a transpose and a reshape, a `dot_general` that sums over no dim an
elementwise product. A transpose that undoes another one is left out. `stop_gradient` becomes its
operand, since XLA merges the equations that read either. The bodies of `scan`, `while_loop` and
`cond` stand between markers (`autopar.ir.control_flow`). A `psum` over an axis of `jax.vmap`
becomes a sum, and a `device_put` between memories `to_host` or `to_device`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.core.primitives import (
    broadcast_in_dim_p,
    concatenate_p,
    cond_p,
    device_put_p,
    linear_solve_p,
    lt_p,
    pad_p,
    pmax_p,
    pmin_p,
    psum_p,
    reduce_max_p,
    reduce_min_p,
    reduce_sum_p,
    remat_p,
    reshape_p,
    scan_p,
    select_n_p,
    sharding_constraint_p,
    stop_gradient_p,
    transpose_p,
    while_p,
)
from jax.lax import split_p

from autopar.ir import control_flow
from autopar.ir.calls import called_jaxpr
from autopar.ir.graph import (
    Atom,
    all_eqns,
    aval_of,
    comparable,
    eqns_of_call,
    is_backward,
    is_differentiated,
    is_forward,
    literal_key,
    needed_eqns,
    renamed,
    source_line,
    variables,
    with_name_stack,
)
from autopar.ir.host_memory import is_on_host, to_device_p, to_host_p
from autopar.ir.outer_products import elementwise_product, is_outer_product
from autopar.ir.scope_renaming import with_renamed_scopes


def flatten(
    jaxpr: Jaxpr, loops: bool = True, keeps_remat: bool = True, keeps_constraints: bool = True
) -> Jaxpr:
    """Return `jaxpr` with calls inlined, equal equations merged and unused ones removed.

    Constants of inlined calls become leading `constvars`, with their values in `consts`.

    Args:
        jaxpr: the jaxpr.
        loops: whether the equations of loops and branches are listed, too. Otherwise a loop or
            branch stays one equation.
        keeps_remat: whether a differentiated `jax.checkpoint` recomputes. Otherwise it gets no
            barrier outside of loops, so its equations merge with those of the forward pass. What
            only the backward pass reads is computed right before, and what its policy offloads
            stays on the device.
        keeps_constraints: whether `jax.lax.with_sharding_constraint` stays.
    """
    builder = _FlatJaxprBuilder(loops, keeps_remat, keeps_constraints)
    invars = [Var(v.aval) for v in jaxpr.invars]
    outvars = builder.inline(jaxpr, invars)
    eqns = needed_eqns(builder.eqns, outvars)
    if not keeps_remat:
        eqns = _with_late_factors(eqns)
    return Jaxpr(
        constvars=list(builder.constants),
        invars=invars,
        outvars=outvars,
        eqns=eqns,
        consts=list(builder.constants.values()),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def _with_late_factors(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Return equations with each derivative of a function right before its first reader.

    A differentiated `jax.checkpoint` computes them, such as the square of a sum of a softmax, at
    the beginning of its backward pass. Without recomputation, what they are computed from would be
    needed as early. Those outside of loops and branches are moved.
    """
    ordered: list[JaxprEqn] = []
    waiting: dict[Var, int] = {}  # numbers of the equations that compute values
    depth = 0

    def compute(atoms: Iterable[Atom]) -> None:
        chosen: set[int] = set()
        pending = variables(atoms)
        while pending:
            number = waiting.get(pending.pop())
            if number is not None:
                chosen.add(number)
                for var in eqns[number].outvars:
                    del waiting[var]
                pending += variables(eqns[number].invars)
        ordered.extend(eqns[number] for number in sorted(chosen))

    for number, eqn in enumerate(eqns):
        opens = eqn.primitive in control_flow.OPENING
        is_factor = is_backward(eqn) and is_forward(eqn) and not eqn.effects
        if is_factor and not (depth or opens):
            waiting.update((var, number) for var in eqn.outvars)
            continue
        compute(list(waiting) if opens else eqn.invars)
        ordered.append(eqn)
        depth += opens - (eqn.primitive is control_flow.end_p)
    compute(list(waiting))
    return ordered


def constrained_lines(jaxpr: Jaxpr) -> tuple[str, ...]:
    """Return the lines of the user's code that call `jax.lax.with_sharding_constraint`."""
    constraints = (eqn for eqn in all_eqns(jaxpr) if eqn.primitive is sharding_constraint_p)
    return tuple(dict.fromkeys(map(source_line, constraints)))


class _FlatJaxprBuilder:
    """Collects the equations of a flat jaxpr; see `flatten` for the options."""

    def __init__(self, loops: bool, keeps_remat: bool, keeps_constraints: bool) -> None:
        self.eqns: list[JaxprEqn] = []
        self._keeps_remat = keeps_remat
        self._keeps_constraints = keeps_constraints
        self._depth = 0  # number of loops and branches around the equations
        self.constants: dict[Var, Any] = {}
        self._constant_of: dict[int, Var] = {}
        self._known: dict[Any, list[Var]] = {}
        self._transposes: dict[Var, tuple[Atom, Sequence[int]]] = {}
        self._with_bodies: dict[Primitive, Callable[[JaxprEqn, list[Atom], Any], list[Atom]]] = {
            linear_solve_p: self._linear_solve
        }
        if loops:
            self._with_bodies |= {scan_p: self._scan, while_p: self._while, cond_p: self._cond}

    def inline(
        self, jaxpr: Jaxpr, args: Sequence[Atom], name_stack: Any = None, caller: Any = None
    ) -> list[Atom]:
        """Append the equations of `jaxpr` applied to `args`; return its results.

        Args:
            jaxpr: the jaxpr.
            args: its operands.
            name_stack: name stack of the equation that calls it.
            caller: traceback of that equation.
        """
        env: dict[Var, Atom] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, jaxpr.consts, strict=True):
            env[var] = self._constant(value, var)

        def rename(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in eqns_of_call(jaxpr, caller):
            invars = [rename(atom) for atom in eqn.invars]
            stack = (
                eqn.source_info.name_stack
                if name_stack is None
                else name_stack + eqn.source_info.name_stack
            )
            call = eqn.source_info.traceback
            called = called_jaxpr(eqn)
            if called is not None:
                if eqn.primitive is remat_p and self._keeps_checkpoint(eqn):
                    invars = self._barrier(invars, _at(eqn, stack))
                outvars = self.inline(called, invars, stack, call)
            elif eqn.primitive in self._with_bodies:
                outvars = self._with_bodies[eqn.primitive](_at(eqn, stack), invars, stack)
            elif self._is_left_out(_at(eqn, stack), invars):
                outvars = invars
            elif eqn.primitive is reshape_p and eqn.params["dimensions"] is not None:
                outvars = self._transposed_reshape(_at(eqn, stack).replace(invars=invars))
            elif is_outer_product(eqn):
                outvars = self.inline(elementwise_product(eqn), invars, stack, call)
            else:
                known = _host_move(_reduction(_at(eqn, stack))).replace(invars=invars)
                outvars = (
                    self._without_empty(known)
                    or _decided(known)
                    or self._before_transposes(known)
                    or self._apply(known)
                )
            env.update(zip(eqn.outvars, outvars, strict=True))
        return [rename(atom) for atom in jaxpr.outvars]

    # -- straight lines

    def _append(self, eqn: JaxprEqn) -> list[Var]:
        """Append `eqn` with new results; return them."""
        outvars = [Var(v.aval) for v in eqn.outvars]
        self.eqns.append(eqn.replace(outvars=outvars))
        if eqn.primitive is transpose_p:
            self._transposes[outvars[0]] = eqn.invars[0], eqn.params["permutation"]
        return outvars

    def _before_transposes(self, eqn: JaxprEqn) -> list[Atom]:
        """Return what a transpose restores that undoes another one; empty for other equations."""
        operand = eqn.invars[0] if eqn.primitive is transpose_p else None
        if not isinstance(operand, Var) or operand not in self._transposes:
            return []
        source, order = self._transposes[operand]
        after = [order[dim] for dim in eqn.params["permutation"]]
        return [source] if after == sorted(after) else []

    def _apply(self, eqn: JaxprEqn) -> list[Var]:
        """Return the results of `eqn`, or of an equal equation before it.

        Values behind a barrier are other values, so recomputation is not merged. What is computed
        from literals alone is not merged either: zeros per example may have the shape of a weight,
        and the number of examples may be another number of the step, for some batch sizes only.
        Where recomputation is not kept, they merge with those of the same call.
        """
        is_constant = all(isinstance(atom, Literal) for atom in eqn.invars)
        is_barrier = eqn.primitive is jax.lax.optimization_barrier_p
        key = None if is_barrier or (is_constant and self._keeps_remat) else value_number(eqn)
        if is_constant and key is not None:
            key = key, id(eqn.source_info.traceback)
        if key is None:
            return self._append(eqn)
        if key not in self._known:
            self._known[key] = self._append(eqn)
        return self._known[key]

    def _without_empty(self, eqn: JaxprEqn) -> Sequence[Atom]:
        """Return the results of an equation without its arrays that have no elements.

        `jax.lax.associative_scan` joins, pads and splits such arrays, and XLA:CPU crashes while it
        compiles them sharded. Empty if the equation is to stay as it is.
        """
        if eqn.primitive is concatenate_p:
            filled = [atom for atom in eqn.invars if aval_of(atom).size]
            if len(filled) == 1:
                return filled
            return self._apply(eqn.replace(invars=filled)) if filled else []
        if eqn.primitive is pad_p and not aval_of(eqn.invars[0]).size:
            return self._filled(eqn, eqn.invars[1], eqn.outvars[0])
        if eqn.primitive is split_p and sum(bool(aval_of(v).size) for v in eqn.outvars) == 1:
            scalar = ShapedArray((), aval_of(eqn.invars[0]).dtype)
            zero = Literal(np.zeros((), scalar.dtype), scalar)
            return [
                eqn.invars[0] if aval_of(var).size else self._filled(eqn, zero, var)[0]
                for var in eqn.outvars
            ]
        return []

    def _filled(self, eqn: JaxprEqn, value: Atom, result: Var) -> list[Var]:
        """Append an array of one value, in place of a result of an equation."""
        shape = aval_of(result).shape
        params = {"shape": shape, "broadcast_dimensions": (), "sharding": None}
        return self._apply(
            eqn.replace(
                primitive=broadcast_in_dim_p, invars=[value], outvars=[result], params=params
            )
        )

    def _transposed_reshape(self, eqn: JaxprEqn) -> list[Var]:
        """Append a reshape with an order of dims, such as `order="F"`, as transpose and reshape."""
        (operand,), order = eqn.invars, tuple(eqn.params["dimensions"])
        aval = aval_of(operand)
        transposed = self._apply(
            eqn.replace(
                primitive=transpose_p,
                outvars=[Var(aval.update(shape=tuple(aval.shape[dim] for dim in order)))],
                params={"permutation": order},
            )
        )
        params = eqn.params | {"dimensions": None}
        return self._apply(eqn.replace(invars=[*transposed], params=params))

    def _linear_solve(self, eqn: JaxprEqn, invars: list[Atom], stack: Any) -> list[Atom]:
        """Append the solver of `custom_linear_solve`, which its other functions differentiate."""
        lengths = eqn.params["const_lengths"]
        before = lengths.matvec + lengths.vecmat
        constants = invars[before : before + lengths.solve]
        sides = invars[sum(lengths) :]
        solve = eqn.params["jaxprs"].solve
        return self.inline(solve, [*constants, *sides], stack, eqn.source_info.traceback)

    def _constant(self, value: Any, var: Var) -> Var:
        if id(value) not in self._constant_of:
            self._constant_of[id(value)] = new = Var(var.aval)
            self.constants[new] = value
        return self._constant_of[id(value)]

    def _keeps_checkpoint(self, eqn: JaxprEqn) -> bool:
        """Return whether a `jax.checkpoint` recomputes in the flat jaxpr."""
        return eqn.params["differentiated"] and (self._keeps_remat or self._depth > 0)

    def _is_left_out(self, eqn: JaxprEqn, invars: Sequence[Atom]) -> bool:
        """Return whether an equation is an identity, or a constraint or offload not to keep."""
        if eqn.primitive is stop_gradient_p:
            return True
        if eqn.primitive is sharding_constraint_p:
            return not self._keeps_constraints
        if self._keeps_remat or self._depth or not is_differentiated(eqn):
            return False
        primitive = _host_move(eqn).primitive
        return primitive is to_host_p or (primitive is to_device_p and not is_on_host(invars[0]))

    def _barrier(self, invars: list[Atom], eqn: JaxprEqn) -> list[Atom]:
        """Put `invars` behind a barrier, so that the compiler recomputes what follows."""
        prevent_cse = eqn.params["prevent_cse"]
        marks = prevent_cse if isinstance(prevent_cse, tuple) else (prevent_cse,) * len(invars)
        operands = [
            atom for atom, mark in zip(invars, marks, strict=True) if mark and isinstance(atom, Var)
        ]
        if not operands:
            return invars
        barrier = jax.lax.optimization_barrier_p
        outvars = self._append(
            eqn.replace(invars=list(operands), outvars=operands, primitive=barrier, params={})
        )
        return renamed(invars, dict(zip(operands, outvars, strict=True)))

    # -- control flow

    def _scan(self, eqn: JaxprEqn, invars: list[Atom], stack: Any) -> list[Atom]:
        """Append a scan as a loop between markers, and return its results."""
        consts, init, xs = map(list, eqn.params["ft_in"].update(invars).unpack())
        params = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
        with self._region(eqn, control_flow.loop_p, [], params) as mark:
            body = eqn.params["jaxpr"]
            inner = [mark(control_flow.loop_const_p, [atom], atom.aval) for atom in consts]
            carry = [mark(control_flow.loop_carry_p, [atom], atom.aval) for atom in init]
            slices = body.invars[len(consts) + len(init) :]
            inner += carry
            inner += [
                mark(control_flow.loop_slice_p, [a], v.aval)
                for a, v in zip(xs, slices, strict=True)
            ]
            results = self.inline(body, inner, stack, eqn.source_info.traceback)
            after, ys = results[: len(init)], results[len(init) :]
            final = [
                mark(control_flow.loop_result_p, [c, a], c.aval)
                for c, a in zip(carry, after, strict=True)
            ]
            stacked = eqn.outvars[len(init) :]
            return [
                *final,
                *(
                    mark(control_flow.loop_stack_p, [y], v.aval)
                    for y, v in zip(ys, stacked, strict=True)
                ),
            ]

    def _while(self, eqn: JaxprEqn, invars: list[Atom], stack: Any) -> list[Atom]:
        """Append a while loop between markers, its condition first, and return its results."""
        num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        with self._region(eqn, control_flow.loop_p, [], {"length": None}) as mark:
            consts = [
                mark(control_flow.loop_const_p, [atom], atom.aval)
                for atom in invars[: num_cond + num_body]
            ]
            carry = [
                mark(control_flow.loop_carry_p, [atom], atom.aval)
                for atom in invars[num_cond + num_body :]
            ]
            call = eqn.source_info.traceback
            operands = [*consts[:num_cond], *carry]
            (test,) = self.inline(eqn.params["cond_jaxpr"], operands, stack, call)
            mark(control_flow.loop_test_p, [test])
            self._known = {}  # results of the condition are not available in the body
            operands = [*consts[num_cond:], *carry]
            after = self.inline(eqn.params["body_jaxpr"], operands, stack, call)
            return [
                mark(control_flow.loop_result_p, [c, a], c.aval)
                for c, a in zip(carry, after, strict=True)
            ]

    def _cond(self, eqn: JaxprEqn, invars: list[Atom], stack: Any) -> list[Atom]:
        branches = eqn.params["branches"]
        with self._region(
            eqn, control_flow.switch_p, invars[:1], {"branches": len(branches)}
        ) as mark:
            results, outside = [], self._known
            for branch in branches:
                mark(control_flow.branch_p, [])
                self._known = dict(outside)  # results of a branch are not available in the next
                call = eqn.source_info.traceback
                results.append(self.inline(branch, invars[1:], stack, call))
            chosen = zip(eqn.outvars, *results, strict=True)
            return [mark(control_flow.switch_result_p, atoms, var.aval) for var, *atoms in chosen]

    @contextmanager
    def _region(
        self, eqn: JaxprEqn, primitive: Primitive, invars: list[Atom], params: dict[str, Any]
    ) -> Iterator[Callable[..., Var]]:
        """Open and close a region; yield a function that appends its other markers."""
        (token,) = self._append(
            eqn.replace(primitive=primitive, invars=invars, outvars=[_var()], params=params)
        )
        outside, self._known = self._known, {}  # values enter a loop by its markers only
        self._depth += 1

        def mark(primitive: Primitive, atoms: Sequence[Atom], *results: ShapedArray) -> Any:
            outvars = [Var(aval) for aval in results]
            marker = {
                "primitive": primitive,
                "invars": [*atoms, token],
                "outvars": outvars,
                "params": {},
            }
            appended = self._append(eqn.replace(**marker, effects=frozenset()))
            return appended[0] if appended else None

        yield mark
        mark(control_flow.end_p, [])
        self._depth -= 1
        self._known = outside


def _var() -> Var:
    return Var(control_flow.TOKEN)


def _at(eqn: JaxprEqn, name_stack: Any) -> JaxprEqn:
    """Return an equation with a name stack, in which scopes are renamed."""
    return with_name_stack(eqn, with_renamed_scopes(name_stack))


def _reduction(eqn: JaxprEqn) -> JaxprEqn:
    """Return an all_reduce over an axis of `jax.vmap` as the reduction that it is.

    `vmap` with an axis name turns `psum` over the name into `psum` over the number of a dim.
    """
    reduce = _REDUCTIONS.get(eqn.primitive)
    if reduce is None or eqn.params["axis_index_groups"] is not None:
        return eqn
    axes = eqn.params["axes"]
    if len(eqn.invars) > 1 or not all(isinstance(axis, int) for axis in axes):
        return eqn
    return eqn.replace(primitive=reduce, params={"axes": tuple(axes), "out_sharding": None})


def _host_move(eqn: JaxprEqn) -> JaxprEqn:
    """Return a `device_put` of a value to host memory, or back, as the move that it is."""
    if eqn.primitive is not device_put_p or len(eqn.invars) != 1:
        return eqn
    (source,), (target,) = eqn.invars, eqn.outvars
    if is_on_host(source) == is_on_host(target):
        return eqn
    return eqn.replace(primitive=to_host_p if is_on_host(target) else to_device_p, params={})


def _decided(eqn: JaxprEqn) -> list[Atom]:
    """Return the result of an equation that follows from its literals; empty for others.

    For `x[:, i]`, JAX adds the size of the first dim to its start 0 if that is negative. The size
    of the batch does not matter then, and is not to be read.
    """
    first = eqn.invars[0] if eqn.invars else None
    if not isinstance(first, Literal) or aval_of(first).shape:
        return []
    if eqn.primitive is select_n_p:
        return [eqn.invars[1 + int(first.val)]]
    second = eqn.invars[1] if eqn.primitive is lt_p else None
    if isinstance(second, Literal) and np.issubdtype(aval_of(first).dtype, np.integer):
        return [Literal(np.asarray(first.val < second.val), aval_of(eqn.outvars[0]))]
    return []


_REDUCTIONS = {psum_p: reduce_sum_p, pmax_p: reduce_max_p, pmin_p: reduce_min_p}


def value_number(eqn: JaxprEqn) -> Any:
    """Return a key that is equal for equations that compute the same.

    None for equations with effects, or whose parameters can't be compared.
    """
    if eqn.effects:
        return None
    atoms = tuple(literal_key(a) if isinstance(a, Literal) else a for a in eqn.invars)
    context = (
        eqn.ctx.compute_type,
        eqn.ctx.threefry_partitionable,
        eqn.ctx.cur_abstract_mesh,
        eqn.ctx.xla_metadata,
    )
    params = tuple((name, comparable(value)) for name, value in sorted(eqn.params.items()))
    key = (eqn.primitive, atoms, params, context)
    try:
        hash(key)
    except TypeError:
        return None
    return key
