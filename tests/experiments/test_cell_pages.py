"""The sweep has a page of all tables and figures, and one for each cell."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import autopar
from experiments.cells import (
    Cell,
    plan_path,
    program_path,
    timeline_path,
    write_cell,
    write_job,
)
from experiments.report.cell_table import cell_table
from experiments.scripts import write_report
from experiments.sweep_job import Job
from simulator import load_cluster, prediction_of, save_program, simulate
from tests.steps import mlp_args, mlp_step

SIZES = {"dim": 16, "num_layers": 2, "batch_size": 16}
JOB = Job("simulated", "mlp", "tiny", SIZES, "p3.16xlarge", (2,), ("shard", "pmap"))
FAILED = "measured/cpu-virtual/mlp-tiny/2/shard"


def args():
    return mlp_args((16, 16), 16, 16)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Return the results of a job with two timelines and one plan, and of a job that failed."""
    results = tmp_path_factory.mktemp("sweep") / "results"
    method = autopar.DataParallel()
    plan = autopar.plan_step(
        mlp_step, args(), method=method, cluster="p3.16xlarge", mesh_shape=(2,)
    )
    program = autopar.compile_step(mlp_step, args(), plan, "p3.16xlarge", fidelity="analytic")
    cluster = load_cluster("p3.16xlarge")
    prediction = prediction_of(simulate(program, cluster), cluster)
    assert prediction.timeline is not None
    directory = results / "cells" / JOB.name
    write_job(directory, JOB)
    plan.save(plan_path(directory, "shard"))
    save_program(program, program_path(directory, "shard"))
    for strategy in JOB.strategies:
        prediction.timeline.save_chrome_trace(timeline_path(directory, strategy))
        write_cell(JOB, directory, strategy, Cell(step_time_s=prediction.seconds))
    failed = replace(JOB, source="measured", cluster="cpu-virtual", strategies=("shard",))
    other = results / "cells" / failed.name
    write_job(other, failed)
    write_cell(failed, other, "shard", Cell("failed", "it failed"))
    (results / "tables").mkdir()
    cell_table([directory, other], []).to_csv(results / "tables" / "cells.csv", index=False)
    (results / "tables" / "mixed.csv").write_text("name,value\n<b>,1.5\nc,\n")
    (results / "figures").mkdir()
    (results / "figures" / "mlp.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    write_report.main(str(results), str(directory), str(other))
    return results


def test_the_index_links_to_the_page_of_each_cell(results):
    index = (results / "report" / "index.html").read_text()
    links = re.findall(r'<a href="(cells/[^"]+)">', index)
    cells = [f"{JOB.name}/{strategy}" for strategy in JOB.strategies] + [FAILED]
    assert links == [f"cells/{cell}.html" for cell in cells]
    failed = (results / "report" / links[-1]).read_text()
    assert "it failed" in failed
    assert "has no plan and no prediction" in failed
    assert all((results / "report" / link).is_file() for link in links)
    assert "Tables: 2, figures: 1, cells with a report: 3." in index
    assert "&lt;b&gt;" in index
    assert "data:image/svg+xml;base64" in index
    assert len(list((results / "report").rglob("*.html"))) == 4


def test_the_page_of_a_cell_has_its_plan_and_the_prediction_of_its_timeline(results):
    folder = results / "report" / "cells" / JOB.name
    pages = {}
    for strategy in JOB.strategies:
        text = (folder / f"{strategy}.html").read_text()
        [block] = re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)
        [pages[strategy]] = json.loads(block)["plans"]
    plan = autopar.Plan.load(plan_path(results / "cells" / JOB.name, "shard"))
    assert pages["shard"]["plan"]["fingerprint"] == plan.fingerprint
    assert pages["pmap"]["plan"] is None
    prediction = autopar.predict(mlp_step, args(), plan, "p3.16xlarge", fidelity="analytic")
    for page in pages.values():
        row = page["prediction"]["row"]
        assert row["seconds"] == pytest.approx(prediction.seconds)
        assert row["backward"] == pytest.approx(prediction.backward)
        assert page["memory"] == prediction.memory.parts
        assert page["prediction"]["cluster"] == load_cluster("p3.16xlarge").name
    assert pages["pmap"]["prediction"]["kernels"] is None
    assert pages["shard"]["prediction"]["kernels"]["kernels"]
    rows = pages["shard"]["prediction"]["collectives"]
    assert any(row["bytes"] for row in rows)


def test_an_empty_folder_of_results_has_a_page(tmp_path):
    write_report.main(str(tmp_path))
    assert (
        "Tables: 0, figures: 0, cells with a report: 0."
        in (tmp_path / "report" / "index.html").read_text()
    )
