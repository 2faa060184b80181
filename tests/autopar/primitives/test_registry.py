"""Records belong to JAX's primitives, and their algebra and movement hold numerically."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn, Primitive

import autopar
from autopar import report
from autopar.ir.evaluate import bind
from autopar.ir.graph import aval_of
from autopar.primitives import FAMILIES, PrimitiveRecord, record_of, register
from autopar.primitives.linearity import algebra_of, data_operands
from autopar.primitives.registry import PUBLIC_PRIMITIVES, is_registered
from tests.autopar.sharding.equation_cases import CASES, ints
from tests.autopar.sharding.shard_by_shard import equations
from tests.autopar.sharding.test_rules import pointwise_case

WITHOUT_RECORD = {
    # run inside other primitives, or never in a flat jaxpr: calls, control flow, derivatives
    *("cond", "custom_jvp_call", "custom_lin", "custom_vjp_call", "eval_jaxpr", "jit", "remat2"),
    *("scan", "stage", "while"),
    "mulhi",  # jaxlib 0.11.2 can't lower it on the CPU
    # state, tokens and manual meshes
    *("after_all", "axis_index", "create_token", "get", "ragged_all_to_all", "swap"),
}
"""JAX's public primitives without a planning record. Entries may be removed, but not added."""


def test_primitives_without_a_record_are_listed() -> None:
    missing = {p.name for p in PUBLIC_PRIMITIVES.values() if not is_registered(p)}
    assert missing == WITHOUT_RECORD


def test_records_are_of_primitives_that_exist() -> None:
    """Only these records are found by name, because JAX has no public object for them."""
    by_name = {
        name
        for family in FAMILIES.values()
        for name in family
        if isinstance(name, str) and name not in PUBLIC_PRIMITIVES
    }
    assert by_name == {
        *("all_gather_invariant", "psum2", "psum_invariant", "reduce_scatter"),
        *("cholesky_update", "lu_pivots_to_permutation", "symmetric_product"),
        *("pallas_call", "pure_callback", "ragged_dot_general", "shard_map", "grouped_dot"),
        *("to_device", "to_host"),
        *("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"),
        *("platform_index", "random_clone", "random_unwrap", "random_wrap"),
        *("nonbatchable", "nondifferentiable_backward", "nontraceable", "select_if_vmap"),
        *("unvmap_all", "unvmap_any", "unvmap_max"),
    }


def test_a_primitive_with_a_name_of_jax_does_not_get_the_record_of_that_name() -> None:
    primitive = Primitive("mul")
    primitive.def_abstract_eval(lambda x: x)
    (eqn,) = jax.make_jaxpr(primitive.bind)(jnp.ones(3)).eqns
    assert record_of(eqn) == PrimitiveRecord()
    assert record_of(eqn).is_replicated_only


def test_a_second_record_of_a_primitive_is_refused() -> None:
    with pytest.raises(ValueError, match="primitive add has a record already"):
        register("add", PrimitiveRecord())


def values() -> Iterator[tuple[str, JaxprEqn, list[np.ndarray]]]:
    """Yield the equations of each primitive that has a case, with values of their operands."""
    for name in FAMILIES["pointwise"]:
        yield from (
            (str(name), *case) for case in equations(str(name), *pointwise_case(str(name), 8))
        )
    for label, case in CASES.items():
        name = label.split(":")[0]
        yield from ((label, *equation) for equation in equations(name, *case(lambda: 4)))


type Equations = dict[str, tuple[JaxprEqn, list[np.ndarray]]]


@pytest.fixture(scope="module")
def cases() -> Equations:
    return {f"{label} {n}": (eqn, args) for n, (label, eqn, args) in enumerate(values())}


def evaluate_scaled(
    eqn: JaxprEqn, args: list[Any], operands: Any, factor: float
) -> list[np.ndarray]:
    operand_values = [arg * factor if k in operands else arg for k, arg in enumerate(args)]
    operand_values = [
        jnp.asarray(a, aval_of(atom).dtype)
        for a, atom in zip(operand_values, eqn.invars, strict=True)
    ]
    return [np.asarray(result) for result in bind(eqn, operand_values)]


def labels_of_algebra(cases: Equations, algebra: str | None) -> list[str]:
    """Return labels of equations with this algebra whose data and results are real numbers."""
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
    labels = labels_of_algebra(cases, algebra)
    assert labels
    for label in labels:
        eqn, args = cases[label]
        once = evaluate_scaled(eqn, args, (), 1.0)
        twice = evaluate_scaled(eqn, args, data_operands(eqn), 2.0)
        for a, b in zip(once, twice, strict=True):
            np.testing.assert_allclose(2 * a, b, rtol=1e-5, err_msg=label)


def test_products_are_linear_in_each_operand_and_quotients_in_the_first(cases: Equations) -> None:
    labels = [(label, k) for label in labels_of_algebra(cases, "product") for k in (0, 1)]
    labels += [(label, 0) for label in labels_of_algebra(cases, "quotient")]
    assert len(labels) > 10
    for label, operand in labels:
        eqn, args = cases[label]
        (once,), (thrice,) = (
            evaluate_scaled(eqn, args, (), 1.0),
            evaluate_scaled(eqn, args, (operand,), 3.0),
        )
        np.testing.assert_allclose(3 * once, thrice, rtol=1e-5, err_msg=label)


