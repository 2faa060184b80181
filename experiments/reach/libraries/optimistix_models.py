"""Models whose layers are solved by optimistix, differentiated implicitly."""

import jax
import jax.numpy as jnp
import optimistix as optx

from experiments.reach.public_step import PublicStep, features


def _implicit(solve) -> PublicStep:
    params = {"w": 0.3 * features(8), "out": features(seed=2)}

    def train_step(params, x, y):
        def loss_fn(params):
            def one(x, y):
                return jnp.mean((solve(params["w"], x) @ params["out"] - y) ** 2)

            return jax.vmap(one)(x, y).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss

    return PublicStep(train_step, (params, features(8, seed=3), features(seed=4)))


def fixed_point() -> PublicStep:
    """An equilibrium layer by fixed-point iteration."""

    def solve(w, x):
        solver = optx.FixedPointIteration(rtol=1e-5, atol=1e-5)
        return optx.fixed_point(
            lambda z, _: jnp.tanh(w @ z + x), solver, jnp.zeros(8), max_steps=64, throw=False
        ).value

    return _implicit(solve)


def newton() -> PublicStep:
    """A layer that is the root of a function, by Newton's method."""

    def solve(w, x):
        solver = optx.Newton(rtol=1e-5, atol=1e-5)
        return optx.root_find(
            lambda z, _: z + jnp.tanh(w @ z) - x, solver, jnp.zeros(8), max_steps=64, throw=False
        ).value

    return _implicit(solve)
