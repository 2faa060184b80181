"""Kernels of fused steps and the bytes that they move, compared with counts by hand."""

import math

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
from autopar.lowering.target import compile_for, target_mesh
from autopar.sharding.mesh_costs import COMBINED_BYTES, Combined, MeshCosts
from autopar.sharding.objective import enumerate_decisions
from autopar.sharding.options import AUTO, DATA_PARALLEL
from autopar.sharding.step_memory import StepMemory
from autopar.tracing.trace import trace
from autopar.xla_fusion import XLA_VERSION, lifetimes, takes_two_kernels, traffic
from simulator.costs.cost_model import ClusterCosts
from simulator.hardware.cluster import Cluster
from simulator.work import CollectiveKind, Kernel
from tests.toy_costs import BandwidthOnly

MATRIX = jax.ShapeDtypeStruct((64, 64), "float32")
SIZE = 64 * 64 * 4
ROW = 64 * 4
A100 = ClusterCosts(Cluster.load("dgx_a100_80"))


def traced(fun, *args) -> StepGraph:
    return trace(fun, args or (MATRIX,), ())


def count_kernels_and_bytes(step: StepGraph, row_padding: float = math.inf) -> tuple[int, int]:
    """Count the kernels of a step and the bytes that they read and write, without copies."""

    def size(atom) -> int:
        return array_bytes(aval_of(atom).shape, aval_of(atom).dtype)

    kernels = total = 0
    for eqn, moved in zip(step.jaxpr.eqns, traffic(step, row_padding).moved, strict=True):
        kernels += moved.kernels
        total += sum(n * size(atom) for n, atom in zip(moved.reads, eqn.invars, strict=True))
        total += sum(n * size(var) for n, var in zip(moved.writes, eqn.outvars, strict=True))
    return kernels, total


def traffic_of(step: StepGraph, name: str) -> list:
    return [
        m
        for e, m in zip(step.jaxpr.eqns, traffic(step).moved, strict=True)
        if e.primitive.name == name
    ]


def test_kernels_with_the_same_operand_are_fused():
    assert count_kernels_and_bytes(traced(lambda x: (x + 1, jnp.sin(x)))) == (1, 3 * SIZE)


def test_a_consumer_is_fused_with_its_producer():
    assert count_kernels_and_bytes(traced(lambda x: (y := jnp.sin(x), y * 2))) == (1, 3 * SIZE)


def test_a_fused_value_is_recomputed_from_its_operands_in_every_kernel():
    # sums along rows and along columns are two kernels
    step = traced(lambda x: ((y := jnp.sin(x)).sum(0), y.sum(1)))
    assert count_kernels_and_bytes(step) == (2, 2 * (SIZE + ROW))


def test_an_expensive_value_that_only_its_own_kernel_reads_is_not_written():
    assert count_kernels_and_bytes(traced(lambda x: ((y := jnp.tanh(x)) + 1, y * 2))) == (
        1,
        3 * SIZE,
    )


def softmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_a_softmax_is_one_kernel_with_row_fusion_and_three_without():
    step = traced(softmax)
    assert count_kernels_and_bytes(step) == (1, 2 * SIZE)
    # the maximum reads x; the sum reads x and the maximum; the quotient reads x and both
    assert count_kernels_and_bytes(step, row_padding=0) == (3, 4 * SIZE + 2 * ROW + 3 * ROW)


@pytest.mark.parametrize(("length", "row_padding"), [(64, 0.9), (48, 1.3)])
def test_a_softmax_of_rows_with_too_much_padding_writes_its_exponentials(length, row_padding):
    size = 64 * length * 4
    step = traced(softmax, jax.ShapeDtypeStruct((64, length), "float32"))
    # one kernel reads x and writes the exponentials; the sum and the quotient read them
    assert count_kernels_and_bytes(step, row_padding) == (2, 4 * size + 2 * ROW)
    (exponential,) = traffic(step, row_padding).exponentials
    assert step.jaxpr.eqns[exponential_of(step)].outvars == [exponential]
    assert exponential not in lifetimes(step)
    assert exponential in lifetimes(step, frozenset({exponential}))


def exponential_of(step: StepGraph) -> int:
    (number,) = (n for n, eqn in enumerate(step.jaxpr.eqns) if eqn.primitive.name == "exp")
    return number


