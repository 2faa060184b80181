"""Closed-form transformers: FLOP, memory and pipelines by published formulas."""

import doctest
import time
from collections.abc import Mapping
from dataclasses import replace
from math import log

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

import simulator.transformer
from autopar.pipeline.pipeline_schedules import make_schedule
from autopar.pipeline.schedule_kinds import Pipeline, most_in_flight
from simulator.hardware.cluster import Cluster, ClusterError, Link
from simulator.program import Run
from simulator.transformer import (
    EAGER,
    JITTED,
    ZERO_2021,
    Execution,
    Machine,
    Transformer,
    memory_of,
    predict,
)
from simulator.transformer.layer import embedding_passes, head_passes, layer_passes
from simulator.transformer.layer_kinds import DECODER_LAYER
from simulator.transformer.step import pipeline_seconds
from simulator.transformer.training_memory import saved_activations
from simulator.work import CollectiveKind

GPT = Transformer(layers=16, hidden=4096, heads=32, seq=2048, vocab=51200)
BIG = Transformer(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)


def a100(hosts: int = 1, **changes: object) -> Machine:
    return Machine(Cluster.load("dgx_a100_80").with_size(hosts).model_copy(update=changes))


def test_the_number_of_parameters_of_gpt_175b_equals_its_formula() -> None:
    # 12 h^2 of matrices and 13 h of vectors per layer, the embeddings, the last norm.
    h = 12288
    assert BIG.parameters == 96 * (12 * h**2 + 13 * h) + 51200 * h + 2048 * h + 2 * h
    assert BIG.parameters == pytest.approx(174.6e9, rel=1e-3)


def test_model_flops_equal_the_formula_of_narayanan() -> None:
    # 72 B s l h^2 (1 + s / 6 h + V / 12 l h), arXiv 2104.04473, equation 3 with 72 for 96.
    batch, s, layers, h = 1536, 2048, 96, 12288
    expected = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + 51200 / (12 * layers * h))
    assert BIG.flops(batch) == pytest.approx(expected)


def test_activation_bytes_equal_the_formulas_of_korthikanti() -> None:
    # Korthikanti et al., table 2, per s b h: without remat 10 + 24 / t + 5 a s / h t, and all of it
    # over t with sequence parallelism.
    sbh, scores = 2048 * 12288, 5 * 96 * 2048 / 12288
    plain = Execution(tensor=8, global_batch=1)
    assert saved_activations(BIG, plain) == pytest.approx(sbh * (10 + (24 + scores) / 8))
    divided = plain.model_copy(update={"sequence_parallel": True})
    assert saved_activations(BIG, divided) == pytest.approx(sbh * (34 + scores) / 8)
    assert saved_activations(
        BIG, divided.model_copy(update={"recompute": "selective"})
    ) == pytest.approx(sbh * 34 / 8)
    assert saved_activations(BIG, plain.model_copy(update={"recompute": "full"})) == pytest.approx(
        sbh * 2
    )


@pytest.mark.parametrize(("devices", "deviates"), [(1, 0.0), (10, 1.5388), (100, 2.5076)])
def test_the_slowest_device_is_the_expected_maximum_of_normal_deviates(
    devices: int, deviates: float
) -> None:
    # order statistics of Harter (Biometrika 48, 1961, table 1)
    machine = replace(a100(), spread=0.02)
    assert machine.slowest_of(devices) == pytest.approx(1 + 0.02 * deviates, abs=4e-4)


def test_each_level_of_zero_shards_one_more_kind_of_state() -> None:
    # 2 bytes of parameters, 4 of gradients and 12 of the optimizer, over 8 devices.
    elements = 16 * GPT.elements(DECODER_LAYER).total
    for zero, sizes in enumerate(
        [(2, 4, 12), (2, 4, 12 / 8), (2, 4 / 8, 12 / 8), (2 / 8, 4 / 8, 12 / 8)]
    ):
        memory = memory_of(
            GPT, Execution.model_validate({"data": 8, "global_batch": 8, "zero": zero})
        )
        assert (memory.parameters, memory.gradients, memory.optimizer) == pytest.approx(
            tuple(elements * s for s in sizes)
        )


