"""Flat jaxprs: a traced step as one list of equations, calls inlined, so that every value has one name.

`jit`, `custom_jvp_call` and `custom_vjp_call` leave no trace: by the time a whole step has been traced its derivatives have been
taken. A differentiated `jax.checkpoint` becomes an `optimization_barrier` on its inputs followed by its body, which is
what JAX itself lowers it to: the recomputation stays.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import (
    closed_call_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    jit_p,
    remat_p,
)

type Atom = Var | Literal

_INNER_JAXPR = {
    jit_p: "jaxpr",
    closed_call_p: "call_jaxpr",
    custom_jvp_call_p: "call_jaxpr",
    custom_vjp_call_p: "call_jaxpr",
}


def flatten(jaxpr: Jaxpr) -> Jaxpr:
    """`jaxpr` with calls inlined, equal equations merged, unused ones removed and each variable bound once.

    Constants of inlined calls become leading `constvars`, with their values in `consts`.
    """
    builder = _Builder()
    invars = [Var(v.aval) for v in jaxpr.invars]
    outvars = builder.inline(jaxpr, invars)
    eqns = [eqn for _, eqn in needed(enumerate(builder.eqns), outvars)]
    return Jaxpr(
        constvars=list(builder.constants),
        invars=invars,
        outvars=outvars,
        eqns=eqns,
        consts=list(builder.constants.values()),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


class _Builder:
    def __init__(self) -> None:
        self.eqns: list[JaxprEqn] = []
        self.constants: dict[Var, Any] = {}
        self._constant_of: dict[int, Var] = {}
        self._known: dict[Any, list[Var]] = {}

    def inline(self, jaxpr: Jaxpr, args: Sequence[Atom], name_stack: Any = None) -> list[Atom]:
        """Append the equations of `jaxpr` applied to `args`; return its results."""
        env: dict[Var, Atom] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, jaxpr.consts, strict=True):
            env[var] = self._constant(value, var)

        def rename(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            invars = [rename(atom) for atom in eqn.invars]
            stack = eqn.source_info.name_stack if name_stack is None else name_stack + eqn.source_info.name_stack
            if eqn.primitive in _INNER_JAXPR:
                outvars = self.inline(eqn.params[_INNER_JAXPR[eqn.primitive]], invars, stack)
            elif eqn.primitive is remat_p:
                if eqn.params["differentiated"]:
                    invars = self._barrier(invars, eqn)
                outvars = self.inline(eqn.params["jaxpr"], invars, stack)
            else:
                outvars = self._apply(eqn.replace(invars=invars), stack)
            env.update(zip(eqn.outvars, outvars, strict=True))
        return [rename(atom) for atom in jaxpr.outvars]

    def _apply(self, eqn: JaxprEqn, name_stack: Any) -> list[Var]:
        """The results of `eqn`, computed before if there is an equal equation (what a barrier holds back is not equal)."""
        key = _value_number(eqn)
        if key is None or key not in self._known:
            outvars = [Var(v.aval) for v in eqn.outvars]
            source = eqn.source_info.replace(name_stack=name_stack)
            self.eqns.append(eqn.replace(outvars=outvars, source_info=source))
            if key is None:
                return outvars
            self._known[key] = outvars
        return self._known[key]

    def _constant(self, value: Any, var: Var) -> Var:
        if id(value) not in self._constant_of:
            self._constant_of[id(value)] = new = Var(var.aval)
            self.constants[new] = value
        return self._constant_of[id(value)]

    def _barrier(self, invars: list[Atom], eqn: JaxprEqn) -> list[Atom]:
        """Hold `invars` behind a barrier, so that the compiler recomputes what follows instead of reusing it."""
        prevent_cse = eqn.params["prevent_cse"]
        marks = prevent_cse if isinstance(prevent_cse, tuple) else (prevent_cse,) * len(invars)
        held = [atom for atom, mark in zip(invars, marks, strict=True) if mark and isinstance(atom, Var)]
        if not held:
            return invars
        outvars = [Var(v.aval) for v in held]
        barrier = jax.lax.optimization_barrier_p
        self.eqns.append(eqn.replace(invars=list(held), outvars=outvars, primitive=barrier, params={}))
        after = dict(zip(held, outvars, strict=True))
        return [after.get(atom, atom) if isinstance(atom, Var) else atom for atom in invars]


def _value_number(eqn: JaxprEqn) -> Any:
    """Equal for equations that compute the same; None for one that must stay, or whose parameters can't be compared."""
    if eqn.effects:
        return None
    # By repr: -0.0 is not 0.0.
    atoms = tuple((repr(a.val), a.aval) if isinstance(a, Literal) else a for a in eqn.invars)
    context = (eqn.ctx.compute_type, eqn.ctx.threefry_partitionable, eqn.ctx.cur_abstract_mesh, eqn.ctx.xla_metadata)
    key = (eqn.primitive, atoms, tuple(sorted(eqn.params.items())), context)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def needed(
    eqns: Iterable[tuple[int, JaxprEqn]], outvars: Iterable[Atom], given: Collection[Var] = ()
) -> list[tuple[int, JaxprEqn]]:
    """The numbered equations on which `outvars` or an effect depend when the values in `given` are known, in order."""
    live = {atom for atom in outvars if isinstance(atom, Var)}.difference(given)
    kept = []
    for number, eqn in reversed(list(eqns)):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            kept.append((number, eqn))
            live.update(atom for atom in eqn.invars if isinstance(atom, Var) and atom not in given)
    return kept[::-1]


type Hook = Callable[[int, list[Any]], list[Any]]
"""Sees the number of an equation and its operands or results, and gives them back, perhaps changed."""


def evaluate(eqns: Iterable[tuple[int, JaxprEqn]], env: dict[Var, Any], before: Hook, after: Hook) -> None:
    """Run numbered `eqns` on the values in `env` and add their results, passing operands and results by the hooks."""
    for number, eqn in eqns:
        operands = before(number, [read(atom, env) for atom in eqn.invars])
        scope = str(eqn.source_info.name_stack)
        with eqn.ctx.manager, jax.named_scope(scope) if scope else nullcontext():
            result = eqn.primitive.bind(*operands, **eqn.params)
        results = list(result) if eqn.primitive.multiple_results else [result]
        env.update(zip(eqn.outvars, after(number, results), strict=True))


def aval_of(atom: Atom) -> ShapedArray:
    """Shape and dtype of an atom of a flat jaxpr, whose values are all arrays."""
    assert isinstance(atom.aval, ShapedArray), atom.aval
    return atom.aval


def read(atom: Atom, env: dict[Var, Any]) -> Any:
    """The value of `atom` under `env`."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def fingerprint(jaxpr: Jaxpr) -> str:
    """A short hash of what a flat jaxpr computes: equal for equal programs, whatever process traced them."""
    number: dict[Var, int] = {}

    def name(atom: Atom) -> str:
        if isinstance(atom, Literal):
            return f"{atom.val}:{atom.aval}"
        return f"%{number.setdefault(atom, len(number))}:{atom.aval}"

    digest = hashlib.sha256()
    for var in (*jaxpr.constvars, *jaxpr.invars):
        digest.update(name(var).encode())
    for eqn in jaxpr.eqns:
        params = _ADDRESS.sub("", str(sorted(eqn.params.items(), key=lambda item: item[0])))
        line = (*map(name, eqn.outvars), eqn.primitive.name, params, *map(name, eqn.invars))
        digest.update(" ".join(line).encode())
    digest.update(" ".join(map(name, jaxpr.outvars)).encode())
    return digest.hexdigest()[:16]


_ADDRESS = re.compile(r"0x[0-9a-f]+")