def test_the_probabilities_of_a_loss_are_not_written():
    # the sum of exponentials of logits is their only reader, in every kernel
    step = traced(lambda x: jax.nn.logsumexp(x, axis=-1))
    assert count_kernels_and_bytes(step, row_padding=0.9) == count_kernels_and_bytes(step)
    assert not traffic(step, row_padding=0.9).exponentials


@pytest.mark.parametrize(
    ("name", "length"),
    [("dgx_h100", 768), ("dgx_h200", 768), ("dgx_h200", 1024), ("dgx_b200", 1024)],
)
def test_rows_of_attention_are_fused_where_xla_fuses_them(name, length):
    def loss(w, x):
        query, key, value = (jnp.einsum("blm,mhd->blhd", x, part) for part in w)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype("float32") * 0.125
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
        weights = jax.nn.softmax(scores).astype(x.dtype)
        return (jnp.einsum("bhqk,bkhd->bqhd", weights, value).astype("float32") ** 2).sum()

    cluster = Cluster.load(name)
    shapes = [
        jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((3, 1024, 16, 64), (16, length, 1024))
    ]
    mesh = target_mesh(cluster, (1,), ("x",))
    everywhere = jax.NamedSharding(mesh, jax.P())
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for x in shapes]
    compiled = compile_for(jax.jit(jax.grad(loss)), tuple(args), cluster)
    _, main = compiled.hlo_text.split("ENTRY")
    written = f"f32[16,16,{length},{length}]" in main

    costs = MeshCosts(LogicalMesh((1,), ("x",)), ClusterCosts(cluster))
    assert bool(traffic(traced(jax.grad(loss), *shapes), costs.row_padding).exponentials) == written


def test_rows_are_fused_from_compute_capability_8():
    mesh = LogicalMesh((8,), ("x",))
    assert MeshCosts(mesh, A100).row_padding > 2
    assert MeshCosts(mesh, ClusterCosts(Cluster.load("p3.16xlarge"))).row_padding == 0


def test_a_product_adds_a_bias_and_an_array_in_its_epilogue():
    bias = jax.ShapeDtypeStruct((64,), "float32")
    step = traced(lambda x, w, b: x @ w + b + x, MATRIX, MATRIX, bias)
    first, second = traffic_of(step, "add")
    assert (first.kernels, sum(first.writes), sum(first.reads)) == (0, 0, 0)  # a row is not counted
    assert (second.kernels, sum(second.writes), sum(second.reads)) == (0, 0, 1)
    assert sum(second.copies) == 1  # the product adds to a copy of the step's argument
    assert traffic_of(step, "dot_general")[0].writes == (1,)


def test_a_scatter_into_zeros_that_are_added_reads_and_writes_only_its_updates():
    updates = jax.ShapeDtypeStruct((8, 64), "float32")
    step = traced(
        lambda x, u: jnp.zeros((64, 64)).at[jnp.arange(8)].add(u) + jnp.sin(x), MATRIX, updates
    )
    (scatter,) = traffic_of(step, "scatter-add")
    assert scatter.reads[2] == 3
    assert scatter.writes == (0,)  # the 3 are the update, and its target read and written
    assert sum(moved.writes[0] for moved in traffic_of(step, "add")[-1:]) == 1


def test_a_lookup_computes_only_the_elements_that_it_returns():
    step = traced(lambda x: jnp.sin(x)[3, :5])
    assert not any(sum(moved.writes) for moved in traffic_of(step, "sin"))


def test_products_share_a_copy_in_their_operand_layout():
    heads = jax.ShapeDtypeStruct((2, 16, 4, 8), "float32")
    step = traced(
        lambda q, k: (jnp.einsum("bqhd,bkhd->bhqk", q, k), jnp.einsum("bqhd,bkhd->bhqk", 2 * q, k)),
        heads,
        heads,
    )
    first, second = (sorted(moved.copies) for moved in traffic_of(step, "dot_general"))
    assert first == [0, 1, 1]
    assert second == [0, 0, 0]  # k has been copied, and 2 * q is written in the layout


@pytest.mark.parametrize(
    ("dtype", "size", "copies"), [("float16", 60, 2), ("float16", 64, 0), ("float32", 60, 0)]
)
def test_products_of_half_precision_are_padded_to_multiples_of_eight(
    dtype: str, size: int, copies: int
):
    array = jax.ShapeDtypeStruct((size, size), dtype)
    (product,) = traffic_of(traced(lambda a, b: a @ b, array, array), "dot_general")
    assert sum(product.copies) == copies


