"""Report pages: their data equal those of the API, and whatever users name stays text."""

import json
import re
from collections import Counter
from dataclasses import replace
from html import unescape

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.analysis.planned_collectives import collectives_by_equation
from autopar.analysis.replay import replay
from autopar.lowering.planned import single_stage
from autopar.planning.plan_step import planned_step
from autopar.report import (
    Alternative,
    PlanReport,
    plan_report,
    program_work,
    report_page,
    save_report,
)
from autopar.report import timeline_rows as timeline_rows_module
from autopar.report.page_template import format_bytes, format_seconds
from autopar.report.program_work import kernel_rows
from autopar.report.timeline_rows import timeline_rows
from simulator import Gemm, Kernel, Loop, load_cluster, simulate
from simulator.engine.prediction import PARTS
from simulator.files import FileError
from simulator.program import Program, Recv

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
HOSTILE = """</script><script>alert(1)</script><!--'"&lt;\u2028 ünïcode 😀 {{ 7*7 }} ${1}"""


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


PARAMS = {"a": shape(64, 128), HOSTILE: {"b": shape(128, 64)}}
ARGS = PARAMS, shape(32, 64)


def step(params, batch):
    def loss(params):
        return jnp.mean((jax.nn.relu(batch @ params["a"]) @ params[HOSTILE]["b"]) ** 2)

    value, gradients = autopar.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


METHODS = {
    "shard": autopar.ShardParallel(num_micro_batches=2),
    "pipeline": autopar.PipeshardParallel(
        4, 4, layer_option=autopar.AutoLayerOption(2), stage_option=autopar.UniformStageOption(2)
    ),
}


@pytest.fixture(scope="module")
def reports() -> dict[str, PlanReport]:
    plans = {
        name: autopar.plan_step(step, ARGS, method=method, cluster="dgx_h100")
        for name, method in METHODS.items()
    }
    return {
        name: plan_report(name, plan, step, ARGS, "dgx_h100", fidelity="analytic")
        for name, plan in plans.items()
    }


def data_of(*reports: PlanReport, **options):
    """Return the JSON block of a page."""
    [block] = DATA.findall(report_page(reports, **options))
    return json.loads(block)


@pytest.mark.parametrize("name", METHODS)
def test_the_numbers_of_a_page_are_those_of_the_prediction(reports, name):
    report = reports[name]
    plan, prediction = report.plan, report.prediction
    assert plan is not None
    assert prediction == autopar.predict(step, ARGS, plan, "dgx_h100", fidelity="analytic")
    [page] = data_of(report)["plans"]
    predicted = page["prediction"]
    nones = {key: None for key, value in predicted["row"].items() if value is None}
    assert predicted["row"] == prediction.row() | nones
    parts = {row["name"]: row["seconds"] for row in predicted["parts"]}
    exposed = {f"exposed {axis}": seconds for axis, seconds in prediction.exposed.items()}
    assert parts == {part: getattr(prediction, part) for part in PARTS} | exposed
    assert sum(parts.values()) == pytest.approx(prediction.seconds)
    assert {row["axis"]: row["communication"] for row in predicted["axes"]} == {
        axis: prediction.communication.get(axis, 0.0)
        for axis in prediction.communication | prediction.exposed
    }
    assert page["memory"] == prediction.memory.parts
    assert predicted["footprint"]["capacity"] == prediction.memory.capacity
    assert (page["plan"]["seconds"], page["plan"]["bytes"]) == (
        plan.predicted_seconds,
        plan.predicted_bytes,
    )


