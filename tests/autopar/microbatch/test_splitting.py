"""Microbatches give the result of the whole batch, or are refused."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.layering.layer_clustering import NoLayersError
from autopar.testing import assert_allclose
from autopar.tracing.step_traces import TraceOptions
from autopar.tracing.trace import trace
from tests.tiers import fast, slow

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


def outputs(params, batch):
    return jnp.tanh(batch["x"] @ params["w"] + params["b"])


def per_example(params, batch):
    return -jnp.take_along_axis(
        jax.nn.log_softmax(outputs(params, batch)), batch["y"][:, None], axis=1
    )[:, 0]


def mean_loss(params, batch):
    return per_example(params, batch).mean()


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
}


def convolved(params, batch):
    images = batch["x"].reshape(-1, 1, 6)
    hidden = jax.lax.conv_general_dilated(images, params["w"].T[:, None, :], (1,), "SAME")
    return jax.lax.reduce_window(
        hidden, -jnp.inf, jax.lax.max, (1, 1, 2), (1, 1, 2), "VALID"
    ).mean()


FITTING["convolution and pooling"] = convolved
FITTING |= {
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
}


def modulated(params, batch):
    """Convolve each example with a kernel of its own, then apply a layer, as StyleGAN2 does."""

    def convolved(x, kernel):
        return jax.lax.conv_general_dilated(x[None, None], kernel[:, None], (1,), "SAME")[0]

    kernels = jnp.stack([outputs(params, batch), 2 * outputs(params, batch)], 1)
    hidden = jax.vmap(convolved)(batch["x"], kernels)
    return (jnp.tanh(hidden.mean(1) @ params["w"]) ** 2).mean()


FITTING["a kernel for each example"] = modulated


def masked_mean(params, batch):
    return (per_example(params, batch) * batch["mask"]).sum() / batch["mask"].sum()


def scanned(params, batch):
    """Return the masked mean of the result of three layers with the same weights."""

    def layer(x, _):
        return jnp.tanh(x @ (params["w"] @ params["w"].T)), None

    x, _ = jax.lax.scan(layer, batch["x"], length=3)
    return (x.sum(1) * batch["mask"]).sum() / batch["mask"].sum()


FITTING |= {
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
}

FITTING |= {
    "tiled examples": lambda p, b: (
        jnp.tile(outputs(p, b), (2, 1)).reshape(2, -1, 3).max(0)
    ).mean(),
    "position in the batch": lambda p, b: (per_example(p, b) * jnp.arange(b["x"].shape[0])).mean(),
    "label of each example": lambda p, b: (
        -jax.nn.log_softmax(outputs(p, b))[jnp.arange(b["x"].shape[0]), b["y"]].mean()
    ),
}


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

FITTING |= {
    "a branch for zeros": branching,
    "signs of gradients": lambda p, b: bounded(per_example(p, b) * (b["mask"] - 0.3)).mean(),
}


def matrix_of(params):
    """Return a lower triangular matrix with a row per output."""
    return jnp.tril(jnp.outer(params["b"], params["b"])) + 2 * jnp.eye(3)


FITTING |= {
    "positions of the largest weights": lambda p, b: (
        mean_loss(p, b) * jax.lax.top_k(p["b"] * len(b["x"]), 2)[1].sum()
    ),
}

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

FITTING |= {
    "root of the size of the batch": lambda p, b: per_example(p, b).sum() / np.sqrt(len(b["x"])),
    "logarithm of the size of the batch": lambda p, b: mean_loss(p, b) * np.log(len(b["x"])),
    "one less than the size of the batch": lambda p, b: per_example(p, b).sum() / (len(b["x"]) - 1),
    "square of the size of the batch": lambda p, b: per_example(p, b).sum() / len(b["x"]) ** 2,
    "a factor for large batches": lambda p, b: mean_loss(p, b) * (2.0 if len(b["x"]) > 4 else 3.0),
    "a third of the size of the batch": lambda p, b: per_example(p, b).sum() / (len(b["x"]) // 3),
}

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

REFUSED = {
    "positions as constants": lambda p, b: (
        per_example(p, b) * np.arange(len(b["x"]), dtype=np.float32)
    ).mean(),
    "a part by the size of the batch": lambda p, b: (
        mean_loss(p, b) * jnp.split(p["w"][:, 0], [1, 1 + len(b["x"]) // 4])[1].sum()
    ),
    "an index by the size of the batch": lambda p, b: (
        mean_loss(p, b)
        * jax.lax.dynamic_slice(
            p["w"], (jnp.int32(len(b["x"]) // 4), 0), (1, 3), allow_negative_indices=False
        ).sum()
    ),
    "indices by the size of the batch": lambda p, b: (
        mean_loss(p, b)
        * (
            p["w"]
            .at[jnp.array([len(b["x"]) // 2, len(b["x"]) // 4])]
            .get(mode="promise_in_bounds", wrap_negative_indices=False)
            .sum()
        )
    ),
}


def masked_in_a_loop(params, batch):
    """Each iteration divides by weights of its own."""

    def layer(total, scale):
        weights = (batch["mask"] * scale).sum()
        return total + (per_example(params, batch) * batch["mask"]).sum() / weights, None

    return jax.lax.scan(layer, 0.0, jnp.arange(1.0, 3.0))[0]


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


@pytest.mark.parametrize(
    ("losses", "method"),
    [
        (FITTING, autopar.DataParallel(1, 2)),
        (SOLVED, autopar.ShardParallel(1, 4)),
        (REPAIRED, autopar.DataParallel(2, 2)),
        (REPAIRED, autopar.ShardParallel(1, 4)),
        (COMPUTED_TWICE, autopar.ShardParallel(2, 2)),
        (OF_THE_WHOLE_BATCH, autopar.ShardParallel(2, 2)),
        (GROUPED, autopar.DataParallel(1, 2)),
    ],
    ids=[
        "sums and means",
        "solutions",
        "statistics",
        "statistics, 4",
        "computed twice",
        "of the whole batch",
        "neighbours",
    ],
)
def test_losses_over_the_batch_are_exact(losses, method):
    assert_equals_the_batch(step_of_all(losses), method)


@pytest.mark.parametrize("loss", (FITTING | SOLVED).values(), ids=(FITTING | SOLVED).keys())
@pytest.mark.parametrize("count", slow(2, 8))
def test_sums_and_means_over_the_batch_are_exact(loss, count):
    assert_equals_the_batch(step_of(loss), autopar.DataParallel(1, count))


@pytest.mark.parametrize("loss", REPAIRED.values(), ids=REPAIRED.keys())
@pytest.mark.parametrize(
    "method", slow(autopar.DataParallel(2, 2), autopar.ShardParallel(1, 4)), ids=["2", "4"]
)
def test_sums_beside_means_and_statistics_of_the_batch_are_exact(loss, method):
    assert_equals_the_batch(step_of(loss), method)


def nearly_ones(rows):
    """Return an array of ones whose last element is the next larger number.

    The trace for a single example of a step that reads it does not follow from those for more.
    """
    return np.append(np.ones(rows - 1, np.float32), np.nextafter(np.float32(1), np.float32(2)))


def with_array(loss):
    """Return a loss that reads `nearly_ones`."""
    return lambda p, b: loss(p, {**b, "mask": b["mask"] * nearly_ones(len(b["mask"]))})


def test_a_single_example_per_microbatch_is_told_to_be_the_reason():
    with pytest.raises(
        autopar.MicrobatchError, match="has a single example: fewer microbatches may do"
    ):
        trace(
            step_of(with_array(REPAIRED["normalized weights"])),
            (PARAMS, BATCH),
            (1,),
            num_micro_batches=8,
        )


def test_a_single_example_is_computed_as_several_are():
    def loss(params, batch):
        value = REPAIRED["normalized weights"](params, batch)
        return value if len(batch["mask"]) > 1 else 2 * value

    assert_equals_the_batch(step_of(loss), autopar.ShardParallel(1, num_micro_batches=8))


def test_rows_of_a_single_example_get_the_dim_that_jax_leaves_out():
    """`take_along_axis` drops dims of size one, here from indices that are read after the loss."""

    def step(weights, batch):
        def loss_fn(weights):
            scores = batch["x"] @ weights
            order = jnp.argsort(batch["tokens"], 1)
            sorted_scores = jnp.take_along_axis(scores, order, 1)
            relative = jnp.take_along_axis(scores / jnp.abs(scores).max(), order, 1)
            return (sorted_scores * jnp.arange(3)).mean(), relative

        (_, relative), gradient = jax.value_and_grad(loss_fn, has_aux=True)(weights)
        return weights - gradient, relative

    batch = {
        "x": np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5) ** 3,
        "tokens": np.array([[3, 1, 2], [0, 5, 4], [7, 7, 1], [2, 9, 0]]),
    }
    weights = np.linspace(-1, 2, 15, dtype=np.float32).reshape(5, 3)
    method = autopar.ShardParallel(1, num_micro_batches=4)
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(parallel(weights, batch), jax.jit(step)(weights, batch), rtol=1e-5, atol=1e-6)


def test_arguments_that_may_be_batches_are_named_if_a_microbatch_cannot_be_traced():
    def step(weights, x, y):
        return jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(weights)

    method = autopar.ShardParallel(1, num_micro_batches=2)
    parallel = autopar.parallelize(step, method=method, batch_argnums=1)
    with pytest.raises(autopar.MicrobatchError, match=r"in batch_argnums: 2 has arrays of 4 rows"):
        parallel(np.ones((5, 3), np.float32), np.ones((4, 5)), np.ones((4, 3)))


def sharpness_aware_step_of(norm_of):
    def step(params, batch):
        def loss_fn(params):
            hidden = jax.nn.relu(batch["x"] @ params["in"])
            return ((hidden @ params["out"] - batch["y"]) ** 2).mean()

        grads = jax.grad(loss_fn)(params)
        norm = norm_of(params, grads)
        ascended = jax.tree.map(lambda p, g: p + 0.05 * g / norm, params, grads)
        grads = jax.grad(loss_fn)(ascended)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


sharpness_aware_step = sharpness_aware_step_of(lambda params, grads: optax.tree.norm(grads))


def sharpness_aware_arguments():
    rng = np.random.default_rng(0)
    shapes = {"in": (4, 8), "out": (8, 2), "x": (8, 4), "y": (8, 2)}
    values = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    return {k: values[k] for k in ("in", "out")}, {k: values[k] for k in ("x", "y")}


COMPLETED = COMPUTED_TWICE | OF_THE_WHOLE_BATCH


def test_a_sharpness_aware_step_may_have_contrastive_losses():
    def loss(params, batch):
        rows = outputs(params, batch)
        return -jnp.diag(jax.nn.log_softmax(rows @ jnp.tanh(rows).T)).mean()

    def step(params, batch):
        first = jax.grad(loss)(params, batch)
        moved = jax.tree.map(lambda p, g: p + 0.05 * g / optax.tree.norm(first), params, first)
        return jax.value_and_grad(loss)(moved, batch)

    assert_equals_the_batch(step, autopar.ShardParallel(2, num_micro_batches=4))


@pytest.mark.parametrize("loss", COMPLETED.values(), ids=COMPLETED.keys())
@pytest.mark.parametrize(
    "method",
    slow(
        autopar.ShardParallel(1, 4),
        autopar.PipeshardParallel(
            4, 2, layer_option=autopar.AutoLayerOption(2), stage_option="uniform"
        ),
    ),
    ids=["4 microbatches", "pipeline"],
)
def test_losses_that_need_two_passes_are_exact(loss, method):
    def step(params, batch):
        return step_of(lambda p, b: loss(p, b | {"x": deep(p["deep"], b["x"])}))(params, batch)

    params = PARAMS | {"deep": DEEP}
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    assert_allclose(parallel(params, BATCH), jax.jit(step)(params, BATCH), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "method",
    [
        autopar.ShardParallel(2, num_micro_batches=2),
        autopar.PipeshardParallel(
            2, num_micro_batches=2, layer_option=autopar.AutoLayerOption(2), stage_option="uniform"
        ),
    ],
    ids=["shards", "pipeline"],
)
def test_a_second_gradient_of_the_batch_follows_the_first_in_a_second_pass(method):
    """Sharpness-aware steps move the parameters by the first gradient of the whole batch."""
    step = autopar.parallelize(sharpness_aware_step, method=method)
    expected = sharpness_aware_step(*sharpness_aware_arguments())
    autopar.testing.assert_allclose(step(*sharpness_aware_arguments()), expected, rtol=1e-4)
    executable = step.get_last_executable()
    assert executable is not None
    assert "2 passes over the microbatches compute the model" in executable.plan.warnings[-1]
    assert executable.first_pass is not None
    assert executable.step.first_pass.has_backward


@pytest.mark.parametrize(
    "norm_of",
    [
        lambda params, grads: jnp.abs(grads["in"]).max(),
        lambda params, grads: jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads))),
        lambda params, grads: optax.tree.norm(jax.tree.map(jnp.multiply, params, grads)),
    ],
    ids=["of some gradients", "by dot products", "of scaled gradients"],
)
def test_a_second_gradient_may_follow_from_a_norm_of_the_first_in_any_way(norm_of):
    """All first gradients are completed, though the norm reads some of them, or functions."""
    step = sharpness_aware_step_of(norm_of)
    parallel = autopar.parallelize(
        step, method=autopar.ShardParallel(2, num_micro_batches=2), donate_argnums=()
    )
    args = sharpness_aware_arguments()
    autopar.testing.assert_allclose(parallel(*args), jax.jit(step)(*args), rtol=1e-4)


def test_a_pipeline_of_one_microbatch_takes_a_second_gradient_of_the_batch():
    method = autopar.PipeshardParallel(
        2, num_micro_batches=1, layer_option=autopar.AutoLayerOption(2)
    )
    step = autopar.parallelize(sharpness_aware_step, method=method)
    expected = sharpness_aware_step(*sharpness_aware_arguments())
    autopar.testing.assert_allclose(step(*sharpness_aware_arguments()), expected, rtol=1e-4)


@pytest.mark.parametrize("loss", slow(*GROUPED.values()), ids=GROUPED.keys())
def test_examples_that_are_put_together_are_neighbours(loss):
    assert_equals_the_batch(step_of(loss), autopar.DataParallel(1, 2))


@pytest.mark.parametrize("loss", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_neither_is_refused(loss):
    with pytest.raises(autopar.MicrobatchError):
        trace(step_of(loss), (PARAMS, BATCH), (1,), num_micro_batches=2)


@pytest.mark.parametrize("own_weights", [False, True])
def test_a_loop_that_accumulates_gradients_is_refused_with_what_to_write(own_weights):
    """Chunks that are computed alike are microbatches, others are refused."""

    def step(params, batch):
        gradients = jax.tree.map(jnp.zeros_like, params)
        size = len(batch["x"]) // 4
        for k in range(4):
            part = jax.tree.map(lambda rows, k=k: rows[k * size : (k + 1) * size], batch)
            new = jax.grad(mean_loss)(params, part)
            gradients = jax.tree.map(lambda a, b: a + b / 4, gradients, new)
            if own_weights:
                params = jax.tree.map(lambda p, g: p - 0.1 * g, params, new)
        return gradients

    advice = "write one gradient of the whole batch" if own_weights else "use num_micro_batches=4"
    with pytest.raises(autopar.MicrobatchError, match=advice):
        trace(step, (PARAMS, BATCH), (1,), num_micro_batches=2)
    pipeline = autopar.PipeshardParallel(
        2, num_micro_batches=8, layer_option=autopar.AutoLayerOption(2)
    )
    error = NoLayersError if own_weights else autopar.MicrobatchError
    with pytest.raises(error, match=advice):
        autopar.parallelize(step, method=pipeline)(PARAMS, BATCH)


def test_several_updates_in_a_scan_are_refused_as_gradients_after_an_update():
    def step(params, batches):
        def update(params, batch):
            value, gradients = jax.value_and_grad(mean_loss)(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

        return jax.lax.scan(update, params, batches)

    batches = jax.tree.map(lambda rows: np.stack([rows, rows]), BATCH)
    method = autopar.ShardParallel(1, num_micro_batches=2)
    with pytest.raises(autopar.MicrobatchError, match=r"a gradient has changed.*of each update"):
        autopar.parallelize(step, method=method, batch_argnums={1: 1})(PARAMS, batches)


@pytest.mark.parametrize("count", [2, 4])
def test_a_gradient_by_a_row_that_the_size_of_the_batch_names_is_of_the_whole_batch(count):
    """Nothing else of the loss is left that reads the row, so that its index is that of a pad."""

    def step(table, batch):
        def loss(table):
            return (jnp.sin(batch["x"]) * table[batch["x"].shape[0] - 1]).mean()

        return jax.grad(loss)(table)

    table = RNG.standard_normal((8, 6)).astype(np.float32)
    planned = autopar.parallelize(
        step, method=autopar.ShardParallel(1, num_micro_batches=count), batch_argnums=(1,)
    )
    assert_allclose(planned(table, BATCH), step(table, BATCH), rtol=1e-5, atol=1e-6)


def test_a_scan_of_updates_is_refused_at_its_reshape():
    def step(params, batch):
        def update(params, part):
            return jax.tree.map(jnp.subtract, params, jax.grad(mean_loss)(params, part)), None

        parts = jax.tree.map(lambda rows: rows.reshape(2, -1, *rows.shape[1:]), batch)
        return jax.lax.scan(update, params, parts)[0]

    words = r"reshape at .*test_splitting.py.*write one gradient of the whole batch"
    with pytest.raises(autopar.MicrobatchError, match=words):
        trace(step, (PARAMS, BATCH), (1,), num_micro_batches=4)


@settings(max_examples=5)
@given(
    rows=st.sampled_from([2, 4, 6, 12]),
    parts=st.sampled_from([2, 3, 6]),
    width=st.integers(1, 4),
    scale=st.floats(-3, 3).filter(lambda s: abs(s) > 1e-2),
    mean=st.booleans(),
)
def test_microbatches_equal_the_batch_for_random_losses(rows, parts, width, scale, mean):
    rows *= parts
    x = np.random.default_rng(rows).standard_normal((rows, width)).astype(np.float32)

    def loss(p, b):
        z = scale * jnp.sin(b @ p)
        return z.mean() if mean else (z**2).sum()

    p = np.ones((width, 2), np.float32)
    micro = autopar.parallelize(
        step_of(loss), method=autopar.DataParallel(devices=1, num_micro_batches=parts)
    )
    assert_allclose(micro(p, x), step_of(loss)(p, x), rtol=1e-4, atol=1e-4)


def test_a_microbatch_without_weights_does_no_harm():
    """0 / 0 in one of four microbatches, of examples k, k + 4."""
    batch = BATCH | {"mask": np.array([0, 1, 0, 1, 0, 0, 1, 0], np.float32)}
    step = step_of(masked_mean)
    micro = autopar.parallelize(step, method=autopar.DataParallel(devices=2, num_micro_batches=4))
    assert_allclose(micro(PARAMS, batch), jax.jit(step)(PARAMS, batch), rtol=1e-5, atol=1e-6)


def test_several_masked_means_are_accumulated_each_with_its_weights():
    """In one loss function, as auxiliary values, and in two."""

    def step(params, batch):
        def loss(p, mask):
            total = (per_example(p, batch) * mask).sum()
            return total / mask.sum(), {
                "tokens": mask.sum(),
                "share": total / (2 * batch["mask"] + 1).sum(),
            }

        one = autopar.value_and_grad(loss, has_aux=True)(params, batch["mask"])
        two = autopar.value_and_grad(loss, has_aux=True)(params, 1 + batch["mask"])
        return one, two

    micro = autopar.parallelize(step, method=autopar.DataParallel(devices=2, num_micro_batches=4))
    assert_allclose(micro(PARAMS, BATCH), step(PARAMS, BATCH), rtol=1e-5, atol=1e-6)


METHODS = {
    "shards": autopar.ShardParallel(devices=(2, 2), num_micro_batches=2),
    "data parallel": autopar.DataParallel(devices=2, num_micro_batches=2),
    "ZeRO": autopar.Zero3Parallel(devices=2, num_micro_batches=2),
    "pipeline": autopar.PipeshardParallel(
        devices=2, num_micro_batches=2, layer_option=autopar.AutoLayerOption(2)
    ),
}
over_methods = pytest.mark.parametrize(
    "method", fast(METHODS.values(), [METHODS["shards"], METHODS["pipeline"]]), ids=METHODS.keys()
)
DEEP = {"w": [RNG.standard_normal((6, 6)).astype(np.float32) for _ in range(2)]}


def deep(params, x):
    return jnp.tanh(x @ params["w"][0]) @ params["w"][1]


@over_methods
def test_the_size_of_the_batch_is_that_of_the_whole_batch_outside_of_the_loss(method):
    """As a number, an array, a shape, and as auxiliary values of both kinds."""

    def step(params, batch, seen):
        def loss(p):
            return (deep(p, batch["x"]) ** 2).sum(), (
                jnp.float32(batch["x"].shape[0]),
                len(batch["x"]),
            )

        (total, (examples, number)), gradients = autopar.value_and_grad(loss, has_aux=True)(params)
        updated = jax.tree.map(lambda p, g: p - 0.1 * g / batch["x"].shape[0], params, gradients)
        positions = jnp.arange(number) + len(batch["y"])
        return updated, total / examples, seen + batch["x"].shape[0], positions

    args = DEEP, BATCH, jnp.int32(3)
    assert_allclose(
        autopar.parallelize(step, method=method)(*args), jax.jit(step)(*args), rtol=1e-5, atol=1e-5
    )


@over_methods
def test_what_rounds_to_integers_is_rounded_once(method):
    """Quotients of the microbatches' integers do not sum to the batch's."""

    def step(params, batch):
        def loss(p):
            rows = (batch["x"] * 0 + 5).astype(jnp.int32)
            return (deep(p, batch["x"]) ** 2).mean(), jax.lax.div(rows.sum(), 7)

        (value, seventh), gradients = autopar.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value, seventh

    trained = autopar.parallelize(step, method=method)
    assert_allclose(trained(DEEP, BATCH), jax.jit(step)(DEEP, BATCH), rtol=1e-5, atol=1e-5)


@over_methods
def test_neighbouring_examples_stay_together(method):
    def step(params, batch):
        def loss(p):
            return preferences(deep(p, batch["x"]).sum(1), 2), deep(p, batch["x"]).sum()

        (value, total), gradients = autopar.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value, total

    assert_allclose(
        autopar.parallelize(step, method=method)(DEEP, BATCH),
        jax.jit(step)(DEEP, BATCH),
        rtol=1e-5,
        atol=1e-5,
    )


def test_more_neighbours_than_a_microbatch_has_are_refused_with_their_number():
    def step(params, batch):
        return autopar.grad(lambda p: preferences(outputs(p, batch).sum(1), 4))(params)

    with pytest.raises(
        autopar.MicrobatchError,
        match=r"test_splitting.py:\d+ puts 4 neighbouring examples together, .* microbatch has 2",
    ):
        trace(step, (PARAMS, BATCH), (1,), num_micro_batches=4)


def test_rows_come_back_in_order_from_an_evaluation_that_groups_neighbours():
    def train(params, batch):
        value, gradients = autopar.value_and_grad(lambda p: (deep(p, batch["x"]) ** 2).mean())(
            params
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    def evaluate(params, batch):
        scores = deep(params, batch["x"])
        return (
            scores,
            scores.sum(1).reshape(-1, 2).max(1),
            scores.reshape(-1),
            jnp.arange(len(scores)),
            len(scores),
        )

    trained = autopar.parallelize(train, method=METHODS["pipeline"])
    trained(DEEP, BATCH)
    evaluated = autopar.parallelize(
        evaluate, method=autopar.FollowParallel(trained, num_micro_batches=2)
    )
    assert_allclose(evaluated(DEEP, BATCH), jax.jit(evaluate)(DEEP, BATCH), rtol=1e-5, atol=1e-5)


def test_statistics_that_divide_a_loss_are_accumulated_in_loops_before_it():
    """Weights are normalized by mean, then by deviation; only the last loop runs the model."""

    def step(params, batch):
        return autopar.grad(lambda p: (per_example(p, batch) * normalized(batch["mask"])).mean())(
            params
        )

    found = trace(step, (PARAMS, BATCH), (1,), num_micro_batches=2).microbatching
    products = [
        sum(eqn.primitive.name == "dot_general" for _, eqn in loop.body) for loop in found.loops
    ]
    assert len(products) == 3
    assert products[:2] == [0, 0]
    assert products[2] > 0


@over_methods
def test_what_is_printed_in_a_loss_is_printed_per_microbatch_and_after_it_once(method, capfd):
    def step(params, batch):
        def loss(p):
            hidden = deep(p, batch["x"])
            jax.debug.print("inside {}", hidden.shape[0])
            jax.debug.print("sum {}", hidden.sum())
            return (hidden**2).mean()

        value, gradients = autopar.value_and_grad(loss)(params)
        jax.debug.print("after {}", value)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    planned = autopar.parallelize(step, method=method)
    value = jax.block_until_ready(planned(DEEP, BATCH))[1]
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    assert sum(line.startswith("sum") for line in lines) >= 2
    assert [float(line.split()[1]) for line in lines if line.startswith("after")] == [
        pytest.approx(float(value))
    ]
    assert_allclose((value,), jax.jit(step)(DEEP, BATCH)[1:], rtol=1e-5)


def test_a_model_that_knows_the_size_of_the_batch_is_refused_in_words_of_microbatches():
    def step(params, batch):
        return autopar.grad(lambda p: (batch["x"].reshape(8, 6) @ p["w"]).mean())(params)

    words = r"not for a microbatch of 4: .*\.py:\d+ raises TypeError: .*\n.*x\.shape\[0\]"
    with pytest.raises(autopar.MicrobatchError, match=words):
        trace(step, (PARAMS, BATCH), (1,), num_micro_batches=2)


def test_a_batch_is_named_by_its_own_shape_where_microbatches_do_not_divide():
    step = step_of(mean_loss)
    with pytest.raises(ValueError, match=r"has shape \(8,.*\): in 2 microbatches of 4 examples"):
        autopar.parallelize(step, method=autopar.DataParallel(devices=8, num_micro_batches=2))(
            PARAMS, BATCH
        )


def test_auxiliary_values_are_put_together():
    def step(params, batch):
        def loss(p):
            each = per_example(p, batch)
            return each.mean(), {
                "count": batch["mask"].sum(),
                "mean": each.mean(),
                "fixed": jnp.int32(3),
            }

        (value, aux), gradients = autopar.value_and_grad(loss, has_aux=True)(params)
        return gradients, value, aux

    micro = autopar.parallelize(step, method=autopar.DataParallel(devices=1, num_micro_batches=4))
    assert_allclose(micro(PARAMS, BATCH), step(PARAMS, BATCH), rtol=1e-5, atol=1e-6)


def test_grad_alone_accumulates():
    def step(params, batch):
        return autopar.grad(lambda p: mean_loss(p, batch))(params)

    micro = autopar.parallelize(step, method=autopar.DataParallel(devices=1, num_micro_batches=2))
    assert_allclose(micro(PARAMS, BATCH), step(PARAMS, BATCH), rtol=1e-5, atol=1e-6)


def test_outside_parallelize_they_are_jaxs_own():
    value, gradients = autopar.value_and_grad(mean_loss)(PARAMS, BATCH)
    assert_allclose((value, gradients), jax.value_and_grad(mean_loss)(PARAMS, BATCH))
    assert_allclose(jax.jit(autopar.grad(mean_loss))(PARAMS, BATCH), gradients)


def test_a_pipeline_of_a_step_without_gradient_is_refused():
    with pytest.raises(autopar.MicrobatchError, match="the step takes no gradient"):
        trace(mean_loss, (PARAMS, BATCH), (1,), 2, TraceOptions(marked=True))


def test_a_batch_without_arrays_is_said_to_have_no_gradient_and_nothing_else():
    with pytest.raises(autopar.MicrobatchError, match=r"for an evaluation$"):
        trace(lambda scale, count: scale * count, (1.0, 2), (1,), options=TraceOptions(marked=True))


def test_a_batch_that_cannot_be_cut_is_refused():
    with pytest.raises(autopar.MicrobatchError, match=r"1/mask has shape \(8,\).* 3 microbatches"):
        trace(step_of(mean_loss), (PARAMS, BATCH), (1,), num_micro_batches=3)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (2, "different things for batches of different size"),
        (8, "something else for a microbatch of 1 than for 2 examples"),
    ],
)
def test_steps_that_compute_otherwise_for_a_microbatch_are_refused(count, words):
    def loss(params, batch):
        errors = per_example(params, batch) * nearly_ones(len(batch["mask"]))
        if errors.shape[0] == 8 // count:
            return (errors * batch["mask"]).mean()
        return errors.mean()

    with pytest.raises(autopar.MicrobatchError, match=words):
        trace(step_of(loss), (PARAMS, BATCH), (1,), num_micro_batches=count)


def test_a_microbatch_computes_as_the_whole_batch_does():
    """Sizes of arrays decide the order of products, as in JAX's derivative of a solution."""

    def loss(params, batch):
        hidden = outputs(params, batch)
        if len(hidden) < 6:
            hidden = hidden @ params["w"].T @ params["w"]
        else:
            hidden = hidden @ (params["w"].T @ params["w"])
        return jnp.tanh(hidden).mean() / len(hidden)

    assert_equals_the_batch(step_of(loss), autopar.ShardParallel(num_micro_batches=4))


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (2, "different things for batches of different size at .*: tanh of other values"),
        (8, "something else for a microbatch of 1 than for 2 examples"),
    ],
)
def test_steps_that_compute_from_other_values_for_a_microbatch_are_refused(count, words):
    def step(params, batch):
        def loss(params):
            values = per_example(params, batch)
            return values.mean(), values

        (_, values), gradients = autopar.value_and_grad(loss, has_aux=True)(params)
        seen = batch["mask"] if len(values) == 8 // count else values
        weights = nearly_ones(len(values))
        return gradients, jnp.tanh(seen).sum(), values, (weights * batch["mask"]).sum()

    with pytest.raises(autopar.MicrobatchError, match=words):
        trace(step, (PARAMS, BATCH), (1,), num_micro_batches=count)


