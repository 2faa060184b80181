import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import simulator.formula
from simulator.cli import app
from simulator.cluster import Cluster
from simulator.formula import EAGER, Execution, Machine, Transformer, predict
from simulator.formula.files import load_machine
from simulator.formula.what_if import Change

GPT = Transformer(layers=16, hidden=4096, heads=32, seq=2048, vocab=51200)
PLAN = Execution(tensor=8, data=4, microbatch=2, global_batch=64)


def machine(*changes: str) -> Machine:
    return load_machine("dgx_a100_80", 32, "eager", [Change.parse(text) for text in changes])


def test_without_changes_it_is_the_machine_of_the_cluster() -> None:
    assert machine() == Machine(Cluster.load("dgx_a100_80").with_size(4), EAGER)


def test_a_factor_multiplies_what_is_there_and_a_value_replaces_it() -> None:
    fields = {"link": {"latency_us": 4.0}, "hosts": 2}
    assert Change.parse("cluster.link.latency_us=0.5x").apply(fields | {"cluster": fields})["cluster"] == {
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
def test_a_change_of_a_link_changes_what_goes_over_it(change: str, axis: str) -> None:
    before, after = predict(GPT, PLAN, machine()), predict(GPT, PLAN, machine(change))
    changed = {name for name in ("tensor", "data") if after.exposed[name] != before.exposed[name]}
    assert changed == {axis}
    assert (after.exposed[axis] < before.exposed[axis]) == ("bandwidth" in change)


def test_twice_the_bandwidth_halves_what_the_bytes_take() -> None:
    before, after = machine(), machine("cluster.intra_host.bandwidth_gb_per_s=2x")
    size, ring = 2**30, before.network.ring(8)
    # launch and hops stay: 2 * slow - fast is theirs alone
    slow, fast = (each.network.seconds("all_reduce", size, ring) for each in (before, after))
    curve = before.network.curves.all_reduce
    assert 2 * fast - slow == pytest.approx((curve.launch_us + 14 * curve.hop_us) * 1e-6)


def test_a_faster_memory_and_faster_products_are_faster_in_proportion() -> None:
    twice = machine("cluster.device.memory_bandwidth_gb_per_s=2x", "cluster.device.peak_tflop_per_s.bf16=2x")
    assert twice.gemms.bandwidth == 2 * machine().gemms.bandwidth
    assert (twice.gemms.peak, twice.gemms.core) == (2 * machine().gemms.peak, 2 * machine().gemms.core)


def test_another_device_comes_with_its_own_measurements() -> None:
    other = machine("cluster.device.memory_gb=160", "cluster.device=h100_sxm5_80gb")
    assert other.gemms == Machine(Cluster.load("dgx_h100")).gemms
    assert other.cluster.device.memory_gb == 160
    assert other.cluster.hosts == 4


EXAMPLE = Path(simulator.formula.__file__).parent / "examples" / "gpt3_175b.yaml"


def test_a_formula_file_is_predicted_on_several_clusters_with_changes() -> None:
    result = CliRunner().invoke(
        app,
        ["predict", str(EXAMPLE), "--cluster", "dgx_a100_80", "--cluster", "dgx_h100", "--json"],
    )
    assert result.exit_code == 0, result.output
    both = json.loads(result.stdout)
    assert both["dgx_h100"]["seconds"] < both["dgx_a100_80"]["seconds"]
    halved = CliRunner().invoke(
        app,
        ["predict", str(EXAMPLE), "--set", "execution.recompute=full", "--set", "cluster.nics_per_host=4", "--json"],
    )
    changed = json.loads(halved.stdout)["dgx_a100_80"]
    assert changed["recompute"] > 3 * both["dgx_a100_80"]["recompute"]
    assert changed["exposed data"] > 1.5 * both["dgx_a100_80"]["exposed data"]
    table = CliRunner().invoke(app, ["predict", str(EXAMPLE)])
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
        ("cluster.device.xla_target=2x", "the formulas don't use 'device.xla_target'; they use hosts"),
        (
            "cluster.wires.latency_us=1",
            "there is no section 'wires'; there are: device, intra_host, collectives, inter_host",
        ),
        ("cluster.inter_host.bandwidth_gb_per_s=-1.0", "greater than 0"),
        ("model.attention=2x", "attention is None, which can't be multiplied; what can: layers"),
    ],
)
def test_a_change_that_can_not_be_made_is_explained(change: str, message: str) -> None:
    result = CliRunner().invoke(app, ["predict", str(EXAMPLE), "--set", change], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
