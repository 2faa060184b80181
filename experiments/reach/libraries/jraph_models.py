"""Graph networks of jraph, trained as in its examples: one padded batch of graphs."""

import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax

from experiments.reach.public_step import PublicStep, classes


def _graphs() -> jraph.GraphsTuple:
    """Return seven graphs of three nodes and four edges, and a graph of padding."""
    rng = np.random.default_rng(0)
    graphs = [
        jraph.GraphsTuple(
            nodes=rng.normal(size=(3, 8)).astype(np.float32),
            edges=rng.normal(size=(4, 4)).astype(np.float32),
            senders=rng.integers(0, 3, 4),
            receivers=rng.integers(0, 3, 4),
            n_node=np.array([3]),
            n_edge=np.array([4]),
            globals=np.zeros((1, 8), np.float32),
        )
        for _ in range(7)
    ]
    padded = jraph.pad_with_graphs(jraph.batch_np(graphs), n_node=32, n_edge=40, n_graph=8)
    return jax.tree.map(jnp.asarray, padded)


def graph_network() -> PublicStep:
    """examples/ogbg_molpcba: a GraphNetwork that updates edges, nodes and globals."""

    @jraph.concatenated_args
    def update_fn(features):
        return hk.Sequential([hk.Linear(32), jax.nn.relu, hk.Linear(32)])(features)

    def net_fn(graph):
        embed = jraph.GraphMapFeatures(hk.Linear(32), hk.Linear(32), hk.Linear(32))
        net = jraph.GraphNetwork(update_fn, update_fn, update_fn)
        return hk.Linear(2)(net(net(embed(graph))).globals)

    return _train(net_fn)


def graph_convolution() -> PublicStep:
    """examples/zacharys_karate_club.py: graph convolutions, pooled for each graph."""

    def net_fn(graph):
        gcn = jraph.GraphConvolution(lambda n: jax.nn.relu(hk.Linear(32)(n)), add_self_edges=True)
        last = jraph.GraphConvolution(hk.Linear(2))
        nodes = last(gcn(graph)).nodes
        count = graph.n_node.shape[0]
        owner = jnp.repeat(
            jnp.arange(count), graph.n_node, total_repeat_length=graph.nodes.shape[0]
        )
        return jraph.segment_mean(nodes, owner, count)

    return _train(net_fn)


def _train(net_fn) -> PublicStep:
    network = hk.without_apply_rng(hk.transform(net_fn))
    graph = _graphs()
    labels = classes(2).at[-1].set(0)
    params = network.init(jax.random.key(0), graph)
    optimizer = optax.adam(1e-3)

    def update(params, opt_state, graph, labels):
        def loss_fn(params):
            log_prob = jax.nn.log_softmax(network.apply(params, graph)) * jax.nn.one_hot(labels, 2)
            mask = jraph.get_graph_padding_mask(graph)
            return -jnp.sum(log_prob * mask[:, None]) / jnp.sum(mask)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    args = (params, optimizer.init(params), graph, labels)
    return PublicStep(update, args, options={"batch_argnums": (2, 3)})
