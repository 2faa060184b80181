"""The search of layouts finds what brute force finds, and says why there is none."""

import json
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simulator.cli import app
from simulator.cli.error_lines import BAD_INPUT, NO
from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError
from simulator.transformer import Execution, Machine, Transformer, predict
from simulator.transformer.layout_search import SEARCHED, search_layouts

EXAMPLES = Path(__file__).parents[2] / "simulator/transformer/examples"
DENSE = Transformer(
    layers=24,
    hidden=4096,
    heads=32,
    seq=4096,
    vocab=50304,
    attention="flash2",
    dropout=False,
)
MOE = DENSE.model_copy(update={"experts": {"count": 8, "top_k": 2, "ffn": 4096}})
BASE = Execution(global_batch=16, zero=1, overlap_gradients=True)


def a100s(hosts: int) -> Machine:
    return Machine(Cluster.load("dgx_a100_80").with_size(hosts))


def brute_force(
    model: Transformer, machine: Machine, confidence: float, interleaves: Sequence[int]
) -> float:
    """Return the seconds of the fastest layout that fits, among all powers of two."""
    devices = machine.cluster.num_devices
    sizes = [2**power for power in range(5)]
    fastest = float("inf")
    experts = sizes[:4] if model.experts else [1]
    for tensor, context, pipeline, micro, stages, expert in product(
        sizes[:4], sizes[:4], sizes[:4], sizes[:5], interleaves, experts
    ):
        data, rest = divmod(devices, tensor * context * pipeline)
        if rest or not data or (pipeline > 1 and 16 // max(1, data * micro) % pipeline):
            continue
        if stages > 1 and (pipeline == 1 or 24 % (pipeline * stages)):
            continue
        for recompute, shards in product(("none", "mlp", "full"), {1, tensor}):
            fields = {"expert": expert, "expert_tensor": shards} if model.experts else {}
            try:
                execution = BASE.model_copy(
                    update={
                        "tensor": tensor,
                        "sequence_parallel": tensor > 1,
                        "context": context,
                        "pipeline": pipeline,
                        "data": data,
                        "microbatch": micro,
                        "interleave": stages,
                        "recompute": recompute,
                        **fields,
                    }
                )
                prediction = predict(model, execution, machine)
            except ValueError:
                continue
            if prediction.memory.fit_probability >= confidence:
                fastest = min(fastest, prediction.seconds)
    return fastest


@pytest.mark.parametrize(
    ("model", "kept", "interleaves"),
    [(DENSE, (), (1, 2, 3, 4, 6, 12, 24)), (MOE, ("interleave",), (1,))],
    ids=["dense", "experts"],
)
def test_the_fastest_layout_is_that_of_brute_force(
    model: Transformer, kept: tuple[str, ...], interleaves: tuple[int, ...]
) -> None:
    machine = a100s(1)
    found = search_layouts(model, BASE, machine, kept=kept)
    expected = brute_force(model, machine, 0.95, interleaves)
    assert found.fitting[0].prediction.seconds == expected


def test_layouts_are_those_of_their_predictions_in_the_order_of_time() -> None:
    machine = a100s(1)
    found = search_layouts(MOE, BASE, machine)
    for layout in found.fitting[::40]:
        assert layout.prediction == predict(MOE, layout.execution, machine)
        assert layout.execution.devices == 8
        assert layout.prediction.memory.fit_probability >= 0.95
    seconds = [layout.prediction.seconds for layout in found.fitting]
    assert seconds == sorted(seconds)
    assert all(layout.prediction.memory.fit_probability < 0.95 for layout in found.uncertain)


def test_tensor_groups_stay_within_hosts_where_other_degrees_divide_the_devices() -> None:
    model = DENSE.model_copy(update={"hidden": 3072, "heads": 48, "seq": 3072})
    found = search_layouts(model, BASE.model_copy(update={"global_batch": 24}), a100s(3))
    assert {layout.execution.tensor for layout in found.fitting} == {1, 2, 4, 8}


def test_no_layout_has_less_time_and_memory_than_the_frontier() -> None:
    found = search_layouts(DENSE, BASE, a100s(1))
    frontier = [(one.prediction.seconds, one.prediction.memory.reserved) for one in found.frontier]
    assert len(frontier) > 1
    assert all(fast[0] <= slow[0] and fast[1] > slow[1] for fast, slow in pairwise(frontier))
    for layout in found.fitting:
        seconds, memory = layout.prediction.seconds, layout.prediction.memory.reserved
        assert any(time <= seconds and size <= memory for time, size in frontier)


def test_more_confidence_has_fewer_layouts_without_recomputation() -> None:
    counts = []
    for confidence in (0.5, 0.999999):
        found = search_layouts(DENSE, BASE, a100s(1), confidence)
        counts.append(sum(layout.execution.recompute == "none" for layout in found.fitting))
    assert counts[0] > counts[1] > 0


def test_kept_fields_have_the_value_of_the_scenario() -> None:
    execution = BASE.model_copy(update={"tensor": 2, "pipeline": 2, "recompute": "full"})
    found = search_layouts(DENSE, execution, a100s(1), kept=("tensor", "pipeline", "recompute"))
    chosen = {
        (one.execution.tensor, one.execution.pipeline, one.execution.recompute)
        for one in found.fitting
    }
    assert chosen == {(2, 2, "full")}


def test_zero_3_has_no_pipeline() -> None:
    execution = BASE.model_copy(update={"zero": 3})
    found = search_layouts(DENSE, execution, a100s(1))
    assert {layout.execution.pipeline for layout in found.fitting} == {1}


@pytest.mark.parametrize(
    ("model", "fields", "kept", "hosts", "text"),
    [
        (DENSE, {"global_batch": 7}, (*SEARCHED,), 1, "global_batch, which is 7"),
        (DENSE, {"tensor": 3}, ("tensor",), 1, "no layout of 8 devices with tensor 3"),
        (MOE, {"expert": 3}, ("expert",), 1, "with expert 3: .* expert 8 experts"),
        (DENSE, {}, ("data",), 1, "given 'data' to keep, expected some of tensor"),
        (DENSE.model_copy(update={"precision": "f8"}), {}, (), 1, "has no f8e4m3fn"),
    ],
)
def test_impossible_degrees_are_named(
    model: Transformer, fields: dict[str, int], kept: tuple[str, ...], hosts: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        search_layouts(model, BASE.model_copy(update=fields), a100s(hosts), kept=kept)


@pytest.mark.parametrize("confidence", [0.0, 1.0, -1.0, float("nan")])
def test_a_confidence_is_a_probability(confidence: float) -> None:
    with pytest.raises(ValueError, match="expected between 0 and 1, both excluded"):
        search_layouts(DENSE, BASE, a100s(1), confidence)


def test_no_layout_is_an_error_of_the_cluster() -> None:
    with pytest.raises(ClusterError, match="choose another number of hosts"):
        search_layouts(DENSE, BASE.model_copy(update={"global_batch": 1}), a100s(3), kept=SEARCHED)


def command(*args: object, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["llm", "search", *map(str, args)], env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


def test_the_command_prints_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "layouts.svg"
    stdout, stderr = command(
        *(EXAMPLES / "llama3_8b.yaml", "--cluster", "dgx_h100", "--hosts", 1, "--rows", 3),
        *("--picture", picture),
    )
    rows = [line for line in stdout.splitlines() if " %" in line and "layouts" not in line]
    assert len(rows) == 3
    assert "llama3_8b on 8 devices of dgx_h100" in stdout
    assert picture.read_text().startswith("<?xml")
    assert str(picture) in stderr


def test_the_command_prints_json_of_the_search() -> None:
    options = ("--cluster", "dgx_h100", "--hosts", 1, "--keep", "pipeline", "--json")
    changes = ("--set", "execution.pipeline=1", "--rows", 2)
    stdout, _ = command(EXAMPLES / "llama3_8b.yaml", *options, *changes)
    value = json.loads(stdout)
    assert [layout["pipeline"] for layout in value["layouts"]] == [1, 1]
    assert value["looked_at"] == value["fitting"] + value["uncertain"] + value["oversized"]
    assert value["frontier"][0] == value["layouts"][0]


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (
            ("llama3_8b.yaml", "--hosts", 1, "--set", "cluster.hosts=2"),
            BAD_INPUT,
            "'cluster.hosts=2': given together with --hosts; expected one of them",
        ),
        (
            ("llama3_405b.yaml", "--cluster", "dgx_h100", "--hosts", 1),
            NO,
            "give more hosts, another cluster, or --set execution.zero=2",
        ),
        (
            ("llama3_405b.yaml", "--hosts", 1, "--set", "execution.zero=3"),
            NO,
            "give more hosts or another cluster",
        ),
        (
            ("llama3_70b.yaml", "--set", "execution.zero=3", "--keep", "pipeline"),
            BAD_INPUT,
            "execution.zero: given 3, expected at most 2 with a pipeline",
        ),
        (("llama3_8b.yaml", "--hosts", 0), BAD_INPUT, "--hosts"),
        (("llama3_8b.yaml", "--confidence", 2), BAD_INPUT, "given 2.0, expected between 0 and 1"),
        (("llama3_8b.yaml", "--keep", "depth"), BAD_INPUT, "given 'depth' to keep, expected"),
        (("llama3_8b.yaml", "--picture", "x.txt"), BAD_INPUT, "expected a path that ends in .svg"),
        (("llama3_8b.yaml", "--picture", "no/x.svg"), BAD_INPUT, "there is no folder"),
        (("llama3_8b.yaml", "--set", "execution.tensor=3"), BAD_INPUT, "with --keep tensor"),
        (("llama3_8b.yaml", "--set", "execution.data=2"), BAD_INPUT, "the other degrees leave"),
        (
            ("llama3_8b.yaml", "--set", "execution.sequence_parallel=false"),
            BAD_INPUT,
            "where they have tensor parallelism",
        ),
        (("nothing.yaml",), BAD_INPUT, "No such file"),
    ],
)
def test_bad_input_is_one_line(args: tuple[object, ...], code: int, text: str) -> None:
    name, *options = args
    stdout, stderr = command(EXAMPLES / str(name), *options, code=code)
    assert stdout == ""
    (line,) = stderr.splitlines()
    assert text in line
