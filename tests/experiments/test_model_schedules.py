"""Shipped schedules keep the sweep's models' results and have Megatron's collectives."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import model_schedules as shipped
from autopar.directives import DirectiveError, ModelSchedule, Verify, build, create_schedule
from autopar.directives.build_model import Backend
from autopar.directives.definitions import Checkpoint, CutPipelineStage
from autopar.model_schedules import Knobs, TransformerNames
from autopar.testing import assert_allclose
from experiments.gpt_directives import NAMES
from experiments.models import BERT, GPT, Llama, WideResNet
from experiments.models.transformer import attend
from tests.autopar.directives.scheduled_models import collectives
from tests.tiers import pairs, slow, tiers

TOKENS = np.arange(32).reshape(4, 8) * 7 % 64
IMAGES = np.random.default_rng(0).standard_normal((4, 16, 16, 3)).astype(np.float32)


def attend_to_all(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return attend(query, key, value, causal=False)


@dataclass(frozen=True)
class Family:
    """A model as a function of (variables, input), and its schedule."""

    make: Callable[[int], Any]
    schedule: Callable[[ModelSchedule, Knobs], None]
    example: Any

    def scheduled(self, knobs: Knobs, mesh: Any = 4, layers: int = 1) -> ModelSchedule:
        state, _ = self.make(layers).abstract_args()
        variables = state.params
        if hasattr(state, "batch_stats"):
            variables = {"params": state.params, "batch_stats": state.batch_stats}
        sch = create_schedule(lambda *args: state.apply_fn(*args), variables, [self.example], mesh)
        self.schedule(sch, knobs)
        return sch


def transformer(
    model: type, schedule: Callable[..., None], names: TransformerNames, **more: int
) -> Family:
    sizes = {
        "hidden_size": 32,
        "num_heads": 8,
        "sequence_length": 8,
        "vocab_size": 64,
        "batch_size": 4,
        **more,
    }
    return Family(
        lambda layers: model(num_layers=layers, **sizes), partial(schedule, names=names), TOKENS
    )


LLAMA = replace(shipped.LLAMA, attend=NAMES.attend)
FAMILIES = {
    "gpt": transformer(GPT, shipped.schedule_gpt, NAMES),
    "bert": transformer(BERT, shipped.schedule_bert, replace(shipped.BERT, attend=attend_to_all)),
    "llama": transformer(Llama, shipped.schedule_llama, LLAMA, num_kv_heads=4, width=64),
    "wide_resnet": Family(
        lambda _: WideResNet(
            num_layers=8, channels=8, width=2, image_size=16, num_classes=16, batch_size=4
        ),
        shipped.schedule_wide_resnet,
        IMAGES,
    ),
}
TRANSFORMERS = ["gpt", "bert", "llama"]
MEGATRON = Knobs(vocabulary_parallel=True)
ALL = replace(MEGATRON, sequence_parallel=True, flash_attention=True, checkpoint_ratio=1.0)


@pytest.mark.parametrize(
    ("name", "backend", "mesh", "knobs"),
    tiers(
        [
            (name, *how)
            for name in TRANSFORMERS
            for how in [
                ("manual", (2, 4), replace(ALL, batch_axis="x")),
                ("gspmd", 4, ALL),
            ]
        ]
    )
    # the embedding is whole
    + [
        pytest.param(name, "manual", 4, Knobs(sequence_parallel=True), marks=pytest.mark.slow)
        for name in TRANSFORMERS
    ],
)
def test_scheduled_transformers_are_the_model_in_loss_and_every_gradient(
    name: str, backend: Backend, mesh: Any, knobs: Knobs
) -> None:
    sch = FAMILIES[name].scheduled(knobs, mesh)
    Verify(sch, [TOKENS], backend=backend, batch_axis=knobs.batch_axis).check()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["manual", "gspmd"])
def test_batch_normalization_is_of_the_whole_batch_wherever_that_is(backend: Backend) -> None:
    sch = FAMILIES["wide_resnet"].scheduled(Knobs(batch_axis="x", checkpoint_ratio=0.5), (2, 4))
    Verify(sch, [IMAGES], backend=backend, batch_axis="x").check()


@pytest.mark.parametrize("name", tiers(list(FAMILIES)))
def test_what_is_planned_around_a_schedule_has_the_gradients_of_one_device(name: str) -> None:
    family = FAMILIES[name]
    sch = family.scheduled(MEGATRON if name in TRANSFORMERS else Knobs())
    assert_planned_like_the_model(sch, family.example)


@pytest.mark.parametrize("name", slow(*FAMILIES))
def test_stages_of_any_model_have_the_gradients_of_one_device(name: str) -> None:
    family = FAMILIES[name]
    knobs = Knobs(vocabulary_parallel=name in TRANSFORMERS, pipeline_stages=2)
    parallel = assert_planned_like_the_model(
        family.scheduled(knobs, 2, layers=2), family.example, devices=4
    )
    assert len(parallel.plan.stages) == 2


def assert_planned_like_the_model(sch: ModelSchedule, example: Any, **more: Any) -> Any:
    """Check the value and gradients with backend "auto", and return the executable."""
    draw = np.random.default_rng(0)
    variables = jax.tree.map(lambda x: draw.normal(0.5, 0.2, x.shape).astype(x.dtype), sch.params)
    expected = jax.jit(partial(gradients, sch.fun))(variables, example)
    built = build(sch, "auto", **more)
    parallel = autopar.parallelize(partial(gradients, built.apply), method=built.method)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    assert_allclose(parallel(variables, example), expected, rtol=1e-3, atol=1e-4 * scale)
    return parallel.get_executable(variables, example)


def gradients(apply: Callable[..., Any], variables: Any, example: Any) -> Any:
    """Return a loss of a model's result, and its gradients."""

    def loss(variables: Any) -> jax.Array:
        result = apply(variables, example)
        return jnp.sin(result[0] if isinstance(result, tuple) else result).mean()

    return autopar.value_and_grad(loss)(variables)


