"""Lookups among an example's own rows run in microbatches, others not."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.testing import assert_allclose
from autopar.tracing.block_lookups import with_own_blocks

RNG = np.random.default_rng(0)
GRAPHS, NODES, EDGES, WIDTH = 16, 5, 8, 8
PARAMS = {
    "in": RNG.standard_normal((3, WIDTH)).astype(np.float32),
    "edge": (RNG.standard_normal((2 * WIDTH, WIDTH)) / 4).astype(np.float32),
    "layers": (RNG.standard_normal((3, WIDTH, WIDTH)) / 3).astype(np.float32),
    "out": RNG.standard_normal((WIDTH, 1)).astype(np.float32),
}
BATCH = {
    "x": RNG.standard_normal((GRAPHS, NODES, 3)).astype(np.float32),
    "senders": RNG.integers(0, NODES, (GRAPHS, EDGES)).astype(np.int32),
    "receivers": RNG.integers(0, NODES, (GRAPHS, EDGES)).astype(np.int32),
    "y": RNG.standard_normal(GRAPHS).astype(np.float32),
}
METHODS = {
    "shards": autopar.ShardParallel(devices=(2, 2), num_micro_batches=4),
    "local accumulation": autopar.DataParallel(devices=2, num_micro_batches=4),
    "pipeline": autopar.PipeshardParallel(
        devices=2, num_micro_batches=4, layer_option=autopar.AutoLayerOption(2)
    ),
}


def of_all_pairs(graphs):
    """Return the edges of complete graphs as constants, as E(n) equivariant networks do."""
    senders, receivers = np.nonzero(1 - np.eye(NODES, dtype=int))
    first = np.arange(graphs)[:, None] * NODES
    return (senders + first).ravel(), (receivers + first).ravel()


def messages(params, hidden, senders, receivers):
    edges = jnp.concatenate([hidden[senders], hidden[receivers]], -1)
    sums = jax.ops.segment_sum(jnp.tanh(edges @ params["edge"]), receivers, len(hidden))
    return hidden + sums


def constant_edges(params, hidden, batch):
    return messages(params, hidden, *of_all_pairs(len(batch["x"])))


def counted_edges(params, hidden, batch):
    senders, receivers = np.nonzero(1 - np.eye(NODES, dtype=int))
    first = jnp.arange(len(batch["x"]))[:, None] * NODES
    return messages(params, hidden, (senders + first).ravel(), (receivers + first).ravel())


def bounded_edges(params, hidden, batch):
    first = jnp.arange(len(batch["x"]), dtype=jnp.int32)[:, None] * NODES
    senders = jnp.clip(batch["senders"], 0, NODES - 1) + first
    receivers = jnp.minimum(jnp.abs(batch["receivers"]) % NODES, NODES - 1)
    return messages(params, hidden, senders.ravel(), (jnp.maximum(receivers, 0) + first).ravel())


def attention_of_neighbours(params, hidden, batch):
    senders, receivers = of_all_pairs(len(batch["x"]))
    scores = jnp.tanh(hidden[senders] * hidden[receivers]).sum(-1)
    largest = jax.ops.segment_max(scores, receivers, len(hidden))
    weights = jnp.exp(scores - lax.stop_gradient(largest)[receivers])
    sums = jax.ops.segment_sum(weights, receivers, len(hidden))
    mixed = (weights / sums[receivers])[:, None] * hidden[senders]
    return jax.ops.segment_sum(mixed, receivers, len(hidden))


def nearest_neighbours(params, hidden, batch):
    """The neighbours are computed by the model, as those of a point cloud."""
    graphs = len(batch["x"])
    points = hidden.reshape(graphs, NODES, WIDTH)
    distances = ((points[:, :, None] - points[:, None]) ** 2).sum(-1)
    near = lax.top_k(-distances, 3)[1] + jnp.arange(graphs)[:, None, None] * NODES
    features = hidden[near.ravel()].reshape(len(hidden), 3, WIDTH)
    return jnp.tanh(features - hidden[:, None]).max(1)


def random_neighbours(params, hidden, batch):
    graphs = len(batch["x"])
    near = jax.random.randint(jax.random.key(0), (graphs, NODES), 0, NODES)
    return hidden + hidden[(near + jnp.arange(graphs)[:, None] * NODES).ravel()]


def edges_in_a_scan(params, hidden, batch):
    senders, receivers = of_all_pairs(len(batch["x"]))

    def layer(hidden, weights):
        sums = jax.ops.segment_max(hidden[senders] @ weights, receivers, len(hidden))
        return hidden + jnp.tanh(sums), None

    return lax.scan(layer, hidden, params["layers"])[0]


def first_node_of_each(params, hidden, batch):
    first = jnp.arange(len(batch["x"])) * NODES
    return hidden.at[first].set(0.5).at[first + 1].mul(2.0)


def step(change, params, batch):
    def loss(params):
        graphs = len(batch["x"])
        hidden = jnp.tanh(batch["x"].reshape(graphs * NODES, 3) @ params["in"])
        hidden = change(params, hidden, batch)
        graph = jnp.repeat(jnp.arange(graphs), NODES)
        energies = jax.ops.segment_sum((jnp.tanh(hidden) @ params["out"])[:, 0], graph, graphs)
        return jnp.mean((energies - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize(
    "change",
    [
        constant_edges,
        counted_edges,
        bounded_edges,
        attention_of_neighbours,
        nearest_neighbours,
        random_neighbours,
        edges_in_a_scan,
        first_node_of_each,
    ],
    ids=lambda change: change.__name__,
)
def test_lookups_among_own_rows_equal_those_of_the_whole_batch(change, method):
    fun = partial(step, change)
    fun.__name__ = "step"  # pyright: ignore[reportAttributeAccessIssue]
    planned = autopar.parallelize(fun, method=method, donate_argnums=())
    assert_allclose(planned(PARAMS, BATCH), fun(PARAMS, BATCH), rtol=2e-4, atol=2e-5)


def of_next_graph(graphs, batch):
    return (jnp.arange(graphs * NODES) + NODES) % (graphs * NODES)


def of_row_before(graphs, batch):
    return jnp.maximum(jnp.arange(graphs * NODES) - 1, 0)


def of_graph_from_the_end(graphs, batch):
    return (jnp.arange(graphs - 1, -1, -1)[:, None] * NODES + jnp.arange(NODES)).ravel()


def perhaps_of_next_graph(graphs, batch):
    first = jnp.arange(graphs, dtype=jnp.int32)[:, None] * NODES
    return (jnp.clip(batch["senders"], 0, NODES) + first).ravel()


def as_the_data_say(graphs, batch):
    first = jnp.arange(graphs, dtype=jnp.int32)[:, None] * NODES
    return (batch["senders"] + first).ravel()


def of_other_nodes_in_each_graph(graphs, batch):
    return jnp.arange(graphs) * NODES + np.resize(np.arange(7) % NODES, graphs)


@pytest.mark.parametrize(
    "indices",
    [
        of_next_graph,
        of_row_before,
        of_graph_from_the_end,
        perhaps_of_next_graph,
        as_the_data_say,
        of_other_nodes_in_each_graph,
    ],
    ids=lambda indices: indices.__name__,
)
def test_lookups_that_may_be_of_other_examples_have_no_batch_dim(indices):
    def step(params, batch):
        def loss(params):
            graphs = len(batch["x"])
            hidden = jnp.tanh(batch["x"].reshape(graphs * NODES, 3) @ params["in"])
            read = hidden[indices(graphs, batch)].reshape(graphs, -1, WIDTH)
            return jnp.mean((jnp.tanh(read) @ params["out"]).sum((1, 2)) - batch["y"])

        return jax.value_and_grad(loss)(params)

    planned = autopar.parallelize(step, method=METHODS["shards"], donate_argnums=())
    try:
        result = planned(PARAMS, BATCH)
    except autopar.MicrobatchError:
        return
    assert planned.get_last_executable().plan.num_passes > 1
    assert_allclose(result, step(PARAMS, BATCH), rtol=2e-4, atol=2e-5)


def test_a_refused_index_is_named_with_what_to_write():
    def step(params, batch):
        def loss(params):
            hidden = jnp.tanh(batch["x"] @ params["in"]).mean(1)
            read = jnp.tanh(hidden[batch["partner"]] @ params["in"].T)
            return jnp.mean((read @ params["in"]).sum(1) - batch["y"])

        return jax.value_and_grad(loss)(params)

    batch = BATCH | {"partner": np.arange(len(BATCH["x"])) - 1}
    planned = autopar.parallelize(step, method=METHODS["shards"], donate_argnums=())
    words = rf"{__file__}:\d+ adds the size of the batch to data, as an index .* jnp\.clip\(index"
    with pytest.raises(autopar.MicrobatchError, match=words):
        planned(PARAMS, batch)


def test_a_table_with_as_many_rows_by_coincidence_keeps_its_lookups():
    def positions(x, table):
        return x + table[jnp.arange(4)[:, None] * 5 + jnp.arange(5)]

    jaxpr = jax.make_jaxpr(positions)(jnp.ones((4, 5)), jnp.ones(20)).jaxpr
    assert with_own_blocks(jaxpr, {0}, lambda: None) is jaxpr


@pytest.mark.parametrize("positions", [16, 64])
def test_gradients_of_position_embeddings_are_sums_over_microbatches(positions):
    """The number of positions is a multiple of the number of examples by coincidence."""

    def step(params, batch):
        def loss(params):
            positions = jnp.arange(batch["x"].shape[1])
            at = jnp.broadcast_to(positions, batch["x"].shape)
            hidden = params["tokens"][batch["x"]] + params["positions"][jnp.array(at)]
            return jnp.mean((jnp.tanh(hidden @ params["in"]) @ params["out"]).sum((1, 2)) ** 2)

        return jax.value_and_grad(loss)(params)

    params = {
        "tokens": RNG.standard_normal((8, WIDTH)).astype(np.float32),
        "positions": RNG.standard_normal((positions, WIDTH)).astype(np.float32),
        "in": RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32),
        "out": RNG.standard_normal((WIDTH, 1)).astype(np.float32),
    }
    batch = {"x": RNG.integers(0, 8, (16, positions)).astype(np.int32)}
    planned = autopar.parallelize(step, method=METHODS["shards"], donate_argnums=())
    assert_allclose(planned(params, batch), step(params, batch), rtol=2e-4, atol=2e-5)
    assert planned.get_last_executable().plan.num_passes == 1


def test_the_positions_of_a_large_array_take_no_memory():
    def step(x):
        positions = lax.broadcasted_iota(jnp.int32, (4, 2**18, 2**18), 2)
        return jnp.where(positions == 2 * positions, 0.0, x[jnp.arange(4)[:, None, None]]).sum()

    jaxpr = jax.make_jaxpr(step)(jnp.ones(4)).jaxpr
    assert [eqn.primitive.name for eqn in jaxpr.eqns].count("iota") == 2
    assert with_own_blocks(jaxpr, {0}, lambda: None).outvars