def test_the_bubble_of_equal_stages_equals_the_textbook_formula() -> None:
    # p - 1 of p - 1 + m slots. A vocabulary of one word makes the ends nearly free; links and hosts
    # are nearly free, too.
    model = GPT.model_copy(update={"vocab": 8, "learned_positions": False})
    fast = Link(bandwidth_gb_per_s=1e6, latency_us=0.0)
    update = {"intra_host": fast, "collectives": None, "collective_launch_us": 0.0}
    cluster = Cluster.load("dgx_a100_80").model_copy(update=update)
    machine = Machine(cluster, JITTED)
    for pipeline, interleave in ((2, 1), (4, 1), (8, 1), (4, 2)):
        plan = Execution(pipeline=pipeline, interleave=interleave, global_batch=16)
        prediction = predict(model, plan, machine)
        work = prediction.forward + prediction.backward
        assert prediction.bubble / work == pytest.approx((pipeline - 1) / interleave / 16, rel=0.05)


@given(
    st.integers(1, 8),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(0, 9),
    st.integers(0, 6),
    st.booleans(),
)
def test_pipeline_seconds_equal_the_makespan_of_the_schedule(
    meshes: int, micro_batches: int, chunks: int, loss: int, send: int, gpipe: bool
) -> None:
    """Each device has 6 forward, 12 backward and a loss; tasks include their sends and wait."""
    chunks = chunks if meshes > 1 else 1
    loss = loss if chunks == 1 or micro_batches >= meshes else 0
    name = "interleaved_1f1b" if chunks > 1 else "gpipe" if gpipe else "1f1b"
    stages, sends = meshes * chunks, send if meshes > 1 else 0

    def seconds(task: Run) -> float:
        loss_seconds = loss if task.stage == stages - 1 else 0
        return {
            "F": (6 + sends) / chunks + loss_seconds / 3,
            "B": (12 + sends) / chunks + loss_seconds * 2 / 3,
            "U": 0,
        }[task.phase]

    exact = make_schedule(name, Pipeline(meshes, micro_batches, chunks)).makespan(seconds)
    devices = [18.0] * (meshes - 1) + [18.0 + loss]
    seconds_by_formula = sum(pipeline_seconds(devices, micro_batches, chunks, sends, sends))
    assert seconds_by_formula == pytest.approx(exact)


def _instructions(stage: int, stages: int, count: int) -> list[tuple[str, int, str]]:
    """Return what a stage of DeepSpeed does: (act, other stage, message) (`TrainSchedule`)."""
    done: list[tuple[str, int, str]] = []
    previous = -1
    for step in range(2 * (count + stages - 1)):
        forward = step % 2 == stage % 2
        micro = step // 2 - stage // 2 if forward else (step + stage + 1) // 2 - stages
        other = stage - 1 if forward else stage + 1
        sent, received = (previous, micro) if forward else (micro, previous)
        if 0 <= other < stages:
            gradient = ("send" if forward else "receive", other, f"gradient {sent}")
            activation = ("receive" if forward else "send", other, f"activation {received}")
            done += [gradient] if 0 <= sent < count else []
            done += [activation] if 0 <= received < count else []
        if 0 <= micro < count:
            done.append(("compute", stage, "forward" if forward else "backward"))
        previous = micro
    return done


def _makespan(stages: int, count: int, seconds: Mapping[str, float], send: float) -> float:
    """Return the seconds of those instructions where both ends of a message wait for it."""
    queues = [_instructions(stage, stages, count)[::-1] for stage in range(stages)]
    now = [0.0] * stages
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                act, other, message = queue[-1]
                if act == "compute":
                    now[stage] += seconds[message]
                elif queues[other] and queues[other][-1][1:] == (stage, message):
                    now[stage] = now[other] = max(now[stage], now[other]) + send
                    queues[other].pop()
                else:
                    break
                queue.pop()
    return max(now)


