"""What kernels read and write, on steps small enough to count by hand."""

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.ir.array_sizes import array_bytes
from autopar.ir.graph import aval_of
from autopar.ir.spec import LogicalMesh
from autopar.ir.step_graph import StepGraph
from autopar.sharding.mesh_costs import COMBINED_BYTES, Combined, MeshCosts
from autopar.sharding.objective import enumerate_decisions
from autopar.sharding.options import AUTO, DATA_PARALLEL
from autopar.sharding.step_memory import StepMemory
from autopar.tracing.trace import trace
from autopar.xla_fusion import XLA_VERSION, takes_two_kernels, traffic
from simulator.costs.cost_model import BandwidthOnly, ClusterCosts
from simulator.hardware.cluster import Cluster
from simulator.work import CollectiveKind, Kernel

MATRIX = jax.ShapeDtypeStruct((64, 64), "float32")
SIZE = 64 * 64 * 4
ROW = 64 * 4
A100 = ClusterCosts(Cluster.load("dgx_a100_80"))


def traced(fun, *args) -> StepGraph:
    return trace(fun, args or (MATRIX,), ())


def counted(step: StepGraph, fuses_rows: bool = True) -> tuple[int, int]:
    """Kernels and bytes of a step, copies left out."""

    def size(atom) -> int:
        return array_bytes(aval_of(atom).shape, aval_of(atom).dtype)

    kernels = total = 0
    for eqn, moved in zip(step.jaxpr.eqns, traffic(step, fuses_rows).moved, strict=True):
        kernels += moved.kernels
        total += sum(n * size(atom) for n, atom in zip(moved.reads, eqn.invars, strict=True))
        total += sum(n * size(var) for n, var in zip(moved.writes, eqn.outvars, strict=True))
    return kernels, total


def named(step: StepGraph, name: str) -> list:
    return [
        m
        for e, m in zip(step.jaxpr.eqns, traffic(step).moved, strict=True)
        if e.primitive.name == name
    ]


def test_kernels_that_read_the_same_become_one():
    assert counted(traced(lambda x: (x + 1, jnp.sin(x)))) == (1, 3 * SIZE)


def test_a_kernel_that_goes_on_with_what_another_makes_is_one_with_it():
    assert counted(traced(lambda x: (y := jnp.sin(x), y * 2))) == (1, 3 * SIZE)


def test_what_is_not_written_is_read_anew_by_every_kernel_that_computes_it():
    step = traced(
        lambda x: ((y := jnp.sin(x)).sum(0), y.sum(1))
    )  # along rows and columns: two kernels
    assert counted(step) == (2, 2 * (SIZE + ROW))


def test_what_only_its_own_kernel_reads_is_not_written_even_if_it_is_expensive():
    assert counted(traced(lambda x: ((y := jnp.tanh(x)) + 1, y * 2))) == (1, 3 * SIZE)


def test_a_softmax_is_one_kernel_where_rows_can_wait_and_three_where_they_can_not():
    def softmax(x):
        e = jnp.exp(x - x.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    step = traced(softmax)
    assert counted(step) == (1, 2 * SIZE)
    # max: x; sum: x, max; the rest: x, max, sum, and the result
    assert counted(step, fuses_rows=False) == (3, 4 * SIZE + 2 * ROW + 3 * ROW)


def test_rows_wait_from_compute_capability_8_on():
    mesh = LogicalMesh((8,), ("x",))
    assert MeshCosts(mesh, A100).fuses_rows
    assert not MeshCosts(mesh, ClusterCosts(Cluster.load("p3.16xlarge"))).fuses_rows


def test_a_product_adds_a_bias_and_then_an_array_before_it_writes():
    bias = jax.ShapeDtypeStruct((64,), "float32")
    step = traced(lambda x, w, b: x @ w + b + x, MATRIX, MATRIX, bias)
    first, second = named(step, "add")
    assert (first.kernels, sum(first.writes), sum(first.reads)) == (0, 0, 0)  # next to nothing
    assert (second.kernels, sum(second.writes), sum(second.reads)) == (0, 0, 1)
    assert sum(second.copies) == 1  # to add to: the step's argument has to stay
    assert named(step, "dot_general")[0].writes == (1,)


def test_scattering_into_zeros_that_are_added_moves_the_updates_alone():
    updates = jax.ShapeDtypeStruct((8, 64), "float32")
    step = traced(
        lambda x, u: jnp.zeros((64, 64)).at[jnp.arange(8)].add(u) + jnp.sin(x), MATRIX, updates
    )
    (scatter,) = named(step, "scatter-add")
    assert scatter.reads[2] == 3
    assert scatter.writes == (0,)  # each update is read, and what it is added to read and written
    assert sum(moved.writes[0] for moved in named(step, "add")[-1:]) == 1


def test_a_lookup_reads_what_it_returns_and_computes_no_more():
    step = traced(lambda x: jnp.sin(x)[3, :5])
    assert not any(sum(moved.writes) for moved in named(step, "sin"))


def test_products_share_a_copy_in_the_layout_that_they_want():
    heads = jax.ShapeDtypeStruct((2, 16, 4, 8), "float32")
    step = traced(
        lambda q, k: (jnp.einsum("bqhd,bkhd->bhqk", q, k), jnp.einsum("bqhd,bkhd->bhqk", 2 * q, k)),
        heads,
        heads,
    )
    first, second = (sorted(moved.copies) for moved in named(step, "dot_general"))
    assert first == [0, 1, 1]
    assert second == [0, 0, 0]  # k is there already, and 2 * q is written as wanted


@pytest.mark.parametrize(
    ("dtype", "size", "copies"), [("float16", 60, 2), ("float16", 64, 0), ("float32", 60, 0)]
)
def test_products_of_half_precision_are_padded_to_multiples_of_eight(
    dtype: str, size: int, copies: int
):
    array = jax.ShapeDtypeStruct((size, size), dtype)
    (product,) = named(traced(lambda a, b: a @ b, array, array), "dot_general")
    assert sum(product.copies) == copies


def test_nothing_is_merged_across_the_border_of_a_loop():
    def body(x):
        total, _ = lax.scan(lambda c, _: (c + jnp.sin(x), None), x, None, length=3)
        return total, jnp.cos(x)

    step = traced(body)
    inside = [moved for moved in named(step, "add") if moved.kernels]
    assert len(inside) == 1
    assert sum(moved.kernels for moved in named(step, "cos")) == 1


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [((8, 8192), 0, False), ((8192, 8), 0, True), ((8, 8192), 1, False)],
)
def test_long_columns_are_reduced_in_two_kernels(shape: tuple[int, int], axis: int, expected: bool):
    step = traced(lambda x: x.sum(axis), jax.ShapeDtypeStruct(shape, "float32"))
    (eqn,) = step.jaxpr.eqns
    assert takes_two_kernels(eqn, shape) == expected