@pytest.mark.parametrize("name", METHODS)
def test_the_timeline_of_a_page_is_the_perfetto_file(reports, name):
    timeline = reports[name].prediction.timeline
    events = timeline.chrome_trace()["traceEvents"]
    [page] = data_of(reports[name])["plans"]
    rows = page["prediction"]["timeline"]
    lanes = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert len(rows["lanes"]) == len(lanes)
    spans = sorted(
        (event["pid"], event["ts"], event["dur"], event["name"], event["cat"])
        for event in events
        if event["ph"] == "X"
    )
    texts = rows["texts"]
    assert spans == sorted(
        (rows["lanes"][lane]["mesh"], start, length, texts[name], texts[category])
        for lane, start, length, name, category, *_ in rows["spans"]
    )
    assert len(rows["arrows"]) == sum(event["ph"] == "f" for event in events)
    assert rows["total"] == len(spans)
    for mesh, row in enumerate(page["prediction"]["memory"]):
        assert [(second, sum(sizes)) for second, *sizes in row["levels"]] == [
            (second, sum(level.values())) for second, level in timeline.levels[mesh]
        ]
        assert row["budget"] == load_cluster("dgx_h100").pools[0].device.usable_bytes


def test_the_longest_spans_are_kept_and_all_are_counted(reports, monkeypatch):
    timeline = reports["pipeline"].prediction.timeline
    every = timeline_rows(timeline)
    monkeypatch.setattr(timeline_rows_module, "MAX_SPANS", 10)
    few = timeline_rows(timeline)
    assert few["total"] == every["total"] == len(every["spans"]) > 10
    assert len(few["spans"]) == 10
    lengths = sorted((span[2] for span in every["spans"]), reverse=True)
    assert sorted((span[2] for span in few["spans"]), reverse=True) == lengths[:10]
    starts = [span[1] for span in few["spans"]]
    assert starts == sorted(starts)


def test_spans_of_several_iterations_have_the_seconds_in_which_they_are_busy():
    product = Kernel("product", "gemm", 2e12, 3e6, "bf16", Gemm(1000, 1000, 1000))
    copy = Kernel("copy", "memory", 0.0, 3e9)
    program = Program.single((Loop(20, (product, copy)),), num_devices=1)
    timeline = simulate(program, load_cluster("dgx_h100"))
    rows = timeline_rows(timeline)
    busy = Counter[str]()
    for lane, _, length, _, category, _, _, seconds in rows["spans"]:
        assert seconds <= length * (1 + 1e-9)
        if rows["lanes"][lane]["name"] != "tasks":
            busy[rows["texts"][category]] += seconds
    expected = timeline.seconds_by_category(0)
    assert {name: busy[name] for name in expected} == pytest.approx(
        {name: 1e6 * seconds for name, seconds in expected.items()}
    )
    assert sum(busy.values()) == pytest.approx(1e6 * timeline.makespan)


@pytest.mark.parametrize("name", METHODS)
def test_collectives_sum_up_to_the_communication_of_the_prediction(reports, name):
    [page] = data_of(reports[name])["plans"]
    timeline, prediction = reports[name].prediction.timeline, reports[name].prediction
    mesh = max(range(len(timeline.meshes)), key=lambda mesh: timeline.busy(mesh, "compute"))
    rows = [row for row in page["prediction"]["collectives"] if row["mesh"] == mesh]
    for axis, seconds in prediction.communication.items():
        assert sum(r["seconds"] for r in rows if r["axis"] == axis) == pytest.approx(seconds)
    sends = sum(r["count"] for r in page["prediction"]["collectives"] if r["kind"] == "send")
    assert sends == len(timeline.arrows)


def test_the_kernels_of_a_whole_step_are_its_computation(reports, monkeypatch):
    report = reports["shard"]
    rows = kernel_rows(report.program, report.cluster)
    assert rows["total"] == len(rows["kernels"])
    assert sum(row["seconds"] * row["launches"] for row in rows["kernels"]) == pytest.approx(
        sum(getattr(report.prediction, part) for part in PARTS)
    )
    flops = sum(
        row["flops"] * row["launches"] for row in rows["kernels"] if row["kind"] != "memory"
    )
    devices = report.prediction.devices
    assert devices * flops == pytest.approx(report.prediction.hardware_flops)
    [device] = rows["devices"]
    assert device["flop_per_s"]["bf16"] == 989e12
    monkeypatch.setattr(program_work, "MAX_KERNELS", 2)
    few = kernel_rows(report.program, report.cluster)
    assert few["kernels"] == rows["kernels"][:2]