@pytest.mark.parametrize(("stages", "count"), [(2, 64), (3, 240), (4, 64), (8, 64), (35, 240)])
def test_devices_that_send_one_message_after_the_other_wait_for_four(
    stages: int, count: int
) -> None:
    execution = Execution(pipeline=stages, global_batch=count, serial_sends=True)
    exact = _makespan(stages, count, {"forward": 6, "backward": 12}, 1)
    by_formula = sum(pipeline_seconds([18] * stages, count, 1, 1, 1, execution.messages))
    assert by_formula == pytest.approx(exact, rel=0.005)


def test_sends_hide_behind_computation_only_with_a_spare_microbatch() -> None:
    plan = Execution(pipeline=4, global_batch=32)
    waits, overlapped, spare = (
        predict(GPT, plan.model_copy(update=changes), a100()).exposed["pipeline"]
        for changes in (
            {},
            {"overlap_sends": True},
            {"overlap_sends": True, "spare_microbatches": 4},
        )
    )
    assert waits == overlapped
    assert spare < waits / 2


@given(st.integers(2, 8), st.integers(1, 30), st.integers(1, 4), st.integers(0, 40), st.booleans())
def test_another_microbatch_never_shortens_a_pipeline(
    meshes: int, micro_batches: int, chunks: int, send: int, overlap: bool
) -> None:
    waited = 0 if overlap else send
    less, more = (
        sum(pipeline_seconds([18.0] * meshes, count, chunks, send, waited))
        for count in (micro_batches, micro_batches + 1)
    )
    assert less <= more


@given(st.integers(2, 8), st.integers(1, 30), st.integers(2, 4))
def test_activations_are_those_in_flight_in_the_interleaved_schedule(
    meshes: int, micro_batches: int, chunks: int
) -> None:
    model = GPT.model_copy(update={"layers": meshes * chunks, "vocab": 8, "attention": "flash2"})
    plan = Execution(pipeline=meshes, interleave=chunks, global_batch=micro_batches)
    tasks = make_schedule("interleaved_1f1b", Pipeline(meshes, micro_batches, chunks)).rows[0]
    saved = most_in_flight(tasks) * saved_activations(model, plan)
    assert memory_of(model, plan).activations == pytest.approx(saved)


def test_the_parts_sum_up_to_the_step() -> None:
    plan = Execution(
        tensor=4,
        pipeline=2,
        data=2,
        microbatch=2,
        global_batch=32,
        recompute="full",
    )
    prediction = predict(GPT, plan, a100(2))
    parts = (
        prediction.forward
        + prediction.backward
        + prediction.recompute
        + prediction.update
        + prediction.bubble
    )
    assert parts + prediction.host + sum(prediction.exposed.values()) == pytest.approx(
        prediction.seconds
    )
    assert all(
        prediction.exposed[axis] <= prediction.communication[axis] * (1 + 1e-9)
        for axis in prediction.exposed
    )


@pytest.mark.parametrize(
    ("fields", "embedding", "head"),
    [
        ({}, ("r", ""), ("", "r")),
        ({"sequence_parallel": True}, ("s", "g"), ("g", "gs")),
        ({"sequence_parallel": True, "saves_gathered": True}, ("s", "g"), ("g", "s")),
    ],
)
def test_collectives_around_the_embeddings_are_those_of_megatron(
    fields: dict[str, bool], embedding: tuple[str, str], head: tuple[str, str]
) -> None:
    plan = Execution.model_validate({"tensor": 8, "global_batch": 1, **fields})
    machine = a100()
    ring = machine.network.ring(8)
    kinds: dict[str, CollectiveKind] = {"r": "all_reduce", "s": "reduce_scatter", "g": "all_gather"}
    seconds = {
        letter: machine.network.seconds(kind, 2.0 * GPT.seq * GPT.hidden, ring)
        for letter, kind in kinds.items()
    }
    for passes, collectives in ((embedding_passes, embedding), (head_passes, head)):
        assert [cost.communication for cost in passes(GPT, plan, machine)] == [
            pytest.approx(sum(seconds[letter] for letter in letters)) for letters in collectives
        ]