def test_combined_collectives_share_the_time_of_a_full_one_and_large_ones_run_alone():
    groups, full = (tuple(range(8)),), float(COMBINED_BYTES)
    combined = Combined(A100)
    wholes: dict[CollectiveKind, float] = {"all_gather": full, "reduce_scatter": 8 * full}
    for kind, whole in wholes.items():
        assert combined.collective(kind, whole / 10, groups) == pytest.approx(
            A100.collective(kind, whole, groups) / 10
        )
        assert combined.collective(kind, 2 * whole, groups) == A100.collective(
            kind, 2 * whole, groups
        )
    moved = A100.kernel(
        Kernel("copy", "memory", 0.0, 4 * full / 10)
    )  # into one array with the others, and out of it
    expected = A100.collective("all_reduce", full, groups) / 10 + moved
    assert combined.collective("all_reduce", full / 10, groups) == pytest.approx(expected)


def trained(w, x):
    return jax.tree.map(
        lambda p, g: p - 0.1 * g, w, autopar.grad(lambda w: jnp.mean(jnp.tanh(x @ w[0]) @ w[1]))(w)
    )


def test_adding_up_microbatches_reads_two_and_writes_one():
    weights = [jax.ShapeDtypeStruct((256, 256), "float32")] * 2
    args = weights, jax.ShapeDtypeStruct((32, 256), "float32")
    mesh = LogicalMesh((1,), ("x",))
    once, four = (
        enumerate_decisions(trace(trained, args, (1,), count), MeshCosts(mesh, A100), AUTO)
        for count in (2, 4)
    )

    def adding(decisions, step) -> float:
        (mark, _), *_ = step.microbatching.marks
        return sum(
            float(cost.sum(axis=0).min()) for number, _, cost in decisions.shares if number == mark
        )

    copy = MeshCosts(mesh, A100).copy(3 * 256 * 256 * 4)
    for count, decisions in ((2, once), (4, four)):
        assert adding(decisions, trace(trained, args, (1,), count)) >= 2 * count * copy * (1 - 1e-6)


def test_gradients_of_large_weights_from_small_batches_wait_for_their_update():
    weights = [jax.ShapeDtypeStruct((512, 512), "float32")] * 2
    step = trace(trained, (weights, jax.ShapeDtypeStruct((16, 512), "float32")), (1,))
    mesh = LogicalMesh((8,), ("x",))
    decisions = enumerate_decisions(step, MeshCosts(mesh, BandwidthOnly()), DATA_PARALLEL)
    memory = StepMemory(step, decisions, mesh)
    size = 512 * 512 * 4
    choice = [int(np.argmin(cost)) for cost in decisions.costs]
    inputs = 2 * size + 2 * 512 * 4
    peak = memory.live_bytes(choice).max() - inputs
    assert size <= peak < 2 * size  # one gradient at a time


def test_the_model_is_of_the_xla_that_is_installed():
    """With another jaxlib, compare the model with compiled programs (`experiments.validation.fidelity`) and say so."""
    assert jaxlib.__version__ == XLA_VERSION