def test_linear_primitives_are_additive(cases: Equations) -> None:
    for label in labels_of_algebra(cases, "linear"):
        eqn, args = cases[label]
        data = data_operands(eqn)
        flipped = [np.flip(arg) if k in data else arg for k, arg in enumerate(args)]
        sums = [
            a + b if k in data else a for k, (a, b) in enumerate(zip(args, flipped, strict=True))
        ]
        parts = zip(
            evaluate_scaled(eqn, args, (), 1.0), evaluate_scaled(eqn, flipped, (), 1.0), strict=True
        )
        for total, (a, b) in zip(evaluate_scaled(eqn, sums, (), 1.0), parts, strict=True):
            np.testing.assert_allclose(total, a + b, rtol=1e-4, atol=1e-4, err_msg=label)


def test_results_of_movements_are_elements_of_their_operands(cases: Equations) -> None:
    movements = {k: v for k, v in cases.items() if record_of(v[0]).movement in ("shape", "part")}
    assert len(movements) > 20
    for label, (eqn, args) in movements.items():
        data = np.unique(args[0])
        for result in bind(eqn, args):
            assert np.isin(np.asarray(result), [*data, 0]).all(), label
            if record_of(eqn).movement == "part":
                assert result.size <= np.size(args[0]) or eqn.primitive.name == "gather"


def test_commuting_operands_may_be_exchanged(cases: Equations) -> None:
    commuting = {k: v for k, v in cases.items() if record_of(v[0]).commutes}
    assert {label.split()[0].split(":")[0] for label in commuting} >= {"add", "max", "mul", "xor"}
    for label, (eqn, (left, _)) in commuting.items():
        right = np.asarray(np.flip(left))
        np.testing.assert_array_equal(*bind(eqn, (left, right)), *bind(eqn, (right, left)), label)


def test_rounding_operations_have_no_algebra() -> None:
    """The sum of rounded results of microbatches differs from the rounded result of the batch."""

    def step(x: Any) -> Any:
        return x.sum().astype(np.int32), jax.lax.div(x.astype(np.int32), np.int32(2))

    eqns = jax.make_jaxpr(step)(ints(4)).eqns
    assert {eqn.primitive.name: algebra_of(eqn) for eqn in eqns} == {
        "reduce_sum": "linear",
        "convert_element_type": None,
        "div": None,
    }


def test_the_table_of_a_steps_primitives_has_their_records() -> None:
    own_primitive = Primitive("own_primitive")
    own_primitive.def_abstract_eval(lambda x: x)

    def step(x: Any) -> Any:
        jax.debug.print("{}", x)
        return own_primitive.bind(jnp.tanh(x @ x.T) @ x)

    table = report.primitives(step, jax.ShapeDtypeStruct((8, 4), np.float32)).set_index("primitive")
    assert table["sharding"].to_dict() == {
        "debug_print": "no results",
        "dot_general": "rule",
        "own_primitive": "replicated",
        "tanh": "rule",
        "transpose": "rule",
    }
    assert table.loc["dot_general", "count"] == 2
    assert table.loc["dot_general", "fusion"] == "contraction"
    assert table.loc["tanh", "algebra"] == ""
    refused = report.primitives(lambda x: jax.experimental.io_callback(np.sin, x, x), np.float32(1))
    assert "refused" in set(refused["sharding"])


TABLES = {
    "ir/calls.py": "the parameter that is called; flattening is below the registry",
    "ir/control_flow.py": "defines the markers that it lists",
    "ir/flatten.py": "one rewrite: reductions over names of `jax.vmap`; below the registry",
    "microbatch/created_rows.py": "defines the primitives of rows that it lists",
    "tracing/accumulation_loop.py": "defines the primitives of chunks that it lists",
    "tracing/row_tables.py": "numpy's function of each primitive, for an evaluation of constants",
}
"""The modules outside of the registry with a table of primitives, and why it stands there."""


def test_what_is_known_of_primitives_stands_in_the_registry() -> None:
    folder = Path(autopar.__file__).parent
    paths = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.py"))]
    outside = [path for path in paths if not path.startswith("primitives/")]
    assert [path for path in outside if _has_table(folder / path)] == list(TABLES)


def _has_table(path: Path) -> bool:
    """Return whether a constant of a module lists several primitives, as objects or by name."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            objects = set(re.findall(r"\b\w+_p\b", ast.unparse(node.value)))
            parts = ast.walk(node.value)
            constants = {part.value for part in parts if isinstance(part, ast.Constant)}
            if len(objects) > 1 or len(constants & _NAMES) > 2:
                return True
    return False


_NAMES = {
    name
    for family, records in FAMILIES.items()
    for name in records
    if isinstance(name, str) and family != "collectives"
} - {"add", "and", "copy", "max", "min", "name", "not", "or", "rem", "round"}
"""The names of primitives with a record, without collectives and plain words."""
