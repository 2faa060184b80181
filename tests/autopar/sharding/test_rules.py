"""Every sharding that a rule allows gives the results of the unsharded equation."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.ir.control_flow import MARKERS
from autopar.ir.flatten import flatten
from autopar.ir.spec import LogicalMesh
from autopar.primitives import (
    FAMILIES,
    MissingRuleError,
    op_factors,
    record_of,
)
from tests.autopar.sharding.equation_cases import CASES, RANDOM, ints
from tests.autopar.sharding.shard_by_shard import check_all, device_mesh, equations

# Hypothesis tries the first of each: the sizes and the mesh with the most candidates.
MESHES = [LogicalMesh(shape, ("x", "y")[: len(shape)]) for shape in ((2, 4), (2, 2), (4,), (2,))]
SIZES = [8, 4, 1, 6, 2, 3]
PRIMITIVES = {label.split(":")[0] for label in CASES}


@pytest.mark.parametrize(
    "family", [family for family, names in FAMILIES.items() if PRIMITIVES & set(names)]
)
def test_every_candidate_of_a_family_equals_the_unsharded_equation(family: str) -> None:
    """The first case of each primitive is on a mesh of two axes, the others are on one axis.

    Empty arrays have a program of their own: XLA:CPU of jaxlib 0.11.2 crashes when it combines
    collectives of empty arrays with others.
    """
    firsts: list[Any] = []
    others: list[Any] = []
    for name in sorted(PRIMITIVES & set(FAMILIES[family])):
        cases = [case(lambda: 8) for label, case in CASES.items() if label.split(":")[0] == name]
        first, *more = [equations(name, fun, args) for fun, args in cases]
        firsts += first
        others += [equation for of_case in more for equation in of_case]
    assert min(check_all(firsts, MESHES[0])) > 1
    check_all([case for case in others if not _is_empty(case)], MESHES[2])
    check_all([case for case in others if _is_empty(case)], MESHES[2])


def _is_empty(case: tuple[JaxprEqn, Sequence[Any]]) -> bool:
    eqn, _ = case
    return any(var.aval.size == 0 for var in eqn.outvars)


@pytest.mark.slow
@pytest.mark.parametrize("label", CASES)
@settings(max_examples=1)
@given(data=st.data())
def test_every_candidate_equals_the_unsharded_equation(label: str, data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    fun, args = CASES[label](lambda: data.draw(st.sampled_from(SIZES)))
    check_all(equations(label.split(":")[0], fun, args), mesh)


@pytest.mark.parametrize("label", CASES)
def test_every_case_has_a_sharded_candidate(label: str) -> None:
    fun, args = CASES[label](lambda: 8)
    eqns = equations(label.split(":")[0], fun, args)
    assert eqns
    assert all(len(op_factors(eqn).assignments(MESHES[-1])) > 1 for eqn, _ in eqns)


def test_every_primitive_with_a_rule_has_a_case() -> None:
    """Control flow is tested in test_control_flow, shard_map in test_manual_regions.

    cuDNN's attention, in test_fused_attention, has no form on the CPU.
    """
    covered = PRIMITIVES | set(RANDOM) | {marker.name for marker in MARKERS} | {"shard_map"}
    special = {
        "collectives",
        "fused_attention",
        "library_markers",
        "loops",
        "moves",
        "opaque",
        "pointwise",
    }
    names = {name for family in FAMILIES.keys() - special for name in FAMILIES[family]}
    assert names - covered == set()


def test_pointwise_primitives_on_shards_equal_one_device() -> None:
    """All but `stop_gradient`, which flattening leaves out."""
    cases = []
    for name in sorted({*map(str, FAMILIES["pointwise"])} - {"stop_gradient"}):
        (equation,) = equations(name, *pointwise_case(name, 4))
        cases.append(equation)
    assert set(check_all(cases, MESHES[-1])) == {2}


_SPECIAL = {
    "add_any": lambda x: jax.vjp(lambda x: (x, x), x)[1]((x, 2 * x)),
    "convert_element_type": lambda x: x.astype(np.int32),
    "copy": jnp.copy,
    "eq_to": lambda x: lax.eq_to_p.bind(x, x),
    "le_to": lambda x: lax.le_to_p.bind(x, x),
    "lt_to": lambda x: lax.lt_to_p.bind(x, x),
    "igamma_grad_a": lambda x: lax.igamma_grad_a(abs(x) + 1, abs(x) + 2),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "name": lambda x: checkpoint_name(x, "x"),
    "reduce_precision": lambda x: lax.reduce_precision(x, 4, 3),
    "regularized_incomplete_beta": lambda x: lax.betainc(
        abs(x) + 1, abs(x) + 2, jnp.clip(x / 4 + 0.5, 0, 1)
    ),
    "select_n": lambda x: lax.select_n(x > 0, x, 2 * x),
    "square": lax.square,
}
_OF_INTEGERS = {
    *(
        "and",
        "clz",
        "not",
        "or",
        "population_count",
        "shift_left",
        "shift_right_arithmetic",
        "xor",
    ),
    "shift_right_logical",
}


def pointwise_case(name: str, size: int) -> tuple[Any, tuple[Any, ...]]:
    """Return a function that uses the primitive, and its arguments of `size` elements."""
    x = ints(
        size,
        dtype=np.int32
        if name in _OF_INTEGERS
        else np.complex64
        if name in ("conj", "imag", "real")
        else np.float32,
    )
    if name in _SPECIAL:
        return _SPECIAL[name], (x,)
    primitive = getattr(lax, f"{name}_p")
    fun = getattr(lax, name if hasattr(lax, name) else f"bitwise_{name}", None) or primitive.bind
    for count in (1, 2, 3):
        try:
            jax.eval_shape(fun, *(x,) * count)
        except TypeError:
            continue
        return fun, (x,) * count
    raise AssertionError(f"how is {name} called?")


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_drawn_by_shard_without_communication(name: str) -> None:
    """The numbers equal those of one device."""
    key, rows = jax.random.key(3), ints(8, 2, low=0, dtype=np.uint32)
    fun = RANDOM[name]
    jaxpr = flatten(jax.make_jaxpr(fun)(key, rows))
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == name]
    factors = op_factors(eqn)
    assert factors.results[0][0] == (0,)
    assert factors.kinds[0] == "parallel"
    sharded = NamedSharding(device_mesh(LogicalMesh((4,), ("x",))), P("x"))
    replicated = NamedSharding(sharded.mesh, P())
    compiled = (
        jax.jit(fun, in_shardings=(replicated, sharded), out_shardings=sharded)
        .lower(key, rows)
        .compile()
    )
    text = compiled.as_text()
    assert not any(
        kind in text for kind in ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    )
    placed = jax.device_put(key, replicated), jax.device_put(rows, sharded)
    np.testing.assert_allclose(compiled(*placed), fun(key, rows), rtol=1e-6)


def test_a_primitive_with_effects_and_without_a_rule_is_refused() -> None:
    jaxpr = jax.make_jaxpr(lambda x: jax.debug.callback(print, x))(1.0)
    with pytest.raises(MissingRuleError, match="no sharding rule for primitive 'debug_callback'"):
        op_factors(jaxpr.eqns[-1])


def test_a_primitive_with_the_replicated_rule_has_one_assignment() -> None:
    jaxpr = jax.make_jaxpr(lambda k: lax.rng_bit_generator(k, (8, 8)))(np.zeros(4, np.uint32))
    (eqn,) = jaxpr.eqns
    assert record_of(eqn).is_replicated_only
    assert len(op_factors(eqn).assignments(MESHES[0])) == 1
