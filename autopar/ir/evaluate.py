"""An interpreter of flat jaxprs with hooks on operands and results."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var
from jax.sharding import AbstractMesh, Mesh

from autopar.ir import control_flow
from autopar.ir.graph import read

type Numbered = tuple[int, JaxprEqn]

type Hook = Callable[[int, list[Any]], list[Any]]
"""A function from the number of an equation and its operands, or results, to the values to use.

Operands that have no value are None: tokens of regions, and values of the other branches of a
switch.
"""


def unchanged(number: int, values: list[Any]) -> list[Any]:
    """Return `values`: the hook that changes nothing."""
    return values


type Apply = Callable[[int, JaxprEqn, list[Any]], list[Any]]
"""A function from the number of an equation, the equation and its operands to its results."""


def as_traced(number: int, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Return the results of `eqn` with the primitive and parameters of the trace."""
    with eqn.ctx.manager:
        return bind(eqn, operands)


def bind(eqn: JaxprEqn, operands: Sequence[Any], **params: Any) -> list[Any]:
    """Return the results of the primitive of `eqn`, with other parameters where given.

    The equation's own context is left to the caller: it says that there is no mesh.
    """
    bound = eqn.primitive.get_bind_params({**eqn.params, **params})
    result = eqn.primitive.bind(*operands, **bound)
    return list(result) if eqn.primitive.multiple_results else [result]


def evaluate(
    eqns: Iterable[Numbered],
    env: dict[Var, Any],
    before: Hook,
    after: Hook,
    apply: Apply = as_traced,
) -> None:
    """Run numbered equations and add their results to `env`.

    Args:
        eqns: numbered equations of a flat jaxpr.
        env: the values that they read.
        before: the hook of operands.
        after: the hook of results.
        apply: how an equation runs.
    """
    _Evaluator(before, after, apply).run(list(eqns), env)


FFT_OPTIONS = {"xla_cpu_multi_thread_eigen": False}
"""The XLA:CPU options for programs with a Fourier transform, see `compiler_options`."""


def compiler_options(eqns: Iterable[JaxprEqn], mesh: Mesh | AbstractMesh) -> dict[str, bool] | None:
    """Return the XLA options that a program of `eqns` needs on `mesh`.

    XLA:CPU runs a Fourier transform in the threads that also run its virtual devices. If all other
    threads wait in a collective, the device with the transform gets no thread, and the collective
    waits for that device: a deadlock (jaxlib 0.11.2).
    """
    on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    return FFT_OPTIONS if on_cpu and _has_fft(eqns) else None


def _has_fft(eqns: Iterable[JaxprEqn]) -> bool:
    return any(
        eqn.primitive.name == "fft"
        or any(isinstance(inner, Jaxpr) and _has_fft(inner.eqns) for inner in eqn.params.values())
        for eqn in eqns
    )


