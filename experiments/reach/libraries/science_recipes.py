"""Training steps of scientific and of geometric models, as the code of papers writes them."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.ode import odeint

from experiments.reach.public_step import PublicStep, features


def pinn() -> PublicStep:
    """A physics-informed network: the residual of Burgers' equation at collocation points."""
    net = nn.Sequential([nn.Dense(32), jnp.tanh, nn.Dense(32), jnp.tanh, nn.Dense(1)])
    viscosity = 0.01 / jnp.pi

    def u(params, t, x):
        return net.apply(params, jnp.stack([t, x]))[0]

    def residual(params, t, x):
        u_t = jax.grad(u, argnums=1)(params, t, x)
        u_x = jax.grad(u, argnums=2)(params, t, x)
        u_xx = jax.grad(jax.grad(u, argnums=2), argnums=2)(params, t, x)
        return u_t + u(params, t, x) * u_x - viscosity * u_xx

    def loss_fn(params, batch):
        t, x = batch["t"], batch["x"]
        residuals = jax.vmap(residual, in_axes=(None, 0, 0))(params, t, x)
        initial = jax.vmap(partial(u, params))(jnp.zeros_like(x), x) + jnp.sin(jnp.pi * x)
        left = jax.vmap(lambda t: u(params, t, jnp.float32(-1.0)))(t)
        right = jax.vmap(lambda t: u(params, t, jnp.float32(1.0)))(t)
        boundary = jnp.mean(left**2) + jnp.mean(right**2)
        parts = (jnp.mean(residuals**2), jnp.mean(initial**2), boundary)
        return sum(parts), parts

    @jax.jit
    def step(params, opt_state, batch):
        (loss, parts), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, parts

    tx = optax.adam(optax.exponential_decay(1e-3, 100, 0.9))
    params = net.init(jax.random.key(0), jnp.ones(2))
    batch = {"t": jax.nn.sigmoid(features()), "x": jnp.tanh(features(seed=2))}
    return PublicStep(step, (params, tx.init(params), batch))


def poisson_hessian() -> PublicStep:
    """The deep Ritz form with a Laplacian by forward over reverse mode; Fourier features."""

    def network(params, x):
        h = jnp.concatenate([jnp.sin(x @ params["B"]), jnp.cos(x @ params["B"])])
        for w, b in params["layers"][:-1]:
            h = jnp.tanh(h @ w + b)
        w, b = params["layers"][-1]
        return (h @ w + b)[0]

    def laplacian(f, x):
        gradient = jax.grad(f)

        def second(basis):
            return jnp.dot(basis, jax.jvp(gradient, (x,), (basis,))[1])

        return jax.vmap(second)(jnp.eye(x.shape[0])).sum()

    def loss(params, inside, border):
        f = partial(network, params)
        source = jnp.prod(jnp.sin(jnp.pi * inside), axis=-1)
        residual = jax.vmap(partial(laplacian, f))(inside) + source
        return jnp.mean(residual**2) + 10 * jnp.mean(jax.vmap(f)(border) ** 2)

    def update(params, opt_state, inside, border):
        value, grads = jax.value_and_grad(loss)(params, inside, border)
        grads["B"] = jnp.zeros_like(grads["B"])  # the frequencies stay
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    sizes = [(16, 32), (32, 32), (32, 1)]
    params = {
        "B": jax.random.normal(keys[0], (2, 8)),
        "layers": [
            (jax.random.normal(key, size) / size[0] ** 0.5, jnp.zeros(size[1]))
            for key, size in zip(keys[1:], sizes, strict=True)
        ],
    }
    tx = optax.adam(1e-3)
    inside, border = jax.nn.sigmoid(features(2)), jnp.sign(features(2, seed=4))
    return PublicStep(update, (params, tx.init(params), inside, border))


