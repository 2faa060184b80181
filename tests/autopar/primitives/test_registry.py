"""Records are JAX's primitives, not their names; what they claim of algebra and movement holds in numbers."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn, Primitive

from autopar import report
from autopar.ir.evaluate import bind
from autopar.ir.graph import aval_of
from autopar.primitives import FAMILIES, PrimitiveRecord, record_of, register
from autopar.primitives.linearity import algebra_of, data_operands
from autopar.primitives.registry import is_registered, public_primitives
from tests.autopar.sharding.equation_cases import CASES, ints
from tests.autopar.sharding.shard_by_shard import equations
from tests.autopar.sharding.test_rules import pointwise_case

WITHOUT_RECORD = {
    # run inside other primitives, or never in a flat jaxpr: calls, control flow, derivatives
    *("cond", "custom_jvp_call", "custom_lin", "custom_vjp_call", "eval_jaxpr", "jit", "remat2"),
    *("scan", "stage", "while"),
    "mulhi",  # jaxlib 0.11.2 can't lower it on the CPU
    # state, tokens and manual meshes
    *("after_all", "axis_index", "create_token", "empty2", "get", "ragged_all_to_all", "swap"),
}
"""JAX's public primitives of which planning knows nothing. This list only shrinks."""


def test_what_has_no_record_is_listed() -> None:
    missing = {p.name for p in public_primitives().values() if not is_registered(p)}
    assert missing == WITHOUT_RECORD


def test_records_are_of_primitives_that_exist() -> None:
    """Those that JAX has no public object of are few, and known by name."""
    by_name = {
        name
        for family in FAMILIES.values()
        for name in family
        if isinstance(name, str) and name not in public_primitives()
    }
    assert by_name == {
        *("all_gather_invariant", "psum2", "psum_invariant", "reduce_scatter"),
        *("cholesky_update", "lu_pivots_to_permutation", "symmetric_product"),
        *("pallas_call", "pure_callback", "ragged_dot_general", "shard_map"),
        *("random_clone", "random_unwrap", "random_wrap"),
    }


def test_a_primitive_is_not_known_by_a_name_that_it_shares_with_one_of_jax() -> None:
    own = Primitive("mul")
    own.def_abstract_eval(lambda x: x)
    (eqn,) = jax.make_jaxpr(own.bind)(jnp.ones(3)).eqns
    assert record_of(eqn) == PrimitiveRecord()
    assert record_of(eqn).is_replicated_only


def test_a_primitive_has_one_record() -> None:
    with pytest.raises(ValueError, match="primitive add has a record already"):
        register("add", PrimitiveRecord())


def values() -> Iterator[tuple[str, JaxprEqn, list[np.ndarray]]]:
    """Equations of each primitive that has a case, with values of their operands."""
    for name in FAMILIES["pointwise"]:
        yield from (
            (str(name), *case) for case in equations(str(name), *pointwise_case(str(name), 8))
        )
    for label, case in CASES.items():
        name = label.split(":")[0]
        yield from ((label, *found) for found in equations(name, *case(lambda: 4)))


type Equations = dict[str, tuple[JaxprEqn, list[np.ndarray]]]


@pytest.fixture(scope="module")
def cases() -> Equations:
    return {f"{label} {n}": (eqn, args) for n, (label, eqn, args) in enumerate(values())}


def scaled(eqn: JaxprEqn, args: list[Any], operands: Any, by: float) -> list[np.ndarray]:
    changed = [arg * by if k in operands else arg for k, arg in enumerate(args)]
    changed = [
        jnp.asarray(a, aval_of(atom).dtype) for a, atom in zip(changed, eqn.invars, strict=True)
    ]
    return [np.asarray(result) for result in bind(eqn, changed)]


def of_floats(cases: Equations, algebra: str | None) -> list[str]:
    """Labels of equations with this algebra whose data and results are real numbers."""
    return [
        label
        for label, (eqn, _) in cases.items()
        if algebra_of(eqn) == algebra
        and all(
            jnp.issubdtype(aval_of(atom).dtype, jnp.floating)
            for atom in (*(eqn.invars[k] for k in data_operands(eqn)), *eqn.outvars)
        )
    ]


