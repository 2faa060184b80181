"""Neural differential equations of diffrax, trained as in its examples."""

from dataclasses import replace

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax

from experiments.reach.public_step import PublicStep, features


class _Func(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, size, *, key):
        self.mlp = eqx.nn.MLP(size, size, 32, 2, activation=jax.nn.softplus, key=key)

    def __call__(self, t, y, args):
        return self.mlp(y)


class _NeuralODE(eqx.Module):
    func: _Func

    def __init__(self, size, *, key):
        self.func = _Func(size, key=key)

    def __call__(self, ts, y0):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(self.func),
            diffrax.Tsit5(),
            t0=ts[0],
            t1=ts[-1],
            dt0=ts[1] - ts[0],
            y0=y0,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            saveat=diffrax.SaveAt(ts=ts),
            max_steps=64,
        )
        return solution.ys


def neural_ode() -> PublicStep:
    """examples/neural_ode.ipynb: adaptive steps, and gradients by recursive checkpointing."""
    model = _NeuralODE(2, key=jr.key(0))
    optim = optax.adabelief(3e-3)
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_value_and_grad
    def grad_loss(model, ti, yi):
        y_pred = jax.vmap(model, in_axes=(None, 0))(ti, yi[:, 0])
        return jnp.mean((yi - y_pred) ** 2)

    def make_step(ti, yi, model, opt_state):
        loss, grads = grad_loss(model, ti, yi)
        updates, opt_state = optim.update(grads, opt_state)
        return loss, eqx.apply_updates(model, updates), opt_state

    args = (jnp.linspace(0.0, 1.0, 5), features(5, 2), model, opt_state)
    options = {"while_loops": "microbatch"}
    return PublicStep(make_step, args, jit=eqx.filter_jit, method_options=options)


def euler() -> PublicStep:
    """A neural ODE with constant steps and direct differentiation, by partition and combine."""
    return _of_final_states(diffrax.Euler(), max_steps=8, adjoint=diffrax.DirectAdjoint())


def stiff() -> PublicStep:
    """Adaptive implicit steps, which solve nonlinear equations."""
    steps = diffrax.PIDController(rtol=1e-3, atol=1e-6)
    step = _of_final_states(diffrax.Kvaerno3(), max_steps=64, stepsize_controller=steps)
    return replace(step, method_options={"while_loops": "microbatch"})


def _of_final_states(solver, **options) -> PublicStep:
    """Return a step that fits the final states of a neural ODE."""
    model = _Func(2, key=jr.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optim = optax.adam(3e-3)

    def solve(func, y0):
        term = diffrax.ODETerm(func)
        return diffrax.diffeqsolve(term, solver, 0.0, 1.0, dt0=0.25, y0=y0, **options).ys[-1]

    def make_step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            func = eqx.combine(params, static)
            pred = jax.vmap(lambda y0: solve(func, y0))(batch["start"])
            return jnp.mean((pred - batch["end"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optim.update(grads, opt_state)
        return (eqx.apply_updates(params, updates), opt_state), loss

    batch = {"start": features(2), "end": features(2, seed=2)}
    return PublicStep(make_step, ((params, optim.init(params)), batch))
