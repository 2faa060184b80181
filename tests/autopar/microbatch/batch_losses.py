"""Losses of a batch, by what their microbatches have to know of the whole batch."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np

import autopar
from autopar.testing import assert_allclose

RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.standard_normal((6, 3)).astype(np.float32),
    "b": RNG.standard_normal(3).astype(np.float32),
}
BATCH = {
    "x": RNG.standard_normal((8, 6)).astype(np.float32),
    "y": RNG.integers(0, 3, 8),
    "mask": RNG.integers(0, 2, 8).astype(np.float32),
}
DEEP = {"w": [RNG.standard_normal((6, 6)).astype(np.float32) for _ in range(2)]}


def outputs(params, batch):
    return jnp.tanh(batch["x"] @ params["w"] + params["b"])


def per_example(params, batch):
    return -jnp.take_along_axis(
        jax.nn.log_softmax(outputs(params, batch)), batch["y"][:, None], axis=1
    )[:, 0]


def mean_loss(params, batch):
    return per_example(params, batch).mean()


def convolved(params, batch):
    images = batch["x"].reshape(-1, 1, 6)
    hidden = jax.lax.conv_general_dilated(images, params["w"].T[:, None, :], (1,), "SAME")
    return jax.lax.reduce_window(
        hidden, -jnp.inf, jax.lax.max, (1, 1, 2), (1, 1, 2), "VALID"
    ).mean()


def modulated(params, batch):
    """Convolve each example with a kernel of its own, then apply a layer, as StyleGAN2 does."""

    def convolved(x, kernel):
        return jax.lax.conv_general_dilated(x[None, None], kernel[:, None], (1,), "SAME")[0]

    kernels = jnp.stack([outputs(params, batch), 2 * outputs(params, batch)], 1)
    hidden = jax.vmap(convolved)(batch["x"], kernels)
    return (jnp.tanh(hidden.mean(1) @ params["w"]) ** 2).mean()


def masked_mean(params, batch):
    return (per_example(params, batch) * batch["mask"]).sum() / batch["mask"].sum()


def scanned(params, batch):
    """Return the masked mean of the result of three layers with the same weights."""

    def layer(x, _):
        return jnp.tanh(x @ (params["w"] @ params["w"].T)), None

    x, _ = jax.lax.scan(layer, batch["x"], length=3)
    return (x.sum(1) * batch["mask"]).sum() / batch["mask"].sum()


def branching(params, batch):
    """Take a branch for numbers that are zero, as a loop that has not saved anything does."""
    saved = jnp.zeros(3, bool)
    return jax.lax.cond(saved.any(), jnp.negative, jnp.tanh, outputs(params, batch)).mean()


@jax.custom_vjp
def bounded(x):
    """Return `x`. Its gradient depends on the signs of the gradient of the result."""
    return x


def bounded_gradient(_, gradient):
    fits = jnp.isfinite(gradient) & (gradient != 0)
    leaned = jnp.where(gradient > 0, gradient, 0.5 * gradient) + jnp.abs(gradient)
    return (jnp.where(fits, leaned, jnp.inf),)


bounded.defvjp(lambda x: (x, None), bounded_gradient)


def matrix_of(params):
    """Return a lower triangular matrix with a row per output."""
    return jnp.tril(jnp.outer(params["b"], params["b"])) + 2 * jnp.eye(3)


@jax.custom_vjp
def limited(x):
    """Return `x`. Its gradient is a nonlinear function of the gradient of the result."""
    return x


limited.defvjp(lambda x: (x, None), lambda _, gradient: (jnp.tanh(20 * gradient),))


@jax.custom_vjp
def clipped(x):
    """Return `x`. Its gradient is the gradient of the result between two bounds."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, gradient: (jnp.clip(gradient, -0.02, 0.02),))


def preferences(scores, size):
    """Return the loss of preferring the first of `size` neighbouring examples to the second."""
    groups = scores.reshape(-1, size)
    return -jax.nn.log_sigmoid(groups[:, 0] - groups[:, 1]).mean()