def test_steps_that_return_other_values_for_a_microbatch_are_refused():
    def step(params, batch):
        value, gradients = autopar.value_and_grad(mean_loss)(params, batch)
        means = batch["mask"].mean(), value
        return gradients, means[::-1] if len(batch["mask"]) == 8 else means

    with pytest.raises(autopar.MicrobatchError, match="other results"):
        trace(step, (PARAMS, BATCH), (1,), num_micro_batches=2)


def test_loops_over_layers_and_time_keep_what_they_carry():
    """The scan's carry starts as zeros and becomes a row per example; gradients accumulate."""

    def step(w, x):
        def loss(w):
            def cell(state, row):
                total, hidden = state
                hidden = jnp.tanh(hidden @ w + row)
                return (total + (hidden**2).mean(), hidden), None

            hidden = jnp.zeros((x.shape[0], 4))
            (total, _), _ = jax.lax.scan(cell, (0.0, hidden), x.swapaxes(0, 1))
            return total

        value, grad = autopar.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    x = jax.random.normal(jax.random.key(1), (8, 3, 4))
    w = jax.random.normal(jax.random.key(2), (4, 4))
    planned = autopar.parallelize(step, method=autopar.DataParallel(devices=2, num_micro_batches=2))
    autopar.testing.assert_allclose(planned(w, x), jax.jit(step)(w, x), rtol=1e-5, atol=1e-6)


