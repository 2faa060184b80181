"""Running flat jaxprs, with a hand on every operand and result."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var
from jax.sharding import AbstractMesh, Mesh

from autopar.ir import control_flow
from autopar.ir.graph import read

type Numbered = tuple[int, JaxprEqn]

type Hook = Callable[[int, list[Any]], list[Any]]
"""Sees the number of an equation and its operands or results, and gives them back, perhaps changed.

Operands that are not there to be seen, the tokens of regions and what the other branches of a switch compute, are None.
"""


def unchanged(number: int, values: list[Any]) -> list[Any]:
    """A hook that changes nothing."""
    return values


type Apply = Callable[[int, JaxprEqn, list[Any]], list[Any]]
"""Computes the results of an equation, given with its number, from its operands."""


def as_traced(number: int, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Apply the primitive of `eqn` as it was traced."""
    with eqn.ctx.manager:
        result = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(result) if eqn.primitive.multiple_results else [result]


def evaluate(
    eqns: Iterable[Numbered],
    env: dict[Var, Any],
    before: Hook,
    after: Hook,
    apply: Apply = as_traced,
) -> None:
    """Run numbered `eqns` on the values in `env` and add their results, passing operands and results by the hooks."""
    _Run(before, after, apply).all(list(eqns), env)


FFT_OPTIONS = {"xla_cpu_multi_thread_eigen": False}
"""What XLA:CPU compiles a Fourier transform with, see `compiler_options`."""


def compiler_options(eqns: Iterable[JaxprEqn], mesh: Mesh | AbstractMesh) -> dict[str, bool] | None:
    """Return the XLA options that a program of `eqns` needs on `mesh`.

    XLA:CPU computes a Fourier transform with the threads that its virtual devices run on. Where all of them wait for a
    collective, one device waits for a thread and the others for that device, for ever (jaxlib 0.11.2).
    """
    on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    return FFT_OPTIONS if on_cpu and _has_fft(eqns) else None


def _has_fft(eqns: Iterable[JaxprEqn]) -> bool:
    return any(
        eqn.primitive.name == "fft"
        or any(isinstance(inner, Jaxpr) and _has_fft(inner.eqns) for inner in eqn.params.values())
        for eqn in eqns
    )


class _Run:
    def __init__(self, before: Hook, after: Hook, apply: Apply) -> None:
        self.before, self.after, self.apply = before, after, apply

    def all(self, eqns: Sequence[Numbered], env: dict[Var, Any]) -> None:
        position = 0
        while position < len(eqns):
            number, eqn = eqns[position]
            if eqn.primitive in control_flow.OPENING:
                end = control_flow.end_of(eqns, position)
                region = _Region(eqns[position:end])
                (self._loop if eqn.primitive is control_flow.loop_p else self._switch)(region, env)
                position = end
            else:
                operands = self.before(number, [read(atom, env) for atom in eqn.invars])
                scope = str(eqn.source_info.name_stack)
                with jax.named_scope(scope) if scope else nullcontext():
                    results = self.apply(number, eqn, operands)
                env.update(zip(eqn.outvars, self.after(number, results), strict=True))
            position += 1

    def _loop(self, region: "_Region", env: dict[Var, Any]) -> None:
        """A `scan`, or a `while_loop` when the number of iterations is not known."""
        params = region.opening.params
        carries, slices = (
            region.marked(control_flow.loop_carry_p),
            region.marked(control_flow.loop_slice_p),
        )
        finals, stacks = (
            region.marked(control_flow.loop_result_p),
            region.marked(control_flow.loop_stack_p),
        )
        for marker in region.marked(control_flow.loop_const_p):
            self._bind([marker], [self._operand(marker, env)], env)
        init = [_strong(self._operand(marker, env)) for marker in carries]
        xs = [self._operand(marker, env) for marker in slices]
        *condition, body = region.parts(control_flow.loop_test_p)

        def inside(eqns: Sequence[Numbered], carry: list[Any], parts: list[Any]) -> dict[Var, Any]:
            inner = dict(env)
            self._bind(carries, carry, inner)
            self._bind(slices, parts, inner)
            self.all(eqns, inner)
            return inner

        def iterate(carry: list[Any], parts: list[Any]) -> tuple[list[Any], list[Any]]:
            inner = inside(body, carry, parts)
            after = [_strong(self._operand(marker, inner, 1)) for marker in finals]
            return after, [self._operand(marker, inner) for marker in stacks]

        if params["length"] is None:
            ((_, test),) = region.marked(control_flow.loop_test_p)
            carry = jax.lax.while_loop(
                lambda carry: read(test.invars[0], inside(condition[0], carry, [])),
                lambda carry: iterate(carry, [])[0],
                init,
            )
            ys = []
        else:
            carry, ys = jax.lax.scan(iterate, init, xs, **params)
        self._bind(finals, carry, env)
        self._bind(stacks, ys, env)

    def _switch(self, region: "_Region", env: dict[Var, Any]) -> None:
        results = region.marked(control_flow.switch_result_p)
        (index,) = self.before(region.number, [read(region.opening.invars[0], env)])

        def branch(which: int, eqns: Sequence[Numbered]) -> list[Any]:
            inner = dict(env)
            self.all(eqns, inner)
            return [_strong(self._operand(marker, inner, which)) for marker in results]

        branches = region.parts(control_flow.branch_p)[1:]
        chosen = jax.lax.switch(
            index, [lambda k=k, b=b: branch(k, b) for k, b in enumerate(branches)]
        )
        self._bind(results, chosen, env)

    def _operand(self, marker: Numbered, env: dict[Var, Any], which: int = 0) -> Any:
        """One operand of a marker; the others are elsewhere."""
        number, eqn = marker
        operands: list[Any] = [None] * len(eqn.invars)
        operands[which] = read(eqn.invars[which], env)
        return self.before(number, operands)[which]

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

    def marked(self, primitive: Primitive) -> list[Numbered]:
        """The region's own markers of a kind."""
        return [
            each for each in self.inner if each[1].primitive is primitive and self._is_own(each[1])
        ]

    def parts(self, separator: Primitive) -> list[list[Numbered]]:
        """The equations before, between and after the region's own `separator`s, without its markers."""
        parts: list[list[Numbered]] = [[]]
        for number, eqn in self.inner:
            if not self._is_own(eqn):
                parts[-1].append((number, eqn))
            elif eqn.primitive is separator:
                parts.append([])
        return parts


def _strong(value: Any) -> Any:
    """`value` without a weak type: what a loop carries has one type throughout."""
    aval = jax.typeof(value)
    return jax.lax.convert_element_type(value, aval.dtype) if aval.weak_type else value