def neural_ode() -> PublicStep:
    """A neural ODE solved adaptively for each example, with the adjoint method."""

    def dynamics(y, t, params):
        h = jnp.tanh(jnp.append(y, t) @ params["w1"] + params["b1"])
        return h @ params["w2"] + params["b2"]

    def solve(params, y0, ts):
        return odeint(dynamics, y0, ts, params, rtol=1e-3, atol=1e-3)

    def train_step(params, opt_state, y0, targets, ts):
        def loss_fn(params):
            predicted = jax.vmap(solve, in_axes=(None, 0, None))(params, y0, ts)
            return jnp.mean(jnp.abs(predicted - targets))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    key_1, key_2 = jax.random.split(jax.random.key(0))
    params = {
        "w1": 0.3 * jax.random.normal(key_1, (3, 16)),
        "b1": jnp.zeros(16),
        "w2": 0.3 * jax.random.normal(key_2, (16, 2)),
        "b2": jnp.zeros(2),
    }
    tx = optax.adam(3e-3)
    ts = jnp.linspace(0.0, 1.0, 5)
    return PublicStep(
        train_step, (params, tx.init(params), features(2), features(5, 2, seed=1), ts)
    )


def deep_equilibrium() -> PublicStep:
    """A fixed point of each example by `while_loop`, differentiated implicitly."""

    def fixed_point(f, x0, tolerance=1e-4, limit=40):
        def proceed(carry):
            previous, current, count = carry
            return (jnp.linalg.norm(current - previous) > tolerance) & (count < limit)

        def body(carry):
            _, current, count = carry
            return current, f(current), count + 1

        return jax.lax.while_loop(proceed, body, (x0, f(x0), 0))[1]

    @jax.custom_vjp
    def equilibrium(params, x):
        return fixed_point(lambda z: layer(params, z, x), jnp.zeros(16))

    def layer(params, z, x):
        return jnp.tanh(z @ params["w"] + x @ params["u"] + params["b"])

    def forward(params, x):
        z = equilibrium(params, x)
        return z, (params, z, x)

    def backward(residuals, cotangent):
        params, z, x = residuals
        _, vjp_z = jax.vjp(lambda z: layer(params, z, x), z)
        u = fixed_point(lambda u: vjp_z(u)[0] + cotangent, jnp.zeros_like(z))
        _, vjp = jax.vjp(lambda params, x: layer(params, z, x), params, x)
        return vjp(u)

    equilibrium.defvjp(forward, backward)

    def train_step(params, opt_state, x, y):
        def loss_fn(params):
            z = jax.vmap(equilibrium, in_axes=(None, 0))(params["core"], x)
            logits = z @ params["head"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "core": {
            "w": 0.1 * jax.random.normal(keys[0], (16, 16)),
            "u": jax.random.normal(keys[1], (6, 16)),
            "b": jnp.zeros(16),
        },
        "head": 0.3 * jax.random.normal(keys[2], (16, 4)),
    }
    tx = optax.adam(1e-3)
    return PublicStep(train_step, (params, tx.init(params), features(6), jnp.arange(8) % 4))


