"""Adapters (LoRA), and ZeRO that shards over groups smaller than data parallelism."""

import pytest
from pydantic import ValidationError

from simulator.hardware.cluster import Cluster
from simulator.transformer import EAGER, Execution, Machine, Transformer, memory_of, predict
from simulator.transformer.layer import layer_passes

GPT = Transformer(layers=16, hidden=4096, heads=32, seq=2048, vocab=51200)
LORA = Transformer.model_validate(GPT.fields() | {"adapters": {"rank": 16, "of": "all"}})
A100 = Machine(Cluster.load("dgx_a100_80").with_size(8), EAGER)


def test_frozen_matrices_have_no_weight_gradients() -> None:
    # 12 h^2 of matrices, of which an adapter of rank r has r (h + 3 h + h + h + h + 4 h + 4 h + h)
    execution, h, tokens = Execution(global_batch=1), 4096, 2048
    matrices, adapters = 12 * h**2, 16 * 16 * h
    scores = 2.0 * tokens * 2048 * 2 * h
    passes = layer_passes(LORA, execution, A100)
    assert passes.forward.flops == pytest.approx(2 * tokens * (matrices + adapters) + scores)
    expected = 2 * tokens * (matrices + 2 * adapters) + 2 * scores
    assert passes.backward.flops == pytest.approx(expected)
    assert LORA.adapter_elements(LORA.kinds[0]) == adapters


def test_only_adapters_have_gradients_and_optimizer_state() -> None:
    execution = Execution(global_batch=1)
    every, adapters = memory_of(GPT, execution), memory_of(LORA, execution)
    elements = 16 * 16 * 16 * 4096
    assert adapters.parameters == every.parameters + 2 * elements
    assert adapters.gradients == 4 * elements
    assert adapters.optimizer == 12 * elements
    assert adapters.embedding == pytest.approx(every.embedding * 2 / 18)


def test_frozen_layers_without_adapters_save_no_inputs() -> None:
    execution = Execution(global_batch=1)
    saved = {
        where: memory_of(
            Transformer.model_validate(GPT.fields() | {"adapters": {"rank": 16, "of": where}}),
            execution,
        ).activations
        for where in ("qkv", "attention", "all")
    }
    # 16 bits of the inputs of both products of the MLP, of widths h and 4 h
    assert saved["all"] - saved["qkv"] == 16 * 2048 * 2 * (4096 + 4 * 4096)
    assert saved["attention"] == saved["qkv"]
    assert saved["all"] == memory_of(GPT, execution).activations


def test_fewer_adapters_are_faster_and_all_of_them_beat_full_training() -> None:
    execution = Execution(global_batch=64, data=64, zero=1)
    machine = Machine(Cluster.load("dgx_a100_80").with_size(8), EAGER)
    seconds = [
        predict(
            Transformer.model_validate(GPT.fields() | {"adapters": {"rank": 16, "of": where}}),
            execution,
            machine,
        ).seconds
        for where in ("qkv", "attention", "all")
    ]
    assert seconds == sorted(seconds)
    assert seconds[-1] < predict(GPT, execution, machine).seconds


def test_a_sharding_group_of_all_replicas_changes_nothing() -> None:
    plan = Execution(global_batch=64, data=64, zero=3)
    whole = plan.model_copy(update={"sharding_group": 64})
    assert predict(GPT, whole, A100) == predict(GPT, plan, A100)


def test_a_sharding_group_of_a_host_needs_more_memory_and_less_of_slow_networks() -> None:
    plan = Execution(global_batch=64, data=64, zero=3, communicated_gradient_bytes=2)
    group = plan.model_copy(update={"sharding_group": 8})
    states = memory_of(GPT, plan), memory_of(GPT, group)
    assert states[1].optimizer == pytest.approx(8 * states[0].optimizer)
    slow = Machine(A100.cluster.model_copy(update={"nics_per_host": 1}), EAGER)
    moved = predict(GPT, plan, slow), predict(GPT, group, slow)
    assert moved[1].communication["data"] < moved[0].communication["data"]


def test_broadcasts_pay_a_latency_for_each_device() -> None:
    def added(data: int) -> float:
        plan = Execution(global_batch=data, data=data, zero=1)
        machine = Machine(Cluster.load("dgx_a100_80").with_size(data // 8), EAGER)
        broadcasts = plan.model_copy(update={"broadcasts": True})
        times = [predict(GPT, each, machine).communication["data"] for each in (plan, broadcasts)]
        return times[1] - times[0]

    # a broadcast passes all devices, so that the sum of latencies grows with their square
    assert added(512) / added(256) == pytest.approx(4, rel=0.1)


def test_a_sharding_group_that_does_not_divide_the_replicas_is_refused() -> None:
    with pytest.raises(ValidationError, match="sharding_group: given 3, expected a divisor"):
        Execution(global_batch=8, data=8, zero=1, sharding_group=3)