@pytest.mark.parametrize("algebra", ["sum", "linear", "selection", "homogeneous"])
def test_results_scale_with_their_data(cases: Equations, algebra: str) -> None:
    labels = of_floats(cases, algebra)
    assert labels
    for label in labels:
        eqn, args = cases[label]
        once = scaled(eqn, args, (), 1.0)
        twice = scaled(eqn, args, data_operands(eqn), 2.0)
        for a, b in zip(once, twice, strict=True):
            np.testing.assert_allclose(2 * a, b, rtol=1e-5, err_msg=label)


def test_products_are_linear_in_each_operand_and_quotients_in_the_first(cases: Equations) -> None:
    labels = [(label, k) for label in of_floats(cases, "product") for k in (0, 1)]
    labels += [(label, 0) for label in of_floats(cases, "quotient")]
    assert len(labels) > 10
    for label, operand in labels:
        eqn, args = cases[label]
        (once,), (thrice,) = scaled(eqn, args, (), 1.0), scaled(eqn, args, (operand,), 3.0)
        np.testing.assert_allclose(3 * once, thrice, rtol=1e-5, err_msg=label)


def test_linear_results_add_up(cases: Equations) -> None:
    for label in of_floats(cases, "linear"):
        eqn, args = cases[label]
        data = data_operands(eqn)
        other = [np.flip(arg) if k in data else arg for k, arg in enumerate(args)]
        added = [
            a + b if k in data else a for k, (a, b) in enumerate(zip(args, other, strict=True))
        ]
        parts = zip(scaled(eqn, args, (), 1.0), scaled(eqn, other, (), 1.0), strict=True)
        for total, (a, b) in zip(scaled(eqn, added, (), 1.0), parts, strict=True):
            np.testing.assert_allclose(total, a + b, rtol=1e-4, atol=1e-4, err_msg=label)


def test_what_moves_computes_nothing(cases: Equations) -> None:
    moved = {k: v for k, v in cases.items() if record_of(v[0]).movement in ("shape", "part")}
    assert len(moved) > 20
    for label, (eqn, args) in moved.items():
        data = np.unique(args[0])
        for result in bind(eqn, args):
            assert np.isin(np.asarray(result), [*data, 0]).all(), label
            if record_of(eqn).movement == "part":
                assert result.size <= np.size(args[0]) or eqn.primitive.name == "gather"


def test_operands_that_commute_may_be_exchanged(cases: Equations) -> None:
    found = {k: v for k, v in cases.items() if record_of(v[0]).commutes}
    assert {label.split()[0].split(":")[0] for label in found} >= {"add", "max", "mul", "xor"}
    for label, (eqn, (left, _)) in found.items():
        right = np.asarray(np.flip(left))
        np.testing.assert_array_equal(*bind(eqn, (left, right)), *bind(eqn, (right, left)), label)


def test_rounding_does_not_scale() -> None:
    """A mean that is converted to an integer in each microbatch is not the whole batch's."""

    def step(x: Any) -> Any:
        return x.sum().astype(np.int32), jax.lax.div(x.astype(np.int32), np.int32(2))

    eqns = jax.make_jaxpr(step)(ints(4)).eqns
    assert {eqn.primitive.name: algebra_of(eqn) for eqn in eqns} == {
        "reduce_sum": "linear",
        "convert_element_type": None,
        "div": None,
    }


def test_a_step_is_listed_by_what_is_known_of_its_primitives() -> None:
    own = Primitive("of_nobody")
    own.def_abstract_eval(lambda x: x)

    def step(x: Any) -> Any:
        jax.debug.print("{}", x)
        return own.bind(jnp.tanh(x @ x.T) @ x)

    table = report.primitives(step, jax.ShapeDtypeStruct((8, 4), np.float32)).set_index("primitive")
    assert table["sharding"].to_dict() == {
        "debug_print": "no results",
        "dot_general": "rule",
        "of_nobody": "replicated",
        "tanh": "rule",
        "transpose": "rule",
    }
    assert table.loc["dot_general", "count"] == 2
    assert table.loc["dot_general", "fusion"] == "contraction"
    assert table.loc["tanh", "algebra"] == ""
    refused = report.primitives(lambda x: jax.experimental.io_callback(np.sin, x, x), np.float32(1))
    assert "refused" in set(refused["sharding"])