def molecules() -> PublicStep:
    """Messages between the atoms of padded molecules, summed by `segment_sum`; forces as well."""
    atoms, width = 5, 16
    embed, message, update, readout = (
        nn.Embed(6, width),
        nn.Dense(width),
        nn.Dense(width),
        nn.Dense(1),
    )

    def energy(params, positions, species, senders, receivers, edge_mask, atom_mask):
        h = embed.apply(params["embed"], species)
        for layer in params["layers"]:
            offsets = positions[senders] - positions[receivers]
            distances = jnp.sqrt(jnp.sum(offsets**2, -1) + 1e-6)
            radial = jnp.exp(-((distances[:, None] - jnp.linspace(0, 4, 4)) ** 2))
            inputs = jnp.concatenate([h[senders], h[receivers], radial], axis=-1)
            messages = nn.silu(message.apply(layer["message"], inputs)) * edge_mask[:, None]
            received = jax.ops.segment_sum(messages, receivers, num_segments=atoms)
            h = h + nn.silu(update.apply(layer["update"], jnp.concatenate([h, received], -1)))
        return jnp.sum(readout.apply(params["readout"], h)[:, 0] * atom_mask)

    def train_step(params, opt_state, batch):
        def loss_fn(params):
            def one(molecule):
                fields = ("species", "senders", "receivers", "edge_mask", "atom_mask")
                rest = [molecule[name] for name in fields]
                value, slope = jax.value_and_grad(partial(energy, params))(
                    molecule["positions"], *rest
                )
                return value, -slope

            energies, forces = jax.vmap(one)(batch)
            energy_loss = jnp.mean((energies - batch["energy"]) ** 2)
            squares = jnp.sum((forces - batch["forces"]) ** 2, axis=-1) * batch["atom_mask"]
            force_loss = squares.sum() / (3 * batch["atom_mask"].sum())
            return energy_loss + 10 * force_loss, {"energy": energy_loss, "force": force_loss}

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, aux

    keys = jax.random.split(jax.random.key(0), 6)
    params = {
        "embed": embed.init(keys[0], jnp.zeros(1, jnp.int32)),
        "layers": [
            {
                "message": message.init(keys[1 + 2 * i], jnp.ones((1, 2 * width + 4))),
                "update": update.init(keys[2 + 2 * i], jnp.ones((1, 2 * width))),
            }
            for i in range(2)
        ],
        "readout": readout.init(keys[5], jnp.ones((1, width))),
    }
    tx = optax.amsgrad(1e-3)
    numbers = np.random.default_rng(0)
    batch = {
        "positions": features(atoms, 3),
        "species": numbers.integers(0, 6, (8, atoms)),
        "senders": numbers.integers(0, atoms, (8, 8)),
        "receivers": numbers.integers(0, atoms, (8, 8)),
        "edge_mask": numbers.integers(0, 2, (8, 8)).astype(np.float32),
        "atom_mask": (np.arange(atoms) < numbers.integers(2, 6, (8, 1))).astype(np.float32),
        "energy": numbers.normal(size=8).astype(np.float32),
        "forces": numbers.normal(size=(8, atoms, 3)).astype(np.float32),
    }
    return PublicStep(train_step, (params, tx.init(params), jax.tree.map(jnp.asarray, batch)))


def graph_attention() -> PublicStep:
    """A graph attention network trained on the labelled nodes of one graph."""
    nodes, width, heads = 8, 16, 2

    def segment_softmax(scores, segments):
        top = jax.ops.segment_max(scores, segments, num_segments=nodes)
        scores = jnp.exp(scores - top[segments])
        return scores / jax.ops.segment_sum(scores, segments, num_segments=nodes)[segments]

    def attend(layer, x, senders, receivers):
        h = jnp.einsum("nd,dhk->nhk", x, layer["w"])
        left, right = jnp.sum(h * layer["left"], -1), jnp.sum(h * layer["right"], -1)
        scores = jax.nn.leaky_relu(left[senders] + right[receivers], 0.2)
        weights = segment_softmax(scores, receivers)
        summed = jax.ops.segment_sum(weights[..., None] * h[senders], receivers, nodes)
        return summed.reshape(nodes, -1)

    def train_step(params, opt_state, x, senders, receivers, labels, train_mask):
        def loss_fn(params):
            h = jax.nn.elu(attend(params["first"], x, senders, receivers))
            logits = attend(params["second"], h, senders, receivers)
            xent = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.sum(xent * train_mask) / jnp.sum(train_mask)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def init(key, inputs, outputs):
        keys = jax.random.split(key, 3)
        return {
            "w": 0.3 * jax.random.normal(keys[0], (inputs, heads, outputs)),
            "left": 0.3 * jax.random.normal(keys[1], (heads, outputs)),
            "right": 0.3 * jax.random.normal(keys[2], (heads, outputs)),
        }

    params = {
        "first": init(jax.random.key(0), 6, width),
        "second": init(jax.random.key(1), heads * width, 4),
    }
    tx = optax.adam(5e-3)
    numbers = np.random.default_rng(0)
    edges = numbers.integers(0, nodes, (2, 24))
    edges[:, :nodes] = np.arange(nodes)
    senders, receivers = jnp.asarray(edges, jnp.int32)
    labels = jnp.asarray(numbers.integers(0, 4, nodes), jnp.int32)
    mask = jnp.asarray([1, 1, 0, 1, 0, 0, 1, 0], jnp.float32)
    args = (params, tx.init(params), features(6), senders, receivers, labels, mask)
    return PublicStep(train_step, args)