class _Evaluator:
    """Runs flat equations with hooks before and after each; see `evaluate`."""

    def __init__(self, before: Hook, after: Hook, apply: Apply) -> None:
        self.before = before
        self.after = after
        self.apply = apply

    def run(self, eqns: Sequence[Numbered], env: dict[Var, Any]) -> None:
        """Run `eqns` and add their results to `env`."""
        position = 0
        while position < len(eqns):
            number, eqn = eqns[position]
            if eqn.primitive in control_flow.OPENING:
                end = control_flow.end_of(eqns, position)
                region = _Region(eqns[position:end])
                if eqn.primitive is control_flow.loop_p:
                    self._run_loop(region, env)
                else:
                    self._run_switch(region, env)
                position = end
            else:
                operands = self.before(number, [read(atom, env) for atom in eqn.invars])
                scope = str(eqn.source_info.name_stack)
                with jax.named_scope(scope) if scope else nullcontext():
                    results = self.apply(number, eqn, operands)
                env.update(zip(eqn.outvars, self.after(number, results), strict=True))
            position += 1

    def _run_loop(self, region: "_Region", env: dict[Var, Any]) -> None:
        """Run a loop as a `scan`, or as a `while_loop` if it has no length."""
        params = region.opening.params
        carries = region.markers(control_flow.loop_carry_p)
        slices = region.markers(control_flow.loop_slice_p)
        finals = region.markers(control_flow.loop_result_p)
        stacks = region.markers(control_flow.loop_stack_p)
        for marker in region.markers(control_flow.loop_const_p):
            self._bind([marker], [self._operand(marker, env)], env)
        init = [_strong(self._operand(marker, env)) for marker in carries]
        xs = [self._operand(marker, env) for marker in slices]
        *condition, body = region.parts(control_flow.loop_test_p)

        def run_part(eqns: Sequence[Numbered], carry: list[Any], x: list[Any]) -> dict[Var, Any]:
            inner = dict(env)
            self._bind(carries, carry, inner)
            self._bind(slices, x, inner)
            self.run(eqns, inner)
            return inner

        def iterate(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            inner = run_part(body, carry, x)
            next_carry = [_strong(self._operand(marker, inner, 1)) for marker in finals]
            return next_carry, [self._operand(marker, inner) for marker in stacks]

        if params["length"] is None:
            ((_, test),) = region.markers(control_flow.loop_test_p)

            def goes_on(carry: list[Any]) -> Any:
                return read(test.invars[0], run_part(condition[0], carry, []))

            carry = _while_loop(goes_on, lambda carry: iterate(carry, [])[0], init)
            ys = []
        else:
            carry, ys = jax.lax.scan(iterate, init, xs, **params)
        self._bind(finals, carry, env)
        self._bind(stacks, ys, env)

    def _run_switch(self, region: "_Region", env: dict[Var, Any]) -> None:
        results = region.markers(control_flow.switch_result_p)
        (index,) = self.before(region.number, [read(region.opening.invars[0], env)])

        def run_branch(number: int, eqns: Sequence[Numbered]) -> list[Any]:
            inner = dict(env)
            self.run(eqns, inner)
            return [_strong(self._operand(marker, inner, number)) for marker in results]

        parts = region.parts(control_flow.branch_p)[1:]
        branches = [partial(run_branch, number, eqns) for number, eqns in enumerate(parts)]
        self._bind(results, jax.lax.switch(index, branches), env)

    def _operand(self, marker: Numbered, env: dict[Var, Any], position: int = 0) -> Any:
        """Return one operand of a marker after the hook; the hook gets None for the others."""
        number, eqn = marker
        operands: list[Any] = [None] * len(eqn.invars)
        operands[position] = read(eqn.invars[position], env)
        return self.before(number, operands)[position]

    def _bind(
        self, markers: Sequence[Numbered], values: Sequence[Any], env: dict[Var, Any]
    ) -> None:
        for (number, eqn), value in zip(markers, values, strict=True):
            env[eqn.outvars[0]] = self.after(number, [value])[0]


class _Region:
    """The numbered equations of a region, from the one that opens it to the last before its end."""

    def __init__(self, eqns: Sequence[Numbered]) -> None:
        (self.number, self.opening), *self.inner = eqns
        self.token = control_flow.token_of(self.opening)

    def _is_own(self, eqn: JaxprEqn) -> bool:
        return (
            eqn.primitive in control_flow.MARKERS - control_flow.OPENING
            and control_flow.token_of(eqn) is self.token
        )

    def markers(self, primitive: Primitive) -> list[Numbered]:
        """Return the region's markers of a primitive, without markers of nested regions."""
        return [
            (number, eqn)
            for number, eqn in self.inner
            if eqn.primitive is primitive and self._is_own(eqn)
        ]

    def parts(self, separator: Primitive) -> list[list[Numbered]]:
        """Return the equations before, between and after separators, without markers."""
        parts: list[list[Numbered]] = [[]]
        for number, eqn in self.inner:
            if not self._is_own(eqn):
                parts[-1].append((number, eqn))
            elif eqn.primitive is separator:
                parts.append([])
        return parts


def _while_loop(
    goes_on: Callable[[list[Any]], Any], iterate: Callable[[list[Any]], list[Any]], init: list[Any]
) -> list[Any]:
    """Run a while loop, whose condition has a truth value for each row under `jax.vmap`.

    Then the loop runs until all are false, and a row keeps its carry when its own is.
    """
    if not jax.eval_shape(goes_on, init).shape:
        return jax.lax.while_loop(goes_on, iterate, init)

    def iterate_rows(carry: list[Any]) -> list[Any]:
        rows = goes_on(carry)

        def chosen(old: Any, new: Any) -> Any:
            dims = tuple(range(rows.ndim))
            return jax.lax.select(jax.lax.broadcast_in_dim(rows, old.shape, dims), new, old)

        return list(map(chosen, carry, iterate(carry)))

    return jax.lax.while_loop(lambda carry: goes_on(carry).any(), iterate_rows, init)


def _strong(value: Any) -> Any:
    """Return `value` without a weak type, because a carry has one type in all iterations."""
    aval = jax.typeof(value)
    return jax.lax.convert_element_type(value, aval.dtype) if aval.weak_type else value