def test_full_recomputation_costs_a_forward_pass_and_selective_less() -> None:
    plan = Execution(tensor=8, microbatch=4, global_batch=4)
    none, selective, full = (
        layer_passes(GPT, Execution.model_validate(plan.model_dump() | {"recompute": mode}), a100())
        for mode in ("none", "selective", "full")
    )
    assert full.recompute == full.forward == none.forward
    assert none.recompute.compute == 0 < selective.recompute.compute < 0.3 * full.recompute.compute


def test_a_prediction_for_96000_devices_takes_milliseconds() -> None:
    plan = Execution(
        tensor=8, pipeline=8, data=1500, microbatch=1, global_batch=6000, recompute="full"
    )
    machine = a100(12_000)
    predict(BIG, plan, machine)
    start = time.perf_counter()
    for _ in range(20):
        prediction = predict(BIG, plan, machine)
    assert (time.perf_counter() - start) / 20 < 5e-3
    assert prediction.devices == 96_000


def test_groups_that_share_nics_slow_each_other() -> None:
    # Tensor 2 and data 64 over 16 hosts: each of a host's two groups has half of its NICs.
    plan = Execution(tensor=2, data=64, microbatch=4, global_batch=256)
    wide, narrow = (predict(GPT, plan, a100(16, nics_per_host=nics)) for nics in (8, 2))
    assert narrow.exposed["data"] > 3 * wide.exposed["data"]


def test_tensor_parallelism_copies_the_heads_of_keys_that_are_fewer_than_its_devices() -> None:
    plan = Execution(tensor=8, global_batch=4, context=2, context_exchange="ring")
    few, as_many = (
        predict(GPT.model_copy(update={"kv_heads": heads}), plan, a100(2)) for heads in (2, 8)
    )
    assert few.memory == as_many.memory
    assert (few.seconds, few.communication) == (as_many.seconds, as_many.communication)
    assert few.model_flops < as_many.model_flops


def test_idle_hosts_change_nothing() -> None:
    # Were there such groups on all devices, the next six would be on two hosts.
    plan = Execution(context=2, data=3, microbatch=4, global_batch=24, zero=3)
    assert predict(GPT, plan, a100(4)) == predict(GPT, plan, a100())