def meta_learning() -> PublicStep:
    """MAML with learned inner rates and several inner steps in a scan, mapped over tasks."""
    net = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(32), nn.relu, nn.Dense(1)])

    def mse(params, x, y):
        return jnp.mean(jnp.square(net.apply(params, x) - y))

    def inner_loop(meta, support):
        def inner_step(params, _):
            loss, grads = jax.value_and_grad(mse)(params, *support)
            updated = jax.tree.map(lambda p, lr, g: p - lr * g, params, meta["rates"], grads)
            return updated, loss

        return jax.lax.scan(inner_step, meta["params"], None, length=3)

    def task_loss(meta, task):
        params, losses = inner_loop(meta, task["support"])
        return mse(params, *task["query"]), losses

    def meta_step(meta, opt_state, tasks):
        def loss_fn(meta):
            losses, inner = jax.vmap(task_loss, in_axes=(None, 0))(meta, tasks)
            return losses.mean(), inner.mean(axis=0)

        (loss, inner), grads = jax.value_and_grad(loss_fn, has_aux=True)(meta)
        updates, opt_state = tx.update(grads, opt_state, meta)
        return optax.apply_updates(meta, updates), opt_state, {"outer": loss, "inner": inner}

    tx = optax.adam(1e-3)
    params = net.init(jax.random.key(0), jnp.ones((1, 1)))
    meta = {"params": params, "rates": jax.tree.map(lambda p: jnp.full_like(p, 0.01), params)}
    tasks = {
        "support": (features(5, 1), features(5, 1, seed=1)),
        "query": (features(5, 1, seed=2), features(5, 1, seed=3)),
    }
    return PublicStep(meta_step, (meta, tx.init(meta), tasks))


def ragged_pooling() -> PublicStep:
    """Sets of different sizes: a scan skips what pads them, and a loop counts members."""

    def encode(params, members, size):
        def body(state, i):
            new = jnp.tanh(members[i] @ params["in"] + state @ params["core"])
            return jnp.where(i < size, new, state), None

        state, _ = jax.lax.scan(body, jnp.zeros(16), jnp.arange(members.shape[0]))
        return state

    def longest_run(members, size):
        """Count members until the first negative one: a loop of data-dependent length."""

        def proceed(i):
            return (i < size) & (members[jnp.minimum(i, members.shape[0] - 1), 0] > 0)

        return jax.lax.while_loop(proceed, lambda i: i + 1, 0)

    def train_step(params, opt_state, members, sizes, targets):
        runs = jax.vmap(longest_run)(members, sizes)

        def loss_fn(params):
            encoded = jax.vmap(partial(encode, params))(members, sizes)
            weights = 1.0 + 0.1 * runs
            errors = (encoded @ params["out"])[:, 0] - targets
            return jnp.sum(weights * errors**2) / jnp.sum(weights)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "in": 0.3 * jax.random.normal(keys[0], (4, 16)),
        "core": 0.2 * jax.random.normal(keys[1], (16, 16)),
        "out": 0.3 * jax.random.normal(keys[2], (16, 1)),
    }
    tx = optax.nadam(1e-3)
    sizes = jnp.array([3, 6, 1, 4, 5, 2, 6, 4])
    args = (params, tx.init(params), features(6, 4), sizes, features(seed=3))
    return PublicStep(train_step, args)
