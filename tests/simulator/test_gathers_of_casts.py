"""Gathers of what products of few bits read: its width by recipe, on backends that cast before."""

from dataclasses import replace
from typing import Any

import pytest

from simulator.hardware.cluster import Cluster
from simulator.hardware.description import validate
from simulator.transformer import Execution, Machine, Transformer, predict
from simulator.transformer.pass_cost import tensor_collectives
from simulator.transformer.precision import RECIPES, Precision

CLUSTER = Cluster.load("dgx_b200")
CASTING = Machine(CLUSTER, replace(Machine(CLUSTER).backend, gathers_casts=True))
PLAIN = Machine(CLUSTER)


def model(precision: Precision) -> Transformer:
    sizes = {"layers": 4, "hidden": 4096, "heads": 32, "seq": 2048, "vocab": 32000}
    return validate(Transformer, sizes | {"attention": "flash2", "precision": precision}, "model")


def execution(**fields: Any) -> Execution:
    return validate(Execution, {"global_batch": 8} | fields, "execution")


@pytest.mark.parametrize(
    ("precision", "input_width", "gradient_width"),
    [
        ("bf16", 2, 2),
        ("f8", 1, 1),
        # the transposed cast has scales of its own
        ("f8-block", 1 + 4 / 128, 2 + 8 / 128),
        ("mxfp8", 1 + 1 / 32, 2 + 2 / 32),
        ("nvfp4", 0.5 + 1 / 16, 1 + 2 / 16),
    ],
)
def test_tensor_parallelism_gathers_casts(
    precision: Precision, input_width: float, gradient_width: float
) -> None:
    plan = execution(tensor=4, sequence_parallel=True)
    forward, backward = tensor_collectives(3072, 1024, model(precision), plan, CASTING)
    elements, ring = 2048 * 4096, CASTING.network.ring(4)

    def gather(width: float) -> float:
        return CASTING.network.seconds("all_gather", width * elements, ring)

    scatter = CASTING.network.seconds("reduce_scatter", 2.0 * elements, ring)
    assert forward.communication == pytest.approx(gather(input_width) + scatter)
    assert backward.communication == pytest.approx(
        gather(input_width) + scatter + gather(gradient_width)
    )


def test_sums_and_other_backends_have_16_bits() -> None:
    divided = execution(tensor=4, sequence_parallel=True)
    summed = execution(tensor=4)
    eight, sixteen = model("f8"), model("bf16")
    assert tensor_collectives(3072, 1024, eight, summed, CASTING) == tensor_collectives(
        3072, 1024, sixteen, summed, CASTING
    )
    assert tensor_collectives(3072, 1024, eight, divided, PLAIN) == tensor_collectives(
        3072, 1024, sixteen, divided, PLAIN
    )


@pytest.mark.parametrize("zero", [1, 3])
def test_parameters_are_gathered_in_8_bits_with_a_scale_per_tensor(zero: int) -> None:
    plan = execution(data=8, zero=zero)
    moved = {
        precision: predict(model(precision), plan, CASTING).communication["data"]
        for precision in ("bf16", "f8", "mxfp8")
    }
    assert moved["f8"] < moved["bf16"] == pytest.approx(moved["mxfp8"])
    plain = predict(model("f8"), plan, PLAIN).communication["data"]
    assert plain == pytest.approx(moved["bf16"])


def test_a_cast_moves_its_value_and_two_layouts() -> None:
    moved = {name: recipe.cast_bytes for name, recipe in RECIPES.items()}
    assert (moved["bf16"], moved["f8"], moved["mxfp8"]) == (0, 4, 4 + 2 / 32)
    assert (moved["mxfp4"], moved["nvfp4"]) == (3 + 2 / 32, 5 + 2 / 16)
