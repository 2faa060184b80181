"""What-ifs change any field of a cluster or scenario that the prediction depends on."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import simulator.transformer
from simulator.cli import app
from simulator.engine.breakdown import predict as predict_program
from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError
from simulator.hardware.heterogeneous import HeterogeneousCluster, load_cluster
from simulator.hardware.kernel_profile import FusedAttentionKind
from simulator.memory import MemoryUse
from simulator.program import Program, Run
from simulator.transformer import EAGER, Execution, Machine, Transformer, predict
from simulator.transformer.scenario_files import EXAMPLES, Scenario, load_for_program, load_machine
from simulator.transformer.what_if import Change
from simulator.work import Collective, CollectiveKind, Done, Gemm, Groups, Kernel, KernelKind, Start
from tests.tiers import tiers

GPT = Transformer(layers=16, hidden=4096, heads=32, seq=2048, vocab=51200)
PLAN = Execution(tensor=8, data=4, microbatch=2, global_batch=64)


def machine(*changes: str) -> Machine:
    return load_machine("dgx_a100_80", 32, "eager", [Change.parse(text) for text in changes])


def test_without_changes_the_machine_is_that_of_the_cluster() -> None:
    assert machine() == Machine(Cluster.load("dgx_a100_80").with_size(4), EAGER)


def test_a_factor_multiplies_a_field_and_a_value_replaces_it() -> None:
    fields = {"link": {"latency_us": 4.0}, "hosts": 2}
    assert Change.parse("cluster.link.latency_us=0.5x").apply(fields | {"cluster": fields})[
        "cluster"
    ] == {
        "link": {"latency_us": 2.0},
        "hosts": 2,
    }
    doubled = Change.parse("cluster.hosts=2x").apply({"cluster": fields})["cluster"]["hosts"]
    assert (doubled, type(doubled)) == (4, int)
    assert Change.parse("cluster.hosts=3").apply({"cluster": fields})["cluster"]["hosts"] == 3


@pytest.mark.parametrize(
    ("change", "axis"),
    [
        ("cluster.inter_host.bandwidth_gb_per_s=2x", "data"),
        ("cluster.nics_per_host=0.5x", "data"),
        ("cluster.intra_host.bandwidth_gb_per_s=2x", "tensor"),
    ],
)
def test_a_change_of_a_link_changes_only_its_communication(change: str, axis: str) -> None:
    before, after = predict(GPT, PLAN, machine()), predict(GPT, PLAN, machine(change))
    changed = {name for name in ("tensor", "data") if after.exposed[name] != before.exposed[name]}
    assert changed == {axis}
    assert (after.exposed[axis] < before.exposed[axis]) == ("bandwidth" in change)


def test_twice_the_bandwidth_halves_the_seconds_per_byte() -> None:
    before, after = machine(), machine("cluster.intra_host.bandwidth_gb_per_s=2x")
    size, ring = 2**30, before.network.ring(8)
    # launch and hops do not change; they are 2 * fast - slow
    slow, fast = (variant.network.seconds("all_reduce", size, ring) for variant in (before, after))
    curve = before.network.curves.all_reduce
    assert 2 * fast - slow == pytest.approx((curve.launch_us + 14 * curve.hop_us) * 1e-6)


def leaves(fields: Mapping[Any, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Return the numbers of a description by their paths."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and name != "xla_target":
            yield from leaves(value, (*path, str(name)))
        elif isinstance(value, bool | int | float):
            yield ".".join((*path, str(name))), value


def changed_value(field: str, value: Any) -> Any:
    """Return another number that is valid for the field."""
    if isinstance(value, bool):
        return not value
    if field == "hosts":
        return 1
    if field == "device.kernels.wave_quantization" or "efficiency" in field:
        return value / 2
    if field.startswith("device.peak"):
        return 10 * value  # the faster 16-bit format counts
    return 1.2 * value if field.endswith("contention_factor") else 2 * value if value else 1.0


FUSED: tuple[FusedAttentionKind, ...] = ("flash1", "flash", "flash2", "cudnn")
SCENARIOS = {
    "naive": (GPT, PLAN),
    "divided": (
        GPT,
        Execution(
            tensor=4, pipeline=2, data=4, sequence_parallel=True,
            global_batch=64, zero=1, overlap_gradients=True,
        ),
    ),
    "context": (GPT, Execution(tensor=4, context=2, data=2, pipeline=2, global_batch=64)),
    "longer context": (GPT, Execution(tensor=2, context=4, data=2, pipeline=2, global_batch=64)),
    "8 bits": (GPT.model_copy(update={"precision": "f8"}), PLAN),
    "one host": (GPT, Execution(data=8, global_batch=64, overlap_gradients=True)),
    "small": (
        Transformer(layers=4, hidden=512, heads=8, seq=512, vocab=8192),
        Execution(data=32, global_batch=32),
    ),
    "mamba": (
        Scenario.load(EXAMPLES / "nemotron_3_nano.yaml").model,
        Execution(data=32, global_batch=32),
    ),
    **{kind: (GPT.model_copy(update={"attention": kind}), PLAN) for kind in FUSED},
}  # fmt: skip

DTYPES = ("f64", "f32", "bf16", "f16", "f8e4m3fn", "f8e5m2", "s8")
NEAR: Groups = (tuple(range(8)), tuple(range(8, 16)))
KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
)

OTHER_KINDS: tuple[KernelKind, ...] = ("conv", "attention", "attention backward", "host copy")


def program_of_all_costs() -> Program:
    """Return a program with all kinds of kernels and collectives within and between hosts."""
    shapes = (
        Gemm(64, 64, 8192),
        Gemm(256, 256, 256),
        Gemm(16384, 16384, 8192),
        Gemm(4096, 5120, 4096),
    )
    body: list[Any] = [
        Kernel("", "gemm", g.flops, 1e6, dtype, g) for g in shapes for dtype in DTYPES
    ]
    body += [Kernel("", "memory", 1e12, 1e6), Kernel("", "memory", 0, 1e9)]
    body += [Kernel("", kind, 1e12, 1e6, "bf16") for kind in OTHER_KINDS]
    for kind in KINDS:
        pairs: list[Groups] = (
            [((0, 1),), ((0, 8), (1, 9))]
            if kind == "collective_permute"
            else [
                NEAR,
                (tuple(range(16)),),
                *((tuple(range(size)),) for size in range(2, 8)),
            ]
        )
        for groups in pairs:
            for size in (1e4, 1e9):
                start = Start(Collective("c", kind, size, groups))
                body += [start, Kernel("", "memory", 0, 1e7), Done("c"), start, Done("c")]
    use = MemoryUse(arguments=10**9)
    return Program((tuple(range(16)),), ((Run(0, "S"),),), {"0S": tuple(body)}, (use,))


# Scenarios on V100s do not use these: f16 is faster, clocks do not drop, groups have other sizes,
# heads are larger.
UNUSED = {
    "device.kernels.attention.cudnn_least_head",
    "device.kernels.efficiency_by_dtype.bf16",
    "device.kernels.throttles_in_training",
    "device.kernels.split_k_us",
    *(f"collectives.all_reduce.group_bandwidth_gb_per_s.{size}" for size in (3, 5, 6, 7)),
}


@pytest.mark.parametrize(
    ("name", "front_end"),
    tiers([(name, end) for end in ("scenario", "program") for name in ("p3.16xlarge", "dgx_h100")]),
)
def test_every_change_of_a_number_changes_the_prediction_or_is_refused(
    front_end: str, name: str, tmp_path: Path
) -> None:
    program, fields = program_of_all_costs(), Cluster.load(name).model_dump()

    def predicted(*changes: Change, cluster: str = name) -> list[Any]:
        if front_end == "program":
            return [predict_program(program, load_for_program(cluster, 16, changes))]
        machine = load_machine(cluster, 32, "eager", changes)
        return [
            predict(*scenario, machine)
            for key, scenario in SCENARIOS.items()
            if key != "8 bits" or name == "dgx_h100"
        ]

    before, ignored, refused = repr(predicted()), [], []
    for field, value in leaves(Cluster.load(name).with_size(4).model_dump()):
        change = Change.parse(
            f"cluster.{field}={yaml.safe_dump(changed_value(field, value)).splitlines()[0]}"
        )
        try:
            after = repr(predicted(change))
        except ValueError as error:
            refused.append(field)
            if "nothing here depends on" in str(error):
                path = tmp_path / f"{name}.yaml"
                path.write_text(yaml.safe_dump(change.apply(fields, 1)))
                assert repr(predicted(cluster=str(path))) == before, field
            continue
        if after == before:
            ignored.append(field)
    # `rails` matters only for messages that leave a leaf switch, `sharing` for groups of three or
    # more devices without their own bandwidth.
    conditional = {"rails", *(["collectives.all_reduce.sharing"] if name == "p3.16xlarge" else [])}
    assert set(ignored) - conditional == (
        UNUSED if (front_end, name) == ("scenario", "p3.16xlarge") else set()
    )
    links = {"intra_host.latency_us", "intra_host.half_size_mb", "collective_launch_us"}
    assert links <= set(refused)  # measurements replace these fields
    assert {
        "inter_host.bandwidth_gb_per_s",
        "intra_host.bandwidth_gb_per_s",
        "device.cores",
    }.isdisjoint(refused)


def outcome(predicted: Callable[[], Any]) -> str:
    """Return the prediction, or the field that the error names."""
    try:
        return repr(predicted())
    except ClusterError as error:
        return str(error).split(": ")[1]


@pytest.mark.parametrize("name", ["dgx_h100", "p3.16xlarge", "a100_pcie_4"])
def test_a_change_in_a_file_a_what_if_and_python_are_equivalent(name: str, tmp_path: Path) -> None:
    program, before = program_of_all_costs(), Cluster.load(name).with_size(8)
    fields = before.model_dump()
    reference, different = repr(predict_program(program, before)), 0
    for field, value in leaves(
        {key: fields[key] for key in ("collective_launch_us", "intra_host", "inter_host")}
    ):
        change = Change.parse(f"cluster.{field}={changed_value(field, value)}")
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(fields))
        what_if = outcome(
            lambda path=path, change=change: predict_program(
                program, load_for_program(str(path), 16, [change])
            )
        )
        path.write_text(yaml.safe_dump(change.apply(fields | {"cluster": fields})["cluster"]))
        in_file = outcome(lambda path=path: predict_program(program, load_cluster(path)))
        section, _, inner = field.rpartition(".")
        new = changed_value(field, value)
        link = getattr(before, section).model_copy(update={inner: new}) if section else new
        in_python = outcome(
            lambda key=section or field, link=link: predict_program(
                program, before.model_copy(update={key: link})
            )
        )
        assert what_if == in_file == in_python, field
        assert in_file != reference, field
        different += 1
    assert different >= 7


def test_measured_collectives_scale_with_the_bandwidth_of_the_link_in_the_file(
    tmp_path: Path,
) -> None:
    shipped = (
        Path(simulator.transformer.__file__).parents[1] / "hardware" / "clusters" / "dgx_h100.yaml"
    )
    fields = yaml.safe_load(shipped.read_text())
    fields["intra_host"]["bandwidth_gb_per_s"] /= 4
    (tmp_path / "slow.yaml").write_text(yaml.safe_dump(fields))
    fast, slow = Cluster.load("dgx_h100").curves, Cluster.load(tmp_path / "slow.yaml").curves
    for name in (
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "collective_permute",
        "nvls",
    ):
        assert getattr(slow, name) == getattr(fast, name).faster(1 / 4)


@pytest.mark.parametrize(
    "field", ["intra_host.latency_us", "intra_host.half_size_mb", "collective_launch_us"]
)
@pytest.mark.parametrize(
    "load",
    [lambda *args: load_for_program(*args), lambda a, b, c: load_machine(a, b, "eager", c)],
)
def test_changes_of_link_fields_that_measurements_replace_are_refused(
    load: Any, field: str
) -> None:
    with pytest.raises(
        ClusterError,
        match=rf"{field}: given 1000, but `collectives` were measured .*collectives: null",
    ):
        load("dgx_h100", 8, [Change.parse(f"cluster.{field}=1000")])
    load(
        "dgx_h100",
        8,
        [Change.parse(f"cluster.{field}=1000"), Change.parse("cluster.collectives=null")],
    )


def test_profiles_are_replaced_by_name() -> None:
    changes = [
        Change.parse("cluster.collectives=h100"),
        Change.parse("cluster.device.kernels=h100_sxm5_80gb"),
    ]
    h100, mixed = Cluster.load("dgx_h100"), load_for_program("dgx_a100_80", 8, changes)
    assert isinstance(mixed, Cluster)
    assert (mixed.collectives, mixed.device.kernels) == (h100.collectives, h100.device.kernels)
    assert mixed.device.name == Cluster.load("dgx_a100_80").device.name
    with pytest.raises(
        ClusterError, match="collectives: unknown profile 'h1000'; expected one of a100, b200"
    ):
        load_for_program("dgx_a100_80", 8, [Change.parse("cluster.collectives=h1000")])


def test_twice_the_bandwidth_halves_the_seconds_per_byte_of_programs() -> None:
    body = (Start(Collective("c", "all_reduce", 2**30, (tuple(range(8)),))), Done("c"))
    program = Program((tuple(range(8)),), ((Run(0, "S"),),), {"0S": body})

    def seconds(*changes: str) -> float:
        cluster = load_for_program("dgx_a100_80", 8, [Change.parse(text) for text in changes])
        return predict_program(program, cluster).seconds

    curve = machine().network.curves.all_reduce
    fixed_seconds = 2 * seconds("cluster.intra_host.bandwidth_gb_per_s=2x") - seconds()
    assert fixed_seconds == pytest.approx((curve.launch_us + 14 * curve.hop_us) * 1e-6)


def test_clusters_grow_to_the_needed_devices_unless_their_size_is_given() -> None:
    grown = load_for_program("dgx_h100", 17)
    assert grown == Cluster.load("dgx_h100").with_size(3)
    assert load_for_program("dgx_h100", 17, [Change.parse("cluster.hosts=2")]) == Cluster.load(
        "dgx_h100"
    ).with_size(2)
    smaller = load_for_program("dgx_h100", 17, [Change.parse("cluster.devices_per_host=4")])
    assert isinstance(smaller, Cluster)
    assert (smaller.hosts, smaller.devices_per_host) == (5, 4)
    with pytest.raises(ClusterError, match="8 devices are needed, 'h200' has 1 and no inter_host"):
        load_for_program("h200", 8)


# Heterogeneous clusters


def test_pools_are_changed_separately() -> None:
    changes = (
        "cluster.pools.0.inter_host.bandwidth_gb_per_s=2x",
        "cluster.pools.1.device=h100_sxm5_80gb",
        "cluster.pools.1.hosts=2",
    )
    before, after = (
        load_for_program("p3_beside_p4d", 16, [Change.parse(text) for text in texts])
        for texts in ((), changes)
    )
    assert before == load_cluster("p3_beside_p4d")
    assert isinstance(after, HeterogeneousCluster)
    first, second = after.pools
    assert first.inter_host is not None
    assert first.inter_host.bandwidth_gb_per_s == pytest.approx(5.6)
    assert first.device == before.pools[0].device
    assert (second.device, second.hosts) == (Cluster.load("dgx_h100").device, 2)
    faster = load_for_program(
        "p3_beside_p4d", 16, [Change.parse("cluster.pools.1.intra_host.bandwidth_gb_per_s=2x")]
    )
    curves = [cluster.pools[1].curves for cluster in (before, faster)]
    assert curves[1].all_reduce == curves[0].all_reduce.faster(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "cluster.hosts=2",
            "has pools of unlike hosts, numbered 0 to 1; expected a field of one of them",
        ),
        ("cluster.pools.2.hosts=2", "numbered 0 to 1"),
        ("cluster.pools.first.hosts=2", "numbered 0 to 1"),
        ("cluster.pools.0=2", "numbered 0 to 1"),
        ("cluster.pools.0.nics=2", "p3_beside_p4d, pool 0: nics: unknown field"),
        (
            "cluster.pools.1.collective_launch_us=2",
            "p3_beside_p4d, pool 1: collective_launch_us: given 2, but `collectives` were measured",
        ),
        (
            "cluster.pools.1.inter_host=null",
            "pools.1.inter_host: missing, but there are other pools",
        ),
    ],
)
def test_an_invalid_change_of_a_pool_is_refused(change: str, message: str) -> None:
    with pytest.raises(ClusterError) as raised:
        load_for_program("p3_beside_p4d", 16, [Change.parse(change)])
    assert message in str(raised.value)


def test_scenarios_on_heterogeneous_clusters_are_refused() -> None:
    with pytest.raises(
        ClusterError, match="has pools, so its hosts are not all alike, as is needed here"
    ):
        load_machine("p3_beside_p4d", 16, "eager")


def test_changes_of_bandwidth_and_peak_scale_the_model_of_products() -> None:
    twice = machine(
        "cluster.device.memory_bandwidth_gb_per_s=2x", "cluster.device.peak_tflop_per_s.bf16=2x"
    )
    assert twice.gemms.bandwidth == 2 * machine().gemms.bandwidth
    assert (twice.gemms.peak, twice.gemms.core) == (
        2 * machine().gemms.peak,
        2 * machine().gemms.core,
    )


def test_another_device_has_its_own_measurements() -> None:
    changed_value = machine("cluster.device.memory_gb=160", "cluster.device=h100_sxm5_80gb")
    assert changed_value.gemms == Machine(Cluster.load("dgx_h100")).gemms
    assert changed_value.cluster.device.memory_gb == 160
    assert changed_value.cluster.hosts == 4


EXAMPLE = Path(simulator.transformer.__file__).parent / "examples" / "gpt3_175b.yaml"


def test_a_scenario_is_predicted_on_several_clusters_with_changes() -> None:
    result = CliRunner().invoke(
        app,
        ["llm", str(EXAMPLE), "--cluster", "dgx_a100_80", "--cluster", "dgx_h100", "--json"],
    )
    assert result.exit_code == 0, result.output
    both = json.loads(result.stdout)
    assert both["dgx_h100"]["seconds"] < both["dgx_a100_80"]["seconds"]
    halved = CliRunner().invoke(
        app,
        [
            "llm",
            str(EXAMPLE),
            "--set",
            "execution.recompute=full",
            "--set",
            "cluster.nics_per_host=4",
            "--json",
        ],
    )
    changed = json.loads(halved.stdout)["dgx_a100_80"]
    assert changed["recompute"] > 3 * both["dgx_a100_80"]["recompute"]
    assert changed["exposed data"] > 1.5 * both["dgx_a100_80"]["exposed data"]
    table = CliRunner().invoke(app, ["llm", str(EXAMPLE)])
    assert "memory, GB" in table.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("execution.tensors=4", "unknown field"),
        ("execution.tensor=5", "expected a divisor of heads"),
        ("tensor=4", "expected section.field=value"),
        ("plan.tensor=4", "there is no section 'plan'; there are: model, execution"),
        ("cluster.nics=4", "unknown field"),
        ("cluster.device=h1000", "unknown device 'h1000'; expected one of"),
        (
            "cluster.device.xla_target=null",
            "nothing here depends on 'device.xla_target', but on hosts, ",
        ),
        (
            "cluster.wires.latency_us=1",
            "there is no section 'wires'; there are: device, intra_host, collectives, inter_host",
        ),
        ("cluster.inter_host.bandwidth_gb_per_s=-1.0", "greater than 0"),
        ("model.attention=2x", "attention is None, which can't be multiplied; what can: layers"),
    ],
)
def test_an_invalid_change_is_refused(change: str, message: str) -> None:
    result = CliRunner().invoke(app, ["llm", str(EXAMPLE), "--set", change], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