def test_the_throughput_of_zero_3_falls_with_devices_at_a_fixed_batch() -> None:
    model = Transformer(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)

    def tflops(devices: int, microbatch: int) -> float:
        plan = Execution(
            data=devices, microbatch=microbatch, global_batch=1536, zero=3, recompute="full"
        )
        cluster = Cluster.load("dgx_a100_80").with_size(devices // 8)
        return predict(model, plan, Machine(cluster, ZERO_2021)).tflop_per_s_per_device

    speeds = [tflops(384, 4), tflops(768, 2), tflops(1536, 1)]
    assert speeds[0] > 1.4 * speeds[1] > 1.4 * 1.4 * speeds[2]


degrees = st.sampled_from([1, 2, 4, 8])


@st.composite
def plans(draw: st.DrawFn) -> Execution:
    tensor, pipeline, data = draw(degrees), draw(degrees), draw(degrees)
    microbatch = draw(st.sampled_from([1, 2, 4]))
    return Execution(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        microbatch=microbatch,
        global_batch=microbatch * data * draw(st.integers(1, 8)),
        sequence_parallel=draw(st.booleans()),
        interleave=draw(st.sampled_from([1, 2])) if pipeline > 1 else 1,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        zero=draw(st.sampled_from([0, 1, 2])),
        overlap_gradients=draw(st.booleans()),
        overlap_tensor=draw(st.sampled_from(["none", "backward", "all"])),
        overlap_sends=draw(st.booleans()),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
    )


models = st.sampled_from(
    [
        GPT,
        GPT.model_copy(update={"attention": "flash"}),
        Transformer(
            layers=32,
            hidden=2048,
            heads=16,
            kv_heads=8,
            seq=1024,
            vocab=32000,
            ffn=8192,
            gated=True,
            tied=False,
            attention="flash2",
        ),
    ]
)


@given(models, plans())
def test_predictions_are_not_negative(model: Transformer, plan: Execution) -> None:
    prediction, memory = predict(model, plan, a100(64)), memory_of(model, plan)
    parts = (
        memory.parameters,
        memory.gradients,
        memory.optimizer,
        memory.embedding,
        memory.activations,
    )
    assert min(*parts, memory.temporaries) >= 0
    assert memory.total == sum(parts) + memory.temporaries
    times = (
        prediction.forward,
        prediction.backward,
        prediction.recompute,
        prediction.update,
        prediction.bubble,
    )
    assert min(*times, prediction.host, *prediction.exposed.values()) >= 0
    assert 0 < prediction.mfu <= prediction.hfu * (1 + 1e-9) < 1


@given(models, plans(), st.floats(1, 4), st.floats(1, 4), st.floats(1, 4))
def test_faster_hardware_is_never_slower(
    model: Transformer, plan: Execution, compute: float, memory: float, network: float
) -> None:
    slow = a100(64)
    cluster = slow.cluster
    inter, gpu = cluster.inter_host, cluster.device
    assert inter is not None
    wires = Link(bandwidth_gb_per_s=inter.bandwidth_gb_per_s * network, latency_us=inter.latency_us)
    faster = gpu.model_copy(
        update={
            "peak_tflop_per_s": {
                dtype: peak * compute for dtype, peak in gpu.peak_tflop_per_s.items()
            },
            "memory_bandwidth_gb_per_s": gpu.memory_bandwidth_gb_per_s * memory,
        }
    )
    fast = Machine(cluster.model_copy(update={"inter_host": wires, "device": faster}))
    assert predict(model, plan, fast).seconds <= predict(model, plan, slow).seconds * (1 + 1e-9)


@given(models, plans())
def test_more_recomputation_needs_less_memory_and_more_time(
    model: Transformer, plan: Execution
) -> None:
    assume(plan.recompute == "none")
    full = plan.model_copy(update={"recompute": "full"})
    assert memory_of(model, full).activations <= memory_of(model, plan).activations
    assert predict(model, full, a100(64)).seconds >= predict(model, plan, a100(64)).seconds


@given(models, plans(), st.floats(0.01, 0.98))
def test_quantiles_grow_and_the_median_is_the_prediction(
    model: Transformer, plan: Execution, probability: float
) -> None:
    prediction = predict(model, plan, a100(64))
    assert prediction.quantile(0.5) == pytest.approx(prediction.seconds)
    assert prediction.quantile(probability) < prediction.quantile(probability + 0.01)


def test_intervals_are_wider_where_the_kernels_of_a_backend_are_assumed() -> None:
    step = Execution(global_batch=1)
    for backend, deviation in ((EAGER, 0.04), (JITTED, 0.12)):
        prediction = predict(GPT, step, replace(a100(), backend=backend))
        host = prediction.host / prediction.seconds
        parts = (0.08 * (1 - host), 0.25 * host, deviation)
        expected = sum(part**2 for part in parts) ** 0.5
        # P84.13 is a standard deviation above the median
        measured = log(prediction.quantile(0.841344746) / prediction.seconds)
        assert measured == pytest.approx(expected)


@pytest.mark.parametrize("probability", [0, 1, 1.5])
def test_a_quantile_of_an_invalid_probability_is_refused(probability: float) -> None:
    with pytest.raises(ValueError, match="expected one between 0 and 1"):
        predict(GPT, Execution(global_batch=1), a100()).quantile(probability)


def test_a_jitted_step_waits_less_for_the_host_than_an_eager_one() -> None:
    small = Transformer(layers=12, hidden=768, heads=12, seq=512, vocab=50304)
    plan = Execution(global_batch=1)
    cluster = Cluster.load("dgx_a100_80")
    eager, jitted = (predict(small, plan, Machine(cluster, backend)) for backend in (EAGER, JITTED))
    assert jitted.host < 0.2 * eager.host
    assert jitted.seconds < 0.5 * eager.seconds


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 5}, "heads: given 5, expected a divisor of hidden, which is 4096"),
        ({"kv_heads": 7}, "kv_heads: given 7, expected a divisor of heads, which is 32"),
        ({"layers": 0}, "greater than 0"),
        ({"attention": "fast"}, "Input should be 'naive', 'flash1', 'flash', 'flash2', 'cudnn' or"),
        ({"width": 1}, "Extra inputs"),
    ],
)
def test_an_invalid_transformer_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Transformer.model_validate(GPT.model_dump() | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"microbatch": 3},
            r"global_batch: given 16, expected a multiple of microbatch \* data, which is 3",
        ),
        ({"interleave": 2}, "interleave: given 2, expected 1 where pipeline is 1"),
        ({"zero": 3, "pipeline": 2}, "zero: given 3, expected at most 2 with a pipeline"),
        ({"zero": True}, "given true, expected 0, 1, 2 or 3"),
    ],
)
def test_an_invalid_execution_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Execution.model_validate({"global_batch": 16} | fields)


