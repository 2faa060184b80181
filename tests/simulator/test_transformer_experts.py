"""Experts, latent attention, windows, Mamba and uneven stages of closed-form transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from simulator.hardware.cluster import Cluster
from simulator.transformer import EAGER, Execution, Machine, Transformer, memory_of, predict
from simulator.transformer.attention_passes import imbalance
from simulator.transformer.experts import Routing, dispatch_seconds, distinct_places
from simulator.transformer.layer import layer_passes
from simulator.transformer.layer_kinds import Experts, LatentAttention, LayerKind
from simulator.transformer.precision import RECIPES
from simulator.transformer.scenario_files import Scenario
from simulator.transformer.stage_seconds import exposed_dispatch
from simulator.transformer.stages import division_of, stage_sizes
from simulator.transformer.training_memory import device_parameters, layer_parameters

EXAMPLES = Path(__file__).parents[2] / "simulator/transformer/examples"
LLAMA = {
    "gated": True,
    "tied": False,
    "learned_positions": False,
    "biases": False,
    "dropout": False,
    "attention": "flash2",
}
MOE = Transformer.model_validate(
    {
        "layers": 8,
        "hidden": 2048,
        "heads": 16,
        "seq": 2048,
        "vocab": 32000,
        "ffn": 8192,
        "experts": {"count": 16, "top_k": 2, "ffn": 4096, "imbalance": 1.0},
        **LLAMA,
    }
)


def h100(devices: int) -> Machine:
    return Machine(Cluster.load("dgx_h100").with_size(-(-devices // 8)), EAGER)


def example(name: str) -> Scenario:
    return Scenario.load(EXAMPLES / f"{name}.yaml")


def active_parameters(model: Transformer) -> int:
    """Return the parameters that a token uses, with top_k of the routed experts."""
    layers = [(count, model.elements(kind)) for kind, count in model.kind_counts.items()]
    idle = sum(count * (layer.routed - layer.routed_active) for count, layer in layers)
    return model.parameters - idle


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama3_8b", 8.03e9, 8.03e9),
        ("llama3_70b", 70.6e9, 70.6e9),
        ("llama3_405b", 405.9e9, 405.9e9),
        ("mixtral_8x7b", 46.7e9, 12.9e9),
        ("qwen3_30b_a3b", 30.5e9, 3.35e9),
        ("qwen3_235b_a22b", 235.1e9, 22.2e9),
        ("kimi_k2", 1.026e12, 32.9e9),
        ("nemotron_3_nano", 31.6e9, 3.58e9),
    ],
)
def test_parameters_of_public_models_equal_the_published_totals(
    name: str, total: float, active: float
) -> None:
    model = example(name).model
    assert model.parameters == pytest.approx(total, rel=3e-3)
    assert active_parameters(model) == pytest.approx(active, rel=3e-3)


def test_parameters_of_deepseek_v3_equal_the_published_totals() -> None:
    # arXiv 2412.19437: 671B in total, 37B active; the projection and the layer of the second token
    # are 11.6B more (14B on the hub, with copies of both embeddings).
    model = example("deepseek_v3").model
    main = model.model_copy(update={"prediction_layers": 0})
    assert main.parameters == pytest.approx(671e9, rel=1e-3)
    assert active_parameters(main) == pytest.approx(37.5e9, rel=2e-3)
    assert model.parameters - main.parameters == pytest.approx(11.6e9, rel=1e-2)


def test_parameters_of_gpt_oss_without_the_embedding_equal_the_published_total() -> None:
    model = example("gpt_oss_120b").model
    assert model.parameters == pytest.approx(116.8e9, rel=1e-3)
    assert active_parameters(model) - model.embedding == pytest.approx(5.13e9, rel=1e-2)


def test_flops_of_mixtral_equal_those_of_a_dense_model_with_two_experts_as_its_mlp() -> None:
    mixtral = example("mixtral_8x7b").model
    dense = mixtral.model_copy(update={"experts": None, "ffn": 2 * 14336})
    router = 2 * 3 * 32 * 4096 * 8 * 4096 * 7.0
    assert mixtral.flops(7) == pytest.approx(dense.flops(7) + router)


def test_a_dense_model_equals_one_expert_without_its_router() -> None:
    one = MOE.model_copy(
        update={"experts": {"count": 1, "top_k": 1, "ffn": 8192, "imbalance": 1.0}}
    )
    dense = MOE.model_copy(update={"experts": None})
    execution = Execution(tensor=2, data=4, global_batch=8, sequence_parallel=True)
    assert one.parameters == dense.parameters + 8 * 2048
    assert Routing.of(one, execution).rows == 2048
    expert, mlp = (
        layer_passes(model, execution, h100(8), kind)
        for model, kind in (
            (one, LayerKind(None, "experts")),
            (dense, LayerKind(None, "dense")),
        )
    )
    assert expert.forward.flops == mlp.forward.flops + 2 * 1024 * 2048
    # 1024 rows of each device, gathered over the tensor axis as for the dense MLP
    assert expert.forward.compute == pytest.approx(mlp.forward.compute, rel=0.35)
    assert expert.forward.compute > mlp.forward.compute


def test_no_expert_parallelism_needs_no_dispatch() -> None:
    execution = Execution(data=8, global_batch=8)
    assert dispatch_seconds(MOE, execution, h100(8)) == 0
    spread = execution.model_copy(update={"expert": 8})
    assert dispatch_seconds(MOE, spread, h100(8)) > 0
    with_experts = predict(MOE, spread, h100(8))
    assert with_experts.exposed["expert"] > 0
    assert predict(MOE, execution, h100(8)).exposed["expert"] == 0


def test_the_work_of_experts_does_not_depend_on_their_devices() -> None:
    rows = {
        Routing.of(MOE, Execution(data=8, global_batch=8, expert=expert)).rows
        for expert in (1, 2, 8)
    }
    assert rows == {2048 * 2}
    folded = Execution(tensor=4, data=2, global_batch=8, sequence_parallel=True, expert=8)
    narrow = folded.model_copy(update={"expert": 2, "expert_tensor": 4})
    folded = folded.model_copy(update={"expert_tensor": 1})
    # 4 devices share 2048 tokens; experts in 4 pieces gather their rows
    assert Routing.of(MOE, folded).rows == 512 * 2
    assert Routing.of(MOE, narrow).rows == 4 * 512 * 2
    assert Routing.of(MOE, narrow).inner == 4096 // 4


def test_expert_optimizer_state_is_sharded_over_the_copies_of_experts() -> None:
    execution = Execution(data=16, global_batch=16, expert=4, zero=1)
    assert execution.expert_replicas == 4
    (device,) = division_of(MOE, execution).devices
    elements = device_parameters(MOE, execution, device)
    routed = 8 * MOE.elements(LayerKind(mlp="experts")).routed
    assert elements.experts == routed / 4
    memory = memory_of(MOE, execution)
    assert memory.optimizer == pytest.approx(12 * (elements.layers / 16 + elements.experts / 4))
    assert memory.parameters == pytest.approx(2 * (elements.layers + elements.experts))


def test_gradients_wait_for_the_device_whose_sum_takes_longest() -> None:
    # With the larger vocabulary the first device has most parameters, but no experts, whose copies
    # are on different hosts.
    fields = MOE.fields() | {"layers": 4, "experts": {"count": 16, "top_k": 2, "ffn": 8192}}
    execution = Execution(
        pipeline=3, stage_layers=(0, 4, 0), data=16, expert=8, expert_tensor=1, global_batch=16
    )
    small, large = (
        predict(Transformer.model_validate(fields | {"vocab": vocab}), execution, h100(48))
        for vocab in (32000, 256000)
    )
    assert large.exposed["data"] >= small.exposed["data"]


def test_a_token_is_sent_once_to_each_host_and_device() -> None:
    # 8 of 64 experts on 32 devices of 4 hosts: a token has experts on nearly all hosts, so that
    # fewer copies cross the network than with an all_to_all.
    model = MOE.model_copy(
        update={"experts": {"count": 64, "top_k": 8, "ffn": 512, "imbalance": 1.0}}
    )
    execution = Execution(data=32, global_batch=32, expert=32)
    once = execution.model_copy(update={"dispatch": "deduplicated"})
    copies, hosts = (dispatch_seconds(model, plan, h100(32)) for plan in (execution, once))
    assert hosts < 0.7 * copies
    limited = model.model_copy(
        update={"experts": {**model.experts_section.fields(), "max_hosts": 1}}
    )
    assert dispatch_seconds(limited, once, h100(32)) < hosts
    consecutive = model.model_copy(
        update={"experts": {**model.experts_section.fields(), "consecutive": True}}
    )
    # 8 experts of 16 on a host, from a multiple of 8
    one_host = dispatch_seconds(limited, once, h100(32))
    assert dispatch_seconds(consecutive, once, h100(32)) <= one_host


@given(st.sampled_from([(8, 2), (64, 8), (128, 4), (512, 22), (60, 7)]), st.integers(0, 3))
def test_consecutive_experts_are_on_as_many_places_as_when_counted(
    sizes: tuple[int, int], halvings: int
) -> None:
    count, chosen = sizes
    places = min(count, 4 * 2**halvings)
    assume(count % places == 0)
    experts = Experts(count=count, top_k=chosen, ffn=1, consecutive=True)
    of_token = [
        {(token * chosen + expert) % count // (count // places) for expert in range(chosen)}
        for token in range(count)
    ]
    mean = sum(map(len, of_token)) / count
    assert distinct_places(experts, places, places) == pytest.approx(mean)


def test_capacity_pads_and_drops_instead_of_waiting_for_the_busiest() -> None:
    def rows(**fields: float) -> int:
        experts = {"count": 16, "top_k": 2, "ffn": 4096, **fields}
        return Routing.of(
            MOE.model_copy(update={"experts": experts}), Execution(global_batch=1)
        ).rows

    assert rows(imbalance=1.0) == rows(capacity_factor=1.0) == 4096
    assert rows(capacity_factor=1.5) == rows(imbalance=1.5) == 6144
    assert rows() == round(1.04 * 4096)


MACHINE = h100(8)


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["all_to_all", "all_gather", "deduplicated"]),
    st.booleans(),
)
def test_more_imbalance_and_more_experts_per_token_are_never_faster(
    expert: int, tensor: int, dispatch: str, overlap: bool
) -> None:
    plan = Execution.model_validate(
        {
            "tensor": tensor,
            "data": 8 // tensor,
            "global_batch": 8,
            "expert": expert,
            "expert_tensor": 1,
            "sequence_parallel": tensor > 1,
            "dispatch": dispatch,
            "overlap_dispatch": overlap,
        }
    )
    experts = MOE.experts_section.fields()
    times = [
        predict(MOE.model_copy(update={"experts": experts | change}), plan, MACHINE).seconds
        for change in ({}, {"imbalance": 1.5}, {"imbalance": 1.5, "top_k": 4})
    ]
    assert times == sorted(times)
    exposed = predict(MOE, plan.model_copy(update={"overlap_dispatch": False}), MACHINE)
    hidden = predict(MOE, plan.model_copy(update={"overlap_dispatch": True}), MACHINE)
    assert hidden.exposed["expert"] <= exposed.exposed["expert"]
    assert hidden.communication["expert"] == pytest.approx(exposed.communication["expert"])


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("hidden", [512, 2048])
def test_overlap_and_faster_kernels_never_lengthen_a_step_that_waits_for_the_host(
    hidden: int, zero: int
) -> None:
    sizes = {"hidden": hidden, "heads": 8, "ffn": 4 * hidden, "seq": 1024}
    model = Transformer.model_validate(
        MOE.fields() | sizes | {"experts": MOE.experts_section.fields() | {"ffn": hidden}}
    )
    plan = Execution.model_validate({"data": 64, "expert": 8, "global_batch": 256, "zero": zero})
    machine = h100(64)
    device = machine.cluster.device
    twice = {
        "peak_tflop_per_s": {name: 2 * peak for name, peak in device.peak_tflop_per_s.items()},
        "memory_bandwidth_gb_per_s": 2 * device.memory_bandwidth_gb_per_s,
    }
    fast = machine.cluster.model_copy(update={"device": device.model_copy(update=twice)})
    overlapped = plan.model_copy(update={"overlap_dispatch": True})
    seconds = predict(model, plan, machine).seconds
    assert predict(model, overlapped, machine).seconds <= seconds
    assert predict(model, plan, replace(machine, cluster=fast)).seconds <= seconds


@pytest.mark.parametrize(
    ("fields", "alone"),
    [
        ({"data": 8, "global_batch": 8}, 1),
        ({"data": 8, "global_batch": 32}, 1 / 4),
        # of 64 chunks that the first device computes, 4 + 2 * 4 - 1 come before a backward pass
        ({"data": 2, "pipeline": 4, "interleave": 2, "global_batch": 64}, 11 / 64),
    ],
)
def test_a_dispatch_overlaps_with_another_microbatch_if_there_is_one(
    fields: dict[str, Any], alone: float
) -> None:
    plan = Execution.model_validate({"expert": 2, "overlap_dispatch": True} | fields)
    layer = layer_passes(MOE, plan, MACHINE, MOE.kinds[0])
    dispatch = layer.forward.dispatch + layer.backward.dispatch
    compute = layer.forward.compute + layer.backward.compute
    beside = MACHINE.exposed_seconds(dispatch, compute, between_hosts=False) / dispatch
    assert exposed_dispatch(layer, plan, MACHINE) == pytest.approx(alone + (1 - alone) * beside)


def test_the_parts_of_a_step_with_experts_sum_up() -> None:
    scenario = example("deepseek_v3")
    prediction = predict(scenario.model, scenario.execution, h100(1024))
    parts = (
        prediction.forward
        + prediction.backward
        + prediction.recompute
        + prediction.update
        + prediction.bubble
        + prediction.host
        + sum(prediction.exposed.values())
    )
    assert parts == pytest.approx(prediction.seconds)
    assert prediction.exposed["expert"] < prediction.communication["expert"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert": 3, "data": 3}, "expert: given 3, expected a divisor of experts.count, .* 16"),
        (
            {"expert": 8, "data": 4},
            r"expert \* expert_tensor: given 8, expected a divisor of tensor \* context \* data, "
            "which is 4",
        ),
        (
            {"expert": 2, "tensor": 2, "data": 2, "expert_tensor": 1},
            "expected sequence_parallel: true",
        ),
    ],
)
def test_degrees_that_do_not_divide_experts_are_refused(
    fields: dict[str, int], message: str
) -> None:
    plan = Execution.model_validate({"global_batch": 24, **fields})
    with pytest.raises(ValueError, match=message):
        plan.check(MOE)


def test_expert_parallelism_without_experts_is_refused() -> None:
    dense = MOE.model_copy(update={"experts": None})
    with pytest.raises(ValueError, match="but the model has no experts"):
        predict(dense, Execution(data=2, expert=2, global_batch=2), h100(8))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts": {"count": 4, "top_k": 5, "ffn": 8}}, "top_k: given 5, expected at most"),
        ({"experts": {"count": 4, "top_k": 1, "ffn": 8, "first_dense": 8}}, "first_dense"),
        ({"pattern": "ME*E"}, "pattern: given 4 characters, expected one for each of the 8"),
        ({"pattern": "MEX*MEM*"}, "unknown character 'X'"),
        ({"pattern": "E*E*E*E*", "experts": None}, "need the section experts"),
        ({"pattern": "M*E*E*E*"}, "mamba: expected together with a pattern that has M"),
        (
            {"full_attention_every": 2},
            "full_attention_every: given 2 without window; expected both",
        ),
        (
            {"latent_attention": {"key_rank": 8, "rotary_size": 8, "value_size": 8}},
            "latent_attention: expected together with head_size",
        ),
    ],
)
def test_layers_without_their_sizes_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Transformer.model_validate(MOE.fields() | fields)


def test_dense_layers_come_first_and_windows_alternate() -> None:
    deepseek, oss = example("deepseek_v3").model, example("gpt_oss_120b").model
    assert deepseek.kinds[:4] == (*[LayerKind()] * 3, LayerKind(mlp="experts"))
    assert len(deepseek.kinds) == 62
    assert [kind.mixer for kind in oss.kinds[:4]] == ["window", "attention"] * 2
    every = MOE.model_copy(update={"experts": {**MOE.experts_section.fields(), "every": 2}})
    assert [kind.mlp for kind in every.kinds[:4]] == ["dense", "experts"] * 2


def test_a_window_as_long_as_the_sequence_is_full_attention() -> None:
    long = MOE.model_copy(update={"window": 2048})
    execution = Execution(global_batch=1)
    assert predict(long, execution, h100(1)).seconds == predict(MOE, execution, h100(1)).seconds
    # of a window w, the causal mask leaves w s - w^2 / 2 of s^2 / 2 pairs
    short = MOE.model_copy(update={"window": 512})
    pairs = sum(min(query + 1, 512) for query in range(2048))
    assert short.visible_keys("window") * 2048 / 2 == pytest.approx(pairs, rel=1e-3)
    assert short.flops(1) < MOE.flops(1)


def test_stages_are_as_even_as_possible_and_their_ends_have_less() -> None:
    def sizes(layers: int, pipeline: int, **fields: object) -> list[int]:
        plan = {"pipeline": pipeline, "global_batch": pipeline, **fields}
        return list(stage_sizes(layers, Execution.model_validate(plan)))

    assert sizes(16, 4) == [4, 4, 4, 4]
    assert sizes(16, 3) == [5, 6, 5]
    assert sizes(126, 8, interleave=8) == [1, *[2] * 62, 1]
    assert sizes(30, 4, embedding_as_layer=True, loss_as_layer=True) == [7, 8, 8, 7]
    assert sizes(10, 2, stage_layers=[4, 6]) == [4, 6]
    with pytest.raises(ValueError, match="2 layers are too few for 3 stages"):
        sizes(2, 3)
    with pytest.raises(ValueError, match=r"given 2 stages with 9 layers, expected 2 .* with 10"):
        sizes(10, 2, stage_layers=[4, 5])


def test_uneven_stages_equal_even_ones_where_layers_divide() -> None:
    plan = Execution(pipeline=4, interleave=2, data=2, global_batch=16)
    given = plan.model_copy(update={"stage_layers": [1] * 8})
    assert predict(MOE, given, h100(8)) == predict(MOE, plan, h100(8))
    heavier = plan.model_copy(update={"stage_layers": [0, 1, 1, 1, 1, 1, 1, 2]})
    assert predict(MOE, heavier, h100(8)).seconds > predict(MOE, plan, h100(8)).seconds


def test_layers_that_predict_further_tokens_are_on_the_last_device() -> None:
    model = MOE.model_copy(update={"prediction_layers": 1})
    devices = division_of(model, Execution(pipeline=2, global_batch=2)).devices
    assert [device.layers for device in devices] == [4, 5]
    assert [device.losses for device in devices] == [0, 2]
    machine = h100(8)
    plan = Execution(pipeline=2, global_batch=2)
    assert predict(model, plan, machine).seconds > predict(MOE, plan, machine).seconds


@pytest.mark.parametrize("precision", ["f8", "f8-block", "mxfp8", "nvfp4", "mxfp4"])
def test_fewer_bits_are_faster_and_only_in_linear_layers(precision: str) -> None:
    machine = Machine(Cluster.load("dgx_b300"), EAGER)
    plan = Execution(global_batch=4, microbatch=4)
    few, sixteen = (
        layer_passes(MOE.model_copy(update={"precision": bits}), plan, machine, LayerKind())
        for bits in (precision, "bf16")
    )
    assert few.forward.compute < sixteen.forward.compute
    assert few.forward.kernels == sixteen.forward.kernels
    assert few.forward.flops == sixteen.forward.flops


def test_four_bits_need_products_of_four_bits() -> None:
    model = MOE.model_copy(update={"precision": "nvfp4"})
    with pytest.raises(ValueError, match=r"precision nvfp4: .* has no f4e2m1fn among its peaks"):
        predict(model, Execution(global_batch=1), h100(8))
    assert RECIPES["nvfp4"].cast_bytes == 2 * 2 + 2 * (0.5 + 1 / 16)


LONG = MOE.model_copy(update={"experts": None, "seq": 65536, "kv_heads": 4})


def context(exchange: str, **fields: object) -> Execution:
    return Execution.model_validate(
        {"context": 8, "global_batch": 1, "context_exchange": exchange, **fields}
    )


def test_a_ring_needs_no_heads_to_divide() -> None:
    few = LONG.model_copy(update={"heads": 4})
    with pytest.raises(ValueError, match="that together with tensor divides heads"):
        context("all_to_all").check(few)
    context("ring").check(few)


def test_grouped_heads_shorten_the_exchange_of_keys_and_values() -> None:
    machine = h100(8)
    many = LONG.model_copy(update={"kv_heads": 16})
    for exchange in ("ring", "all_gather"):
        few_heads, many_heads = (
            predict(model, context(exchange), machine).communication["tensor"]
            for model in (LONG, many)
        )
        assert few_heads < 0.5 * many_heads
    assert (
        predict(LONG, context("ring"), machine).exposed["tensor"]
        < (predict(LONG, context("all_gather"), machine).exposed["tensor"])
    )


@pytest.mark.parametrize(("seq", "degree"), [(65536, 8), (2048, 1)])
def test_an_unbalanced_causal_mask_makes_the_last_device_slowest(seq: int, degree: int) -> None:
    # Each query sees the keys before it: those of the last of c devices 1 - 1 / 2 c of all keys on
    # average, all queries half of them.
    machine = h100(8)
    model = LONG.model_copy(update={"seq": seq})
    whole = layer_passes(model, Execution(global_batch=1), machine).forward.flops
    even, uneven = (
        layer_passes(
            model, context("ring", context=degree, balanced_context=balanced), machine
        ).forward
        for balanced in (True, False)
    )
    core = 4.0 * seq**2 / 2 * 2048 / degree / machine.flash("flash2").forward
    assert even.flops == uneven.flops == pytest.approx(whole / degree)
    assert uneven.compute - even.compute == pytest.approx(core * (1 - 1 / degree), abs=1e-12)


@given(st.integers(1, 64), st.integers(2, 8))
def test_the_last_device_has_the_keys_of_its_queries_within_the_window(
    window: int, degree: int
) -> None:
    size = 64 * degree
    model = LONG.model_copy(update={"seq": size, "window": 8 * window})
    keys = [min(place + 0.5, 8 * window) for place in range(size)]
    expected = sum(keys[-64:]) * degree / sum(keys)
    plan = context("ring", context=degree, balanced_context=False)
    assert imbalance(model, plan, "window") == pytest.approx(expected, rel=1e-2)


def test_all_devices_compute_all_scores_of_naive_attention() -> None:
    model = LONG.model_copy(update={"attention": "naive"})
    even, uneven = (
        layer_passes(model, context("all_gather", balanced_context=balanced), h100(8))
        for balanced in (True, False)
    )
    assert even == uneven


@pytest.mark.parametrize(
    "name",
    [
        "dgx_b300",
        "gb300_nvl72",
        "p6-b200.48xlarge",
        "grand_teton_roce",
        "h100_pcie_8",
        "gh200_quad",
        "a800_roce",
    ],
)
def test_a_small_model_is_predicted_on_each_kind_of_cluster(name: str) -> None:
    cluster = Cluster.load(name).with_size(2)
    plan = Execution(data=cluster.num_devices, global_batch=cluster.num_devices, zero=1)
    prediction = predict(MOE, plan, Machine(cluster))
    assert 0.01 < prediction.mfu < 0.8


def test_heads_that_share_a_latent_and_project_in_groups_have_fewer_parameters() -> None:
    sizes = {"layers": 2, "hidden": 1024, "heads": 8, "head_size": 96, "seq": 512, "vocab": 512}
    latent = {"key_rank": 96, "query_rank": 256, "rotary_size": 32, "value_size": 128}
    plain, shared, grouped = (
        Transformer(**sizes, biases=False, latent_attention=LatentAttention(**latent | extra))
        for extra in ({}, {"shared": True}, {"output_groups": 4, "output_rank": 64})
    )
    assert plain.parameters - shared.parameters == 2 * 96 * 8 * (96 + 128)
    assert plain.parameters - grouped.parameters == 2 * (1024 * 1024 - 64 * (1024 + 4 * 1024))
    assert (
        predict(shared, Execution(global_batch=1), h100(8)).forward
        < predict(plain, Execution(global_batch=1), h100(8)).forward
    )
    refused = Execution(tensor=8, global_batch=1)
    with pytest.raises(ValueError, match="tensor: given 8, expected a divisor of latent_attention"):
        predict(grouped, refused, h100(8))
    with pytest.raises(ValueError, match="output_groups: given 3, expected a divisor of heads"):
        Transformer(**sizes, latent_attention=LatentAttention(**latent, output_groups=3))


def test_residual_streams_cost_traffic_and_memory_but_no_products() -> None:
    one, four = (
        Transformer(layers=2, hidden=1024, heads=8, seq=512, vocab=512, residual_streams=streams)
        for streams in (1, 4)
    )
    execution = Execution(global_batch=1)
    steps = [predict(model, execution, h100(8)) for model in (one, four)]
    assert steps[0].forward < steps[1].forward
    assert steps[0].model_flops == steps[1].model_flops
    saved = [step.memory.parts["activations"] for step in steps]
    assert saved[1] - saved[0] == 2 * 3 * 2 * 512 * 1024


@pytest.mark.parametrize(
    ("fields", "shards"),
    [
        ({"tensor": 8, "expert": 1, "data": 1}, 8),
        ({"tensor": 8, "expert": 4, "data": 4}, 8),
        ({"tensor": 4, "expert": 2, "data": 4, "sharding_group": 2}, 4),
        ({"tensor": 1, "expert": 8, "data": 16, "sharding_group": 8}, 1),
        ({"tensor": 2, "expert": 8, "data": 4}, 1),
    ],
)
def test_zero_shards_experts_over_all_copies_in_a_sharding_group(
    fields: dict[str, int], shards: int
) -> None:
    common = {**fields, "expert_tensor": 1, "sequence_parallel": True, "global_batch": 16}
    plans = [Execution.model_validate({**common, "zero": zero}) for zero in (0, 3)]
    model = MOE.model_copy(update={"vocab": 8})
    parameters = layer_parameters(model, plans[0], LayerKind("attention", "experts"))
    whole, sharded = (memory_of(model, plan) for plan in plans)
    group = plans[1].shards
    expected = 2.0 * 8 * (parameters.layers / group + parameters.experts / shards)
    assert sharded.parameters == pytest.approx(expected)
    assert sharded.optimizer == pytest.approx(6 * expected)
    gathered = parameters.layers * (group > 1) + parameters.experts * (shards > 1)
    assert sharded.temporaries - whole.temporaries == pytest.approx(4 * gathered, abs=1.0)


def test_tensor_parallelism_divides_the_heads_of_mamba() -> None:
    model = example("nemotron_3_nano").model
    few = model.model_copy(update={"mamba": {**model.mamba_section.fields(), "heads": 6}})
    with pytest.raises(ValueError, match=r"tensor: given 4, expected a divisor of mamba\.heads"):
        Execution(tensor=4, global_batch=1).check(few)


def test_the_scan_of_mamba_is_limited_by_the_vector_units() -> None:
    model = Scenario.load(EXAMPLES / "nemotron_3_nano.yaml").model
    execution = Execution(data=8, expert=8, global_batch=8)
    kind = next(kind for kind in model.kinds if kind.mixer == "mamba")
    cluster = Cluster.load("dgx_h100")
    device = cluster.device
    slower = device.model_copy(update={"vector_tflop_per_s": device.vector_tflop_per_s / 2})
    machines = (Machine(cluster), Machine(cluster.model_copy(update={"device": slower})))
    whole, half = (layer_passes(model, execution, machine, kind) for machine in machines)
    scan = model.seq * model.mamba_section.scan_flops
    added = scan / (0.45e12 * device.vector_tflop_per_s)
    assert half.forward.compute - whole.forward.compute == pytest.approx(added)
    assert half.backward.compute - whole.backward.compute == pytest.approx(2.5 * added)


def test_products_that_a_loop_launches_cost_the_host_half_a_launch_per_expert() -> None:
    cluster = Cluster.load("dgx_h100")
    execution = Execution(expert=4, data=8, global_batch=8)
    kind = MOE.kinds[0]
    grouped, looped = (
        layer_passes(MOE, execution, Machine(cluster, replace(EAGER, expert_kernels=kernels)), kind)
        for kernels in ("grouped", "looped")
    )
    experts = 16 // 4
    assert looped.forward.kernels - grouped.forward.kernels == 2 * (experts / 2 - 1)
    assert looped.backward.kernels - grouped.backward.kernels == 4 * (experts / 2 - 1)
    assert looped.forward.compute == grouped.forward.compute


def test_parts_of_a_layer_that_are_a_graph_are_one_launch_and_compute_as_long() -> None:
    cluster, kind = Cluster.load("dgx_h100"), MOE.kinds[0]
    execution = Execution(expert=4, data=8, global_batch=8)
    plain, router, both = (
        layer_passes(MOE, execution, Machine(cluster, replace(EAGER, captured=parts)), kind)
        for parts in ((), ("router",), ("mixer", "router"))
    )
    mixer = layer_passes(MOE, execution, Machine(cluster, EAGER), LayerKind("attention", None))
    for one, two, three, attention in zip(plain[:2], router[:2], both[:2], mixer[:2], strict=True):
        assert one.kernels - two.kernels == 5  # of 6
        assert two.kernels - three.kernels == attention.kernels - 1
        assert one._replace(kernels=0) == two._replace(kernels=0) == three._replace(kernels=0)
    seconds = [
        predict(MOE, execution, Machine(cluster, replace(EAGER, captured=parts))).seconds
        for parts in ((), ("router",), ("mixer", "router"))
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_the_host_needs_30_launches_per_pass_over_experts_beside_their_kernels() -> None:
    execution = Execution(expert=4, data=8, global_batch=8)
    passes = layer_passes(MOE, execution, h100(8), MOE.kinds[0])
    mixer = layer_passes(MOE, execution, h100(8), LayerKind("attention", None))
    # grouped products, router, exchanges, norm and residual sum, permutations
    assert passes.forward.kernels - mixer.forward.kernels == 30 + 2 + 6 + 6 + 4 + 4
    assert passes.backward.kernels - mixer.backward.kernels == 30 + 4 + 6 + 6 + 8 + 4


def test_fused_experts_cast_what_arrives_alone_and_have_no_activations_of_their_own() -> None:
    model = MOE.model_copy(update={"precision": "f8"})
    cluster = Cluster.load("dgx_h100")
    execution = Execution(expert=4, data=8, global_batch=8)
    kind = model.kinds[0]
    grouped, fused = (
        layer_passes(
            model, execution, Machine(cluster, replace(EAGER, expert_kernels=kernels)), kind
        )
        for kernels in ("grouped", "fused")
    )
    assert fused.forward.compute < grouped.forward.compute
    assert fused.backward.compute < grouped.backward.compute
    assert fused.forward.flops == grouped.forward.flops


def test_recomputing_experts_is_between_selective_and_full_in_time_and_memory() -> None:
    executions = [
        Execution(expert=4, data=8, global_batch=8, recompute=recompute)
        for recompute in ("selective", "mlp", "full")
    ]
    seconds = [predict(MOE, execution, h100(8)).seconds for execution in executions]
    assert seconds[0] < seconds[1] < seconds[2]
    activations = [memory_of(MOE, execution).activations for execution in executions]
    assert activations[0] > activations[1] > activations[2]


@pytest.mark.parametrize(
    ("changes", "dispatch", "copies"),
    [
        ({"precision": "f8"}, "all_to_all", 1),
        ({"precision": "f8"}, "deduplicated", 0),
        ({}, "all_to_all", 0),
        ({"precision": "f8", "experts": {"capacity_factor": 1.0}}, "all_to_all", 0),
    ],
)
def test_rows_of_experts_in_few_bits_are_padded_after_an_all_to_all(
    changes: dict[str, Any], dispatch: str, copies: int
) -> None:
    experts = MOE.experts_section.fields() | changes.get("experts", {})
    model = Transformer.model_validate(MOE.fields() | changes | {"experts": experts})
    execution = Execution(expert=4, data=8, global_batch=8, dispatch=dispatch)
    cluster, kind = Cluster.load("dgx_h100"), model.kinds[0]
    looped, grouped = (
        layer_passes(model, execution, Machine(cluster, replace(EAGER, expert_kernels=way)), kind)
        for way in ("looped", "grouped")
    )
    # inputs and outputs, each read and written, in 16 bits; 2048 tokens have 2 experts each
    padded = copies * h100(8).memory_seconds(2 * 2 * 2.0 * 2 * 2048 * 2048, 2)
    for one, other in zip(looped[:2], grouped[:2], strict=True):
        assert one.compute - other.compute == pytest.approx(padded, abs=1e-12)