LARGE = {
    "gpt": {"hidden_size": 512, "vocab_size": 4096},
    "bert": {"hidden_size": 512, "vocab_size": 4096},
    "llama": {"hidden_size": 512, "vocab_size": 4096, "width": 1024},
    "wide_resnet": {"channels": 128},
}
"""Sizes at which the planner also reduces activations; it gathers weights that are smaller."""


@pytest.mark.parametrize(("name", "backend"), pairs(list(FAMILIES), ["manual", "gspmd", "auto"]))
def test_every_backend_adds_up_as_often_as_the_schedule_says(name: str, backend: Backend) -> None:
    """The number of reductions is Megatron's.

    A transformer has two per block and direction, one of the embedding, and one of the gradients of
    the logits' input. Each of two bottlenecks has one forward and two backward.
    """
    family = FAMILIES[name]
    family = replace(
        family, make=lambda layers, make=family.make: replace(make(layers), **LARGE[name])
    )
    sch = family.scheduled(MEGATRON if name in TRANSFORMERS else Knobs())
    built = build(sch, backend)

    step = autopar.parallelize(
        partial(gradients, built.apply), method=built.method, batch_argnums=(1,)
    )
    assert added_up(step.get_executable(sch.params, sch.args[0]).get_hlo_text()) == 6


def added_up(hlo: str) -> int:
    """Return the number of all_reduces and reduce_scatters of activations that a schedule decides.

    The planner also reduces the gradients of norms, which have fewer dims, and the results of
    modules without directives: BERT's transform before the logits, and the skips of a residual
    network.
    """
    kinds = r"= (.*) (?:all-reduce|reduce-scatter)(?:-start)?\("
    matches = ((re.search(kinds, line), line) for line in hlo.splitlines())
    of_activations = [
        line for match, line in matches if match and re.search(r"\[\d+,\d+,\d+", match[1])
    ]
    return sum(
        "Conv_" in line or not re.search(r"\((transform|\w*/?skip)\)", line)
        for line in of_activations
    )


@pytest.mark.parametrize("name", tiers(["gpt", "llama"]))
def test_with_sequence_parallelism_sums_are_scattered_and_gathered_again(name: str) -> None:
    split = counted(FAMILIES[name].scheduled(replace(MEGATRON, sequence_parallel=True)), TOKENS)
    assert (split["all-gather"], split["reduce-scatter"]) == (6, 6)


@pytest.mark.parametrize("is_verified", [False, *slow(True)], ids=["collectives", "numbers"])
def test_the_loss_is_computed_where_the_logits_are(is_verified: bool) -> None:
    """Logits are never gathered; gradients need only the maximum and the sum of each position."""
    model = FAMILIES["gpt"].make(1)
    state, _ = model.abstract_args()
    labels = TOKENS * 3 % 64

    def loss(params: Any, tokens: Any, labels: Any) -> jax.Array:
        logits = state.apply_fn(params, tokens)
        with jax.named_scope("loss"):
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    sch = create_schedule(loss, state.params, [TOKENS, labels], 4)
    shipped.schedule_gpt(sch, MEGATRON, replace(NAMES, loss="loss"))
    assert counted(sch, TOKENS, labels) == {"all-reduce": 4 + 2 + 2}
    if is_verified:
        sch = create_schedule(loss, state.params, [TOKENS, labels], (2, 4))
        shipped.schedule_gpt(sch, replace(MEGATRON, batch_axis="x"), replace(NAMES, loss="loss"))
        Verify(sch, [TOKENS, labels], batch_axis="x").check()


def counted(sch: ModelSchedule, *args: Any) -> dict[str, int]:
    """Return the number of collectives of each kind in the gradients of a loss."""
    built = build(sch)
    loss = jax.jit(jax.grad(lambda params: jnp.sin(built.apply(params, *args)).mean()))
    placed = jax.tree.map(
        lambda p, at: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=at),
        sch.params,
        built.shardings,
    )
    return collectives(loss.lower(placed).compile())


def test_knobs_say_how_many_blocks_are_recomputed_and_where_stages_end() -> None:
    sch = FAMILIES["gpt"].scheduled(Knobs(checkpoint_ratio=0.6, pipeline_stages=2), layers=5)
    assert [each.path for each in sch.of_kind(Checkpoint)] == ["block_0", "block_1", "block_2"]
    assert [each.path for each in sch.of_kind(CutPipelineStage)] == ["block_1"]


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        (
            "gpt",
            {"pipeline_stages": 2},
            r"pipeline_stages is 2, but the model has 1 blocks, at 'block_\*'",
        ),
        (
            "gpt",
            {"checkpoint_ratio": 1.5},
            r"checkpoint_ratio is 1.5, expected a part between 0 and 1",
        ),
        ("gpt", {"pipeline_stages": 0}, r"pipeline_stages is 0, expected at least 1"),
        (
            "wide_resnet",
            {"flash_attention": True},
            r"a residual network has no tokens and no attention",
        ),
    ],
)
def test_knobs_that_a_model_can_not_have(name: str, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FAMILIES[name].scheduled(Knobs(**knobs))


def test_attention_that_is_written_otherwise_is_not_replaced() -> None:
    family = transformer(GPT, shipped.schedule_gpt, shipped.GPT)
    with pytest.raises(
        DirectiveError, match=r"the model's attention is not what names.attend computes"
    ):
        family.scheduled(Knobs(flash_attention=True))