def test_a_plan_that_does_not_divide_the_model_or_fit_the_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match=r"16 layers are too few for 17 stages"):
        predict(GPT, Execution(pipeline=17, global_batch=17), a100(3))
    with pytest.raises(
        ValueError, match="tensor: given 3, expected a divisor of heads, which is 32"
    ):
        predict(GPT, Execution(tensor=3, global_batch=1), a100())
    thirds = GPT.model_copy(update={"heads": 12, "head_size": 128, "kv_heads": 3})
    with pytest.raises(
        ValueError, match="tensor: given 2, expected a divisor or a multiple of kv_heads"
    ):
        predict(thirds, Execution(tensor=2, global_batch=1), a100())
    with pytest.raises(
        ClusterError,
        match=r"needs 16 devices \(tensor 8 \* context 1 \* data 2 \* pipeline 1\), "
        r"'dgx_a100_80' has 8",
    ):
        predict(GPT, Execution(tensor=8, data=2, global_batch=2), a100())


def test_the_doctest_of_the_package_passes() -> None:
    assert doctest.testmod(simulator.transformer).failed == 0


def test_gradients_overlap_with_waits_for_the_host_so_that_faster_memory_is_never_slower() -> None:
    model = Transformer(
        layers=32, hidden=2048, heads=16, ffn=8192, seq=512, vocab=32000, attention="flash2"
    )
    execution = Execution(
        data=16, microbatch=2, global_batch=32, zero=1, overlap_gradients=True, recompute="full"
    )
    cluster = Cluster.load("dgx_b200").with_size(2)
    device = cluster.device
    seconds, exposed = [], []
    for factor in (1, 2, 4):
        bandwidth = factor * device.memory_bandwidth_gb_per_s
        faster = device.model_copy(update={"memory_bandwidth_gb_per_s": bandwidth})
        machine = Machine(cluster.model_copy(update={"device": faster}), EAGER)
        prediction = predict(model, execution, machine)
        # the host is the slower one
        assert prediction.host > prediction.forward + prediction.backward
        seconds.append(prediction.seconds)
        exposed.append(prediction.exposed["data"])
    assert seconds == sorted(seconds, reverse=True)
    # of 32 layers, only the gradients of the first overlap with nothing, and contention is less
    # than half of the rest
    total = prediction.communication["data"]
    assert all(each < total / 2 for each in exposed)