def test_kernels_are_not_fused_across_the_boundary_of_a_loop():
    def body(x):
        total, _ = lax.scan(lambda c, _: (c + jnp.sin(x), None), x, None, length=3)
        return total, jnp.cos(x)

    step = traced(body)
    loop_kernels = [moved for moved in traffic_of(step, "add") if moved.kernels]
    assert len(loop_kernels) == 1
    assert sum(moved.kernels for moved in traffic_of(step, "cos")) == 1


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [((8, 8192), 0, False), ((8192, 8), 0, True), ((8, 8192), 1, False)],
)
def test_long_columns_are_reduced_in_two_kernels(shape: tuple[int, int], axis: int, expected: bool):
    step = traced(lambda x: x.sum(axis), jax.ShapeDtypeStruct(shape, "float32"))
    (eqn,) = step.jaxpr.eqns
    assert takes_two_kernels(eqn, shape) == expected


def test_combined_collectives_share_the_time_of_a_full_one_and_large_ones_are_not_combined():
    groups, full = (tuple(range(8)),), float(COMBINED_BYTES)
    combined = Combined(A100)
    full_bytes: dict[CollectiveKind, float] = {"all_gather": full, "reduce_scatter": 8 * full}
    for kind, whole in full_bytes.items():
        assert combined.collective(kind, whole / 10, groups) == pytest.approx(
            A100.collective(kind, whole, groups) / 10
        )
        assert combined.collective(kind, 2 * whole, groups) == A100.collective(
            kind, 2 * whole, groups
        )
    # operands are copied into one array, and results out of it
    copy_seconds = A100.kernel(Kernel("copy", "memory", 0.0, 4 * full / 10))
    expected = A100.collective("all_reduce", full, groups) / 10 + copy_seconds
    assert combined.collective("all_reduce", full / 10, groups) == pytest.approx(expected)


def sgd_step(w, x):
    return jax.tree.map(
        lambda p, g: p - 0.1 * g, w, autopar.grad(lambda w: jnp.mean(jnp.tanh(x @ w[0]) @ w[1]))(w)
    )


def test_accumulation_over_microbatches_reads_two_arrays_and_writes_one():
    weights = [jax.ShapeDtypeStruct((256, 256), "float32")] * 2
    args = weights, jax.ShapeDtypeStruct((32, 256), "float32")
    mesh = LogicalMesh((1,), ("x",))
    two, four = (
        enumerate_decisions(trace(sgd_step, args, (1,), count), MeshCosts(mesh, A100), AUTO)
        for count in (2, 4)
    )

    def accumulation_seconds(decisions, step) -> float:
        (mark, _), *_ = step.microbatching.marks
        return sum(
            float(cost.sum(axis=0).min()) for number, _, cost in decisions.shares if number == mark
        )

    copy = MeshCosts(mesh, A100).copy(3 * 256 * 256 * 4)
    for count, decisions in ((2, two), (4, four)):
        assert accumulation_seconds(
            decisions, trace(sgd_step, args, (1,), count)
        ) >= 2 * count * copy * (1 - 1e-6)


def test_a_large_gradient_is_consumed_by_its_update_before_the_next_is_computed():
    width = 4096  # XLA combines all_reduces of smaller gradients
    weights = [jax.ShapeDtypeStruct((width, width), "float32")] * 2
    step = trace(sgd_step, (weights, jax.ShapeDtypeStruct((16, width), "float32")), (1,))
    mesh = LogicalMesh((8,), ("x",))
    decisions = enumerate_decisions(step, MeshCosts(mesh, BandwidthOnly()), DATA_PARALLEL)
    memory = StepMemory(step, decisions, mesh)
    size = 4 * width**2
    choice = [int(np.argmin(cost)) for cost in decisions.costs]
    inputs = 2 * size + 2 * width * 4
    peak = memory.live_bytes(choice).max() - inputs
    assert 2 * size <= peak < 3 * size  # one gradient at a time, before and after its all_reduce


def test_the_fusion_model_is_for_the_installed_version_of_xla():
    """For another jaxlib, run `experiments.validation.fidelity` and update `XLA_VERSION`."""
    assert jaxlib.__version__ == XLA_VERSION