def test_the_bytes_of_kernels_count_every_microbatch_as_their_flops_do():
    def intensities(micro_batches: int) -> set[float]:
        method = autopar.DataParallel(num_micro_batches=micro_batches)
        plan = autopar.plan_step(step, ARGS, method=method, cluster="dgx_h100", mesh_shape=(1,))
        report = plan_report("p", plan, step, ARGS, "dgx_h100", fidelity="analytic")
        assert report.program is not None
        rows = kernel_rows(report.program, load_cluster("dgx_h100"))["kernels"]
        return {row["flops"] / row["bytes"] for row in rows if row["kind"] == "gemm"}

    rows = 16  # of a microbatch
    product = 2 * rows * 64 * 128 / (4 * (rows * 64 + 64 * 128 + rows * 128))
    assert any(intensity == pytest.approx(product) for intensity in intensities(2))


@pytest.mark.parametrize("name", METHODS)
def test_collectives_have_the_bytes_that_the_shardings_imply(reports, name):
    plan = reports[name].plan
    planned = planned_step(step, ARGS, plan)
    expected = Counter()
    for number in range(len(plan.stages)):
        stage = single_stage(planned, number)
        counted = replay(stage)
        micro = stage.step.microbatching
        repeated = {eqn for eqn, _ in micro.body} if micro else set()
        for eqn, each in enumerate(collectives_by_equation(stage, counted)):
            for kind, num_bytes, _ in (*each.completions, *each.reshardings):
                expected[kind] += num_bytes * (plan.num_micro_batches if eqn in repeated else 1)
    for op in (op for row in reports[name].program.instructions for op in row):
        if isinstance(op, Recv) and op.gather is not None:
            expected[op.gather.kind] += op.gather.num_bytes
    [page] = data_of(reports[name])["plans"]
    rows = [row for row in page["prediction"]["collectives"] if row["kind"] != "send"]
    shown = Counter()
    for row in rows:
        shown[row["kind"]] += row["bytes"]
    assert shown == pytest.approx(expected)
    assert len(shown) > 0


def test_a_plan_alone_has_its_decisions_and_estimates(reports):
    plan = reports["shard"].plan
    page = report_page([PlanReport("saved", plan)])
    [shown] = json.loads(DATA.findall(page)[0])["plans"]
    assert shown["prediction"] is None
    assert shown["plan"]["split"] == plan.predicted_split.model_dump()
    values = {row["path"]: row for row in shown["plan"]["values"]}
    [stage] = plan.stages
    assert {v.path: v.device_bytes(stage.mesh) for v in stage.inputs} == {
        path: row["device_bytes"] for path, row in values.items()
    }
    kinds = {p.path: p.label for p in autopar.report.classify(plan).parameters}
    assert {path: row["kind"] for path, row in values.items() if row["kind"]} == kinds
    assert "Give the step" in page


def test_every_parameter_of_a_pipeline_has_its_kind(reports):
    [page] = data_of(reports["pipeline"])["plans"]
    parameters = [row for row in page["plan"]["values"] if row["role"] == "parameter"]
    assert len(parameters) == 2
    assert all(row["kind"] for row in parameters)
    assert {row["stage"] for row in parameters} == {0, 1}