def normalized(weights):
    """Return normalized weights; the deviation depends on the mean."""
    return (weights - weights.mean()) / jnp.sqrt(((weights - weights.mean()) ** 2).mean() + 1e-6)


def masked_in_a_loop(params, batch):
    """Each iteration divides by weights of its own."""

    def layer(total, scale):
        weights = (batch["mask"] * scale).sum()
        return total + (per_example(params, batch) * batch["mask"]).sum() / weights, None

    return jax.lax.scan(layer, 0.0, jnp.arange(1.0, 3.0))[0]


def deep(params, x):
    return jnp.tanh(x @ params["w"][0]) @ params["w"][1]


FITTING = {
    "mean": mean_loss,
    "sum": lambda p, b: per_example(p, b).sum(),
    "masked sum": lambda p, b: (per_example(p, b) * b["mask"]).sum(),
    "masked, over all examples": lambda p, b: (
        (per_example(p, b) * b["mask"]).sum() / b["mask"].size
    ),
    "mean with weight decay": lambda p, b: mean_loss(p, b) + 1e-2 * (p["w"] ** 2).sum(),
    "twice the mean": lambda p, b: 2 * mean_loss(p, b) - 1,
    "mean squared error": lambda p, b: jnp.mean((outputs(p, b) - 1.0) ** 2),
    "sum over outputs, mean over examples": lambda p, b: (outputs(p, b) ** 2).sum(-1).mean(),
    "weights of examples": lambda p, b: (
        jnp.einsum("b,b->", per_example(p, b), b["mask"]) / 8.0 * 8.0
    ),
    "checkpointed": lambda p, b: jax.checkpoint(mean_loss)(p, b),
    "convolution and pooling": convolved,
    "masked mean": lambda p, b: (per_example(p, b) * b["mask"]).sum() / b["mask"].sum(),
    "masked mean, chosen": lambda p, b: (
        jnp.where(b["mask"] > 0, per_example(p, b), 0).sum() / (b["mask"] > 0).sum()
    ),
    "masked mean of jax": lambda p, b: jnp.mean(per_example(p, b), where=b["mask"] > 0),
    "weighted average": lambda p, b: jnp.average(per_example(p, b), weights=b["mask"]),
    "masked mean by shares": lambda p, b: (per_example(p, b) * (b["mask"] / b["mask"].sum())).sum(),
    "masked mean of squares over a mean": lambda p, b: (
        3 * (outputs(p, b) ** 2 * b["mask"][:, None]).mean() / b["mask"].mean()
    ),
    "masked mean, checkpointed": lambda p, b: jax.checkpoint(masked_mean)(p, b),
    "masked mean over layers in a loop": lambda p, b: scanned(p, b),
    "a kernel for each example": modulated,
    "masked mean of at least one": lambda p, b: (
        (per_example(p, b) * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1)
    ),
    "masked mean of more than none": lambda p, b: (
        (per_example(p, b) * b["mask"]).sum() / (b["mask"].sum() + 1e-8)
    ),
    "a constant per example": lambda p, b: (
        per_example(p, b) * np.ones(len(b["x"]), np.float32) / len(b["x"])
    ).sum(),
    "constants that shrink": lambda p, b: (
        per_example(p, b) * np.full(len(b["x"]), 1 / len(b["x"]), np.float32)
    ).sum(),
    "an imaginary factor": lambda p, b: jnp.imag(
        per_example(p, b).astype(jnp.complex64) * (1j / len(b["x"]))
    ).sum(),
    "layer normalization by hand": lambda p, b: jnp.var(outputs(p, b), axis=-1).mean(),
    "nan as a constant": lambda p, b: jnp.nan_to_num(
        jnp.where(outputs(p, b) > 9, jnp.nan, outputs(p, b))
    ).mean(),
    "Fourier transform": lambda p, b: (
        jnp.fft.irfft(jnp.fft.rfft(outputs(p, b)) * 0.5, 4) ** 2
    ).mean(),
    "columns first": lambda p, b: (
        (jnp.ravel(outputs(p, b), order="F").reshape(3, -1) * p["b"][:, None]) ** 2
    ).mean(),
    "product of outputs": lambda p, b: (1 + outputs(p, b)).prod(-1).mean(),
    "tiled token": lambda p, b: (
        (jnp.tile(p["b"][None], (len(b["x"]), 1)) + outputs(p, b)) ** 2
    ).mean(),
    "tiled examples": lambda p, b: (
        jnp.tile(outputs(p, b), (2, 1)).reshape(2, -1, 3).max(0)
    ).mean(),
    "position in the batch": lambda p, b: (per_example(p, b) * jnp.arange(b["x"].shape[0])).mean(),
    "label of each example": lambda p, b: (
        -jax.nn.log_softmax(outputs(p, b))[jnp.arange(b["x"].shape[0]), b["y"]].mean()
    ),
    "a branch for zeros": branching,
    "signs of gradients": lambda p, b: bounded(per_example(p, b) * (b["mask"] - 0.3)).mean(),
    "positions of the largest weights": lambda p, b: (
        mean_loss(p, b) * jax.lax.top_k(p["b"] * len(b["x"]), 2)[1].sum()
    ),
    "root of the size of the batch": lambda p, b: per_example(p, b).sum() / np.sqrt(len(b["x"])),
    "logarithm of the size of the batch": lambda p, b: mean_loss(p, b) * np.log(len(b["x"])),
    "one less than the size of the batch": lambda p, b: per_example(p, b).sum() / (len(b["x"]) - 1),
    "square of the size of the batch": lambda p, b: per_example(p, b).sum() / len(b["x"]) ** 2,
    "a factor for large batches": lambda p, b: mean_loss(p, b) * (2.0 if len(b["x"]) > 4 else 3.0),
    "a third of the size of the batch": lambda p, b: per_example(p, b).sum() / (len(b["x"]) // 3),
}
"""Losses that are sums or means over the examples of a batch, or quotients of such."""

SOLVED = {
    "triangular solution by columns": lambda p, b: (
        jsp.linalg.solve_triangular(matrix_of(p), outputs(p, b).T, lower=True) ** 2
    ).mean(),
    "triangular solution by rows": lambda p, b: (
        jax.lax.linalg.triangular_solve(matrix_of(p), outputs(p, b), unit_diagonal=True) ** 2
    ).mean(),
    "solution per example": lambda p, b: jnp.tanh(
        jax.vmap(lambda row: jnp.linalg.solve(matrix_of(p) + jnp.outer(row, row), row))(
            outputs(p, b)
        )
    ).mean(),
    "solution for all examples": lambda p, b: jnp.tanh(
        jnp.linalg.solve(matrix_of(p), outputs(p, b)[..., None])
    ).mean(),
    "Cholesky solution": lambda p, b: (
        jsp.linalg.cho_solve((matrix_of(p), True), outputs(p, b).T) ** 2
    ).mean(),
    "conjugate gradients": lambda p, b: (
        jax.vmap(
            lambda row: jsp.sparse.linalg.cg(
                lambda x: matrix_of(p) @ (matrix_of(p).T @ x), row, maxiter=5
            )[0]
        )(outputs(p, b))
        ** 2
    ).mean(),
}
"""Losses with solutions of linear equations, which JAX differentiates by the sizes of arrays."""

REPAIRED = {
    "masked mean with weight decay": lambda p, b: masked_mean(p, b) + 1e-2 * (p["w"] ** 2).sum(),
    "masked mean beside a mean": lambda p, b: masked_mean(p, b) + mean_loss(p, b),
    "two masked means": lambda p, b: (
        masked_mean(p, b) + per_example(p, b).sum() / (1 - b["mask"]).sum()
    ),
    "weights scaled by their mean": lambda p, b: (
        (per_example(p, b) * b["mask"] / b["mask"].mean()).mean() ** 1
    ),
    "normalized weights": lambda p, b: (
        (per_example(p, b) * normalized(b["mask"])).mean() + mean_loss(p, b)
    ),
    "sum with weight decay": lambda p, b: per_example(p, b).sum() + (p["w"] ** 2).sum(),
    "square root of the size of the batch": lambda p, b: (
        mean_loss(p, b) * jnp.sqrt(b["x"].shape[0])
    ),
    "square of a mean that needs no model": lambda p, b: (b["x"] * p["w"][:, 0]).mean() ** 2,
    "gradients limited per example": lambda p, b: limited(per_example(p, b)).mean(),
}

COMPUTED_TWICE = {
    "perplexity": lambda p, b: jnp.exp(mean_loss(p, b)),
    "square of the mean": lambda p, b: mean_loss(p, b) ** 2,
    "square of a masked mean": lambda p, b: masked_mean(p, b) ** 2,
    "perplexity by a masked mean": lambda p, b: jnp.exp(masked_mean(p, b)),
    "limit of a masked mean": lambda p, b: jnp.tanh(masked_mean(p, b)),
    "weights that are learned": lambda p, b: (
        (outputs(p, b)[:, 0]).sum() / (outputs(p, b)[:, 1] ** 2).sum()
    ),
    "balance of outputs": lambda p, b: (
        3 * (jax.nn.one_hot(outputs(p, b).argmax(1), 3).mean(0) * outputs(p, b).mean(0)).sum()
    ),
}
"""Losses with a statistic of the model, which a first pass completes."""

GROUPED = {
    "preferences of pairs": lambda p, b: preferences(outputs(p, b).sum(1), 2),
    "best of four": lambda p, b: outputs(p, b).sum(1).reshape(-1, 4).max(1).mean(),
    "tokens in groups over examples": lambda p, b: (
        outputs(p, b).reshape(-1, 6).max(1) ** 2
    ).mean(),
    "tiles of several examples": lambda p, b: (
        outputs(p, b).sum(1) * jnp.tile(p["w"][:2, 0], len(b["x"]) // 2)
    ).mean(),
}

OF_THE_WHOLE_BATCH = {
    "masked means in a loop": lambda p, b: masked_in_a_loop(p, b),
    "largest": lambda p, b: per_example(p, b).max(),
    "batch normalization": lambda p, b: ((outputs(p, b) - outputs(p, b).mean(0)) ** 2).mean(),
    "contrastive": lambda p, b: jax.nn.logsumexp(outputs(p, b) @ outputs(p, b).T, axis=1).mean(),
    "neighbours": lambda p, b: (per_example(p, b)[1:] * per_example(p, b)[:-1]).mean(),
    "rows of another number": lambda p, b: (outputs(p, b).reshape(2, -1).max(1) ** 2).mean(),
    "rows in another order": lambda p, b: (
        jnp.reshape(outputs(p, b), (3, -1), order="F").T * p["b"]
    ).mean(),
    "columns read as rows": lambda p, b: (
        jax.lax.reshape(outputs(p, b), outputs(p, b).shape, (1, 0)) * p["b"]
    ).mean(),
    "a matrix scaled by the size of the batch": lambda p, b: (
        jsp.linalg.solve_triangular(
            matrix_of(p) * len(b["x"]), outputs(p, b).T, lower=True, unit_diagonal=True
        )
        ** 2
    ).mean(),
}
"""Losses that need all examples together, of outputs that a first pass computes."""


def step_of(loss):
    def step(params, batch):
        value, gradients = autopar.value_and_grad(lambda p: loss(p, batch))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def assert_equals_the_batch(step, method):
    assert_allclose(
        autopar.parallelize(step, method=method)(PARAMS, BATCH),
        jax.jit(step)(PARAMS, BATCH),
        rtol=1e-5,
        atol=1e-6,
    )


def step_of_all(losses):
    """Return one step, which compiles once, with the gradients of all losses."""

    def step(params, batch):
        return {name: step_of(loss)(params, batch) for name, loss in losses.items()}

    return step
