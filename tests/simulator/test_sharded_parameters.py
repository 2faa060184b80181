"""ZeRO-3: gathers of embeddings, and copies from and to the buffers of collectives."""

from typing import Any

import pytest

from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError, validate
from simulator.transformer import Execution, Machine, Transformer, predict
from simulator.transformer.training_memory import memory_of

H100 = Machine(Cluster.load("dgx_h100").with_size(1))
SIZES = {"layers": 8, "hidden": 4096, "heads": 32, "seq": 2048, "vocab": 128000}
SIZES |= {"attention": "flash2", "learned_positions": False, "biases": False}


def data_seconds(model: dict[str, Any], **fields: Any) -> tuple[float, float]:
    """Return all communication of data parallelism in a step, and what is exposed of it."""
    plan = validate(Execution, {"data": 8, "zero": 3, "global_batch": 8} | fields, "execution")
    step = predict(validate(Transformer, SIZES | model, "model"), plan, H100)
    return step.communication["data"], step.exposed["data"]


def test_embeddings_are_gathered_and_their_gradients_scattered() -> None:
    small, large = (data_seconds({"vocab": vocab}) for vocab in (1000, 128000))
    ring, elements = H100.network.ring(8), 4096
    moved = [
        H100.network.seconds("all_gather", 2.0 * vocab * elements, ring)
        + H100.network.seconds("reduce_scatter", 4.0 * vocab * elements, ring)
        for vocab in (1000, 128000)
    ]
    assert large[0] - small[0] == pytest.approx(moved[1] - moved[0])
    # nothing is computed before the first gather and after the last sum
    assert large[1] - small[1] == pytest.approx(moved[1] - moved[0])


def test_an_output_embedding_of_its_own_is_gathered_beside_the_last_layer() -> None:
    tied, untied = (data_seconds({"tied": tied}) for tied in (True, False))
    ring, elements = H100.network.ring(8), 128000 * 4096
    moved = H100.network.seconds("all_gather", 2.0 * elements, ring)
    moved += H100.network.seconds("reduce_scatter", 4.0 * elements, ring)
    assert untied[0] - tied[0] == pytest.approx(moved)
    assert 0 < untied[1] - tied[1] < moved


def test_fsdp_2_copies_parameters_in_both_passes_and_gradients_once() -> None:
    views, copies = (data_seconds({}, copies_shards=copied) for copied in (False, True))
    layer, table = 12 * 4096**2 + 2 * 4096, 128000 * 4096
    bytes_per_element = 2 * (2 + 2) + 2 + 4
    seconds = 8 * H100.memory_seconds(bytes_per_element * layer, 3)
    seconds += H100.memory_seconds(bytes_per_element * table, 3)
    for more, less in zip(copies, views, strict=True):
        assert more - less == pytest.approx(seconds, rel=1e-3)


def test_frozen_parameters_have_no_gradients_to_copy() -> None:
    frozen = {"adapters": {"rank": 8}}
    views, copies = (data_seconds(frozen, copies_shards=copied) for copied in (False, True))
    layer, table = 12 * 4096**2 + 2 * 4096, 128000 * 4096
    seconds = 8 * H100.memory_seconds(8.0 * layer, 3) + H100.memory_seconds(8.0 * table, 3)
    assert copies[1] - views[1] == pytest.approx(seconds, rel=1e-3)


def test_nothing_is_copied_without_zero_3() -> None:
    assert data_seconds({}, zero=1, copies_shards=True) == data_seconds({}, zero=1)


def test_copies_are_true_or_false() -> None:
    with pytest.raises(ClusterError, match="copies_shards: given 'often'"):
        data_seconds({}, copies_shards="often")


def test_one_device_that_has_all_parameters_gathers_none() -> None:
    model = validate(Transformer, SIZES, "model")
    gradients, parameters = (
        memory_of(model, validate(Execution, {"global_batch": 1, "zero": zero}, "execution"))
        for zero in (2, 3)
    )
    assert parameters == gradients


def test_an_output_embedding_that_is_gathered_is_beside_the_logits() -> None:
    model = validate(Transformer, SIZES | {"vocab": 512000, "tied": False}, "model")
    gradients, parameters = (
        memory_of(model, validate(Execution, {"data": 8, "global_batch": 8, "zero": zero}, "e"))
        for zero in (2, 3)
    )
    assert parameters.temporaries - gradients.temporaries == 2.0 * 512000 * 4096