def test_whatever_users_name_stays_text(reports):
    report = reports["shard"]
    plan = report.plan.model_copy(
        update={"step": HOSTILE, "warnings": (HOSTILE,), "method": HOSTILE, "cluster": HOSTILE}
    )
    hostile = replace(report, name=HOSTILE, plan=plan)
    page = report_page([hostile], [Alternative(HOSTILE, 1.0, 1.0, HOSTILE)], command=HOSTILE)
    plain = report_page([report], [Alternative("a", 1.0, 1.0, "")], command="c")
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert page.count("<script") == plain.count("<script")
    assert page.count("<!--") == plain.count("<!--")
    data = json.loads(DATA.findall(page)[0])
    assert data["plans"][0]["name"] == data["provenance"]["command"] == HOSTILE
    assert any(HOSTILE in row["path"] for row in data["plans"][0]["plan"]["values"])
    outside = unescape(DATA.sub("", page))
    assert "{{ 7*7 }}" in outside
    assert "\u2028" not in DATA.findall(page)[0]


def test_a_name_that_utf8_cannot_encode_is_written(reports, tmp_path):
    path = tmp_path / "report.html"
    save_report(path, [replace(reports["shard"], name="lone \ud800 surrogate")])
    assert "lone &#55296; surrogate" in path.read_text(encoding="utf-8")


def test_a_page_makes_no_request(reports):
    page = report_page(list(reports.values()))
    assert "default-src 'none'" in page
    addresses = set(re.findall(r"https?://[^\s\"'`<]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace
    assert not re.search(r"<link|<img|<iframe|@import|\ssrc=|fetch\(|XMLHttpRequest|import\(", page)


def test_every_table_has_a_caption_and_every_section_a_heading(reports):
    page = report_page(list(reports.values()))
    body = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert len(re.findall(r"<table", body)) == len(re.findall(r"<caption", body)) > 4
    labels = re.findall(r'<section id="(\w+)" aria-labelledby="([\w-]+)"', body)
    assert len(labels) == body.count("<section id=")
    assert all(f'id="{label}"' in body for _, label in labels)
    assert all(f'href="#{section}"' in body for section, _ in labels)


def test_pages_refuse_what_they_cannot_show(reports):
    report = reports["shard"]
    with pytest.raises(ValueError, match="expected at least one"):
        report_page([])
    with pytest.raises(ValueError, match="two plans are called 'shard'"):
        report_page([report, report])
    with pytest.raises(ValueError, match="neither a plan nor a prediction"):
        PlanReport("empty", None)
    with pytest.raises(ValueError, match="without its cluster"):
        PlanReport("empty", None, report.prediction)


def test_the_summary_names_the_cluster_of_the_prediction(reports):
    plan = reports["shard"].plan
    other = plan_report("other", plan, step, ARGS, "dgx_a100_80", fidelity="analytic")
    assert "by ShardParallel on 8 devices of dgx_a100_80." in report_page([other])
    assert "by ShardParallel on 8 devices of dgx_h100." in report_page([PlanReport("saved", plan)])


def test_a_prediction_without_a_plan_is_shown(reports):
    bare = PlanReport("by hand", None, reports["shard"].prediction, reports["shard"].cluster)
    page = report_page([bare])
    assert json.loads(DATA.findall(page)[0])["plans"][0]["plan"] is None
    assert "by hand" in page


def test_a_file_is_replaced_as_a_whole_or_not_at_all(reports, tmp_path):
    path = tmp_path / "report.html"
    path.write_text("former")
    with pytest.raises(ValueError, match="expected at least one"):
        save_report(path, [])
    assert path.read_text() == "former"
    save_report(path, [reports["shard"]])
    assert path.read_text().rstrip().endswith("</html>")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileError, match="can't be written"):
        save_report(tmp_path / "absent" / "report.html", [reports["shard"]])
    with pytest.raises(FileError, match="can't be written"):
        save_report(tmp_path, [reports["shard"]])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (1.5, "1.5 s"), (2.5e-3, "2.5 ms"), (1e-6, "1 µs"), (3e-10, "0.3 ns")],
)
def test_seconds_have_a_unit(value, text):
    assert format_seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (999, "999 B"), (1.25e9, "1.25 GB")])
def test_bytes_have_a_unit(value, text):
    assert format_bytes(value) == text