def recurrent_loss(params, batch):
    """Clip the gradient of the state of a recurrent network at each step."""

    def cell(state, scale):
        state = jnp.tanh(clipped(state) @ params["w"][:3] + scale * outputs(params, batch))
        return state, None

    state, _ = jax.lax.scan(cell, jnp.zeros((len(batch["x"]), 3)), jnp.arange(1.0, 4.0))
    return ((state - 1) ** 2).mean()


@pytest.mark.parametrize(
    "loss", [lambda p, b: ((clipped(outputs(p, b)) - 1) ** 2).mean(), recurrent_loss]
)
def test_gradients_of_examples_are_clipped_at_their_value_in_the_whole_batch(loss):
    """They are divided by the size of the batch, also those that a loop starts with."""
    step = step_of(loss)
    planned = autopar.parallelize(step, method=autopar.DataParallel(2, 4))
    assert planned.get_executable(PARAMS, BATCH).plan.num_passes == 1
    assert_allclose(planned(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH), rtol=1e-5, atol=1e-6)


def test_a_branch_on_the_batch_is_taken_alike_in_all_microbatches():
    """A first pass completes the condition, here a sum that a part of the batch has otherwise."""

    def step(w, x):
        def loss(w):
            return jax.lax.cond(
                x.sum() > 0, lambda: jnp.tanh(x @ w).mean(), lambda: jnp.sin(x @ w).sum()
            )

        return autopar.grad(loss)(w)

    x = jnp.where(jnp.arange(8)[:, None] % 2 == 0, -1.0, 2.0) * jnp.ones((8, 4))
    w = jax.random.normal(jax.random.key(2), (4, 4))
    for sign in (1, -1):
        method = autopar.DataParallel(devices=2, num_micro_batches=2)
        planned = autopar.parallelize(step, method=method, donate_argnums=())
        assert_allclose(planned(w, sign * x), jax.jit(step)(w, sign * x), rtol=1e-5, atol=1e-6)
