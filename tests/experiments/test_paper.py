"""The paper's figures, comparisons, published numbers and text."""

import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import matplotlib as mpl
import pandas as pd
import pytest

from experiments.models.wide_resnet import BLOCKS
from experiments.paper import draw_figure, paper_cell, published_values, wide_resnet_steps
from experiments.paper.comparison import agreement
from experiments.paper.compute_rows import write_part
from experiments.paper.figure_files import (
    SUFFIXES,
    TEXT,
    TEXT_FILES,
    TRACKED,
    changed_files,
    mark_changed,
    paths_of,
    write_record,
)
from experiments.paper.figures import (
    alpa_inter_operator,
    alpa_resharding,
    planning_parts,
    resnet_plans,
)
from experiments.paper.paper_style import (
    COLUMN_WIDTH,
    draw_bars,
    draw_lines,
    new_figure,
    paper_style,
    save_figure,
)
from experiments.paper.published_values import Claim, check_published, checked_claims, claims_of
from experiments.paper.study import FIGURES, PaperFigure, figure_named
from experiments.paper.write_paper import text_numbers
from experiments.sources import ROOT
from simulator import Program, Recv, Send
from simulator.work import Collective

RESULTS = ROOT / "results/paper"

TABLE = pd.DataFrame(
    {
        "part": "all",
        "status": ["ok", "ok", "ok", "failed"],
        "group": ["a", "a", "a", None],
        "series": ["x", "y", "z", None],
        "unit": ["s", "s", "s", None],
        "published": [1.0, 2.0, None, None],
        "ours": [1.5, 1.0, 3.0, None],
        "published_fits": [None, True, False, None],
        "fits": [None, False, False, None],
        "reason": ["", "", "", "ValueError: no"],
    }
)


def test_an_agreement_counts_deviations_orders_memory_and_claims() -> None:
    claims = {Claim("one", "f", "d", "w"): True, Claim("two", "f", "d", "w"): False}
    result = agreement("f", TABLE, claims)
    assert (result.rows, result.failed, result.compared) == (3, 1, 2)
    assert result.mean_deviation == pytest.approx((0.5 + 0.5) / 2)
    assert (result.pairs, result.pairs_kept) == (1, 0)
    assert (result.memory_rows, result.memory_agrees) == (2, 1)
    assert (result.claims, result.claims_kept) == (2, 1)


def test_alternatives_that_hardly_differ_have_no_order() -> None:
    table = TABLE.assign(published=[1.0, 1.01, None, None])
    assert agreement("f", table, {}).pairs == 0


def test_a_table_without_published_numbers_has_no_deviation() -> None:
    table = TABLE[["part", "status", "ours"]]
    result = agreement("f", table, {})
    assert (result.compared, result.mean_deviation, result.pairs) == (0, None, 0)


def published_file(root: Path, text: str) -> PaperFigure:
    """Write a file of published numbers below a root, and return a figure that reads it."""
    path = root / "experiments/paper/published/numbers.csv"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return PaperFigure("f", "s", published=("experiments/paper/published/numbers.csv",))


HEADINGS = "# source: a paper\n# page: 1\n# read: from the text\n"


def test_a_missing_published_value_is_named(tmp_path: Path) -> None:
    figure = published_file(tmp_path, HEADINGS + "gpus,seconds\n8,1.5\n16,\n")
    with pytest.raises(ValueError, match=r"numbers\.csv, row 2, column seconds: no value"):
        check_published([figure], tmp_path)


def test_a_row_of_published_values_with_another_length_is_named(tmp_path: Path) -> None:
    figure = published_file(tmp_path, HEADINGS + "gpus,seconds\n8,1.5\n16\n")
    with pytest.raises(ValueError, match=r"numbers\.csv, row 2: 1 values; expected 2, of"):
        check_published([figure], tmp_path)


def test_a_published_value_with_a_typing_error_is_named(tmp_path: Path) -> None:
    figure = published_file(tmp_path, HEADINGS + "gpus,seconds\n8,1.5\n16,-\n32,2.o\n64,3\n")
    with pytest.raises(ValueError, match=r"row 3, column seconds: '2\.o'; expected a number"):
        check_published([figure], tmp_path)


def test_a_missing_value_of_the_simulators_published_numbers_is_named(tmp_path: Path) -> None:
    path = tmp_path / "simulator/validation/data/published/numbers.csv"
    path.parent.mkdir(parents=True)
    path.write_text("gpus,seconds\n8,1.5\n16,\n")
    figure = PaperFigure("f", "s", published=(str(path.relative_to(tmp_path)),))
    with pytest.raises(ValueError, match=r"numbers\.csv, row 2, column seconds: no value"):
        check_published([figure], tmp_path)


def test_a_missing_factor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factors = published_values.FOLDER / "alpa_factors.csv"
    lines = factors.read_text().splitlines(keepends=True)
    (tmp_path / "alpa_factors.csv").write_text("".join(lines[:-1]))
    monkeypatch.setattr(published_values, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"alpa_factors\.csv, column name: 'local_all_gather'"):
        published_values._check_factors(tmp_path / "alpa_factors.csv")


def test_a_value_that_the_document_lacks_is_a_dash(tmp_path: Path) -> None:
    figure = published_file(tmp_path, HEADINGS + "gpus,seconds\n16,-\n")
    record_digests(tmp_path, figure)
    check_published([figure], tmp_path)


def record_digests(root: Path, figure: PaperFigure) -> None:
    lines = [
        f"{hashlib.sha256((root / file).read_bytes()).hexdigest()}  {file}\n"
        for file in figure.published
    ]
    (root / published_values.DIGESTS).write_text("".join(lines))


def test_a_published_row_that_was_removed_is_noticed(tmp_path: Path) -> None:
    figure = published_file(tmp_path, HEADINGS + "gpus,seconds\n8,1.5\n16,2.5\n")
    record_digests(tmp_path, figure)
    (file,) = figure.published
    (tmp_path / file).write_text(HEADINGS + "gpus,seconds\n8,1.5\n")
    with pytest.raises(ValueError, match=r"numbers\.csv: its digest is not .* restore the file"):
        check_published([figure], tmp_path)


def test_a_file_of_published_numbers_says_where_they_are_from(tmp_path: Path) -> None:
    figure = published_file(tmp_path, "# source: a paper\ngpus\n8\n")
    with pytest.raises(ValueError, match=r"line 2: expected it to start with '# page: '"):
        check_published([figure], tmp_path)


def test_a_missing_file_of_published_numbers_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*nowhere\.csv"):
        check_published([PaperFigure("f", "s", published=("nowhere.csv",))], tmp_path)


def test_published_files_are_complete_and_claims_belong_to_figures() -> None:
    check_published()
    claims = pd.read_csv(ROOT / "experiments/paper/published/claims.csv", comment="#")
    assert set(claims["figure"]) <= {figure.name for figure in FIGURES}
    assert claims["name"].is_unique


def test_a_claim_that_a_module_does_not_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = figure_named("korthikanti_memory")
    assert claims_of(figure.name)
    monkeypatch.setattr(figure.module, "claims", lambda table: {})
    with pytest.raises(ValueError, match="claim 'korthikanti_fifth' of korthikanti_memory"):
        checked_claims(figure, TABLE[:3])
    assert checked_claims(figure, TABLE) == {}  # a part failed


def test_an_unknown_figure_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="no figure 'figure_9'; expected one of predicted_mea"):
        figure_named("figure_9")


def test_a_figure_goes_from_its_cell_to_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part that fails is named in the caption, and the figure is drawn from the others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    figure = figure_named("korthikanti_memory")
    figure.module.rows("all", True).assign(part="all", status="ok", reason="").to_csv("a.csv")
    paper_cell.main("no_such_figure", "odd", "smoke", "b.csv")
    assert "FAILED ValueError: no figure 'no_such_figure'" in capsys.readouterr().out
    with mpl.rc_context():
        draw_figure.main(figure.name, ".", "code", "a.csv", "b.csv")
    assert Path("korthikanti_memory.txt").read_text().strip().endswith("Parts that failed: odd.")
    assert all(path.exists() for path in paths_of(Path(), figure.name))
    assert changed_files(Path(), figure.name) == []

    again = {suffix: Path(f"{figure.name}{suffix}").read_bytes() for suffix in SUFFIXES}
    draw_figure.main(figure.name, ".", "code", "a.csv", "b.csv")
    assert again == {suffix: Path(f"{figure.name}{suffix}").read_bytes() for suffix in SUFFIXES}

    marker = Path("markers") / figure.name
    assert mark_changed(Path(), Path("markers"), [figure]) == []
    assert marker.read_text() == ""
    csv = Path(f"{figure.name}.csv")
    csv.write_text(csv.read_text().replace("59.25", "60.25"))
    assert mark_changed(Path(), Path("markers"), [figure]) == [csv]
    assert marker.read_text() != ""
    Path(f"{figure.name}.json").write_text("[]")
    assert mark_changed(Path(), Path("markers"), [figure]) == [Path(f"{figure.name}.json")]


def test_rows_that_failed_or_were_changed_by_hand_are_computed_again(tmp_path: Path) -> None:
    figure = figure_named("korthikanti_memory")
    folder, markers = tmp_path / "cells" / figure.name, tmp_path / "markers"
    rows = pd.DataFrame([{"part": "all", "ours": 1.5, "status": "ok", "reason": ""}])
    good, changed, failed = (folder / f"{name}.csv" for name in ("good", "changed", "failed"))
    for part in (good, changed):
        write_part(rows, part)
    assert mark_changed(tmp_path, markers, [figure]) == []
    assert (markers / figure.name).read_text() == ""
    write_part(rows.assign(status="failed", reason="a, b"), failed)
    changed.write_text(changed.read_text().replace("1.5", "2.5"))
    assert mark_changed(tmp_path, markers, [figure], remove=False) == [changed]
    assert (markers / figure.name).read_text() != ""
    assert failed.exists()
    assert mark_changed(tmp_path, markers, [figure]) == [changed]
    assert list(folder.glob("*.csv")) == [good]


def test_a_file_made_from_all_figures_that_was_changed_by_hand_is_found(tmp_path: Path) -> None:
    for name in TEXT_FILES:
        (tmp_path / name).write_text("as written")
    write_record(tmp_path, TEXT, "code")
    assert mark_changed(tmp_path, tmp_path / "markers", []) == []
    (tmp_path / "summary.csv").write_text("by hand")
    assert mark_changed(tmp_path, tmp_path / "markers", []) == [tmp_path / "summary.csv"]


def test_drawings_have_a_columns_width_and_embedded_fonts(tmp_path: Path) -> None:
    with paper_style():
        figure = new_figure()
        bars, lines = figure.subplots(1, 2)
        draw_bars(bars, TABLE[:3])
        draw_lines(lines, TABLE[:3].assign(x=[1, 2, 3]), "x", "ours")
        lines.set_xlabel("size")
        save_figure(figure, tmp_path / "f")
    svg, pdf = (tmp_path / "f.svg").read_text(), (tmp_path / "f.pdf").read_bytes()
    width = re.search(r'<svg [^>]*width="([\d.]+)pt"', svg)
    assert width
    assert float(width[1]) == pytest.approx(72 * COLUMN_WIDTH, abs=0.1)
    assert "<text" not in svg  # glyphs are outlines
    assert b"/FontFile2" in pdf  # TrueType, embedded
    assert b"Type3" not in pdf


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_tracked_files_are_as_they_were_written(figure: PaperFigure) -> None:
    assert all((RESULTS / f"{figure.name}{suffix}").exists() for suffix in TRACKED)
    assert [path for path in changed_files(RESULTS, figure.name) if path.suffix in TRACKED] == []


def test_the_tracked_summary_and_numbers_are_those_of_the_tracked_rows() -> None:
    tables = {figure.name: pd.read_csv(RESULTS / f"{figure.name}.csv") for figure in FIGURES}
    claims = {figure.name: checked_claims(figure, tables[figure.name]) for figure in FIGURES}
    agreements = [agreement(name, table, claims[name]) for name, table in tables.items()]
    summary = pd.DataFrame(one.as_row() for one in agreements)
    pd.testing.assert_frame_equal(
        summary, pd.read_csv(RESULTS / "summary.csv"), check_dtype=False, rtol=1e-4
    )
    good = {name: table[table["status"] == "ok"] for name, table in tables.items()}
    numbers = json.loads((RESULTS / "numbers.json").read_text())
    assert text_numbers(agreements, good, claims) == numbers


def test_no_number_of_the_text_is_typed_by_hand() -> None:
    source = (ROOT / "experiments/paper/paper.typ").read_text()
    prose = [
        line
        for line in source[source.index("*Abstract.*") :].splitlines()
        if not re.match(r"\s|#(plot|let|figure)|=|//|\)", line)
    ]
    text = re.sub(r"#n\([^)]*\)|@\w+|#text\([^)]*\)", "", "\n".join(prose))
    assert re.findall(r".*\d.*", text) == []
    assert len(text) > 500


def test_every_figure_is_in_the_text() -> None:
    source = (ROOT / "experiments/paper/paper.typ").read_text()
    assert re.findall(r'#plot\("(\w+)"\)', source) == [figure.name for figure in FIGURES]


def test_every_module_of_a_figure_is_in_the_study() -> None:
    shown = {path.stem for path in (ROOT / "experiments/paper/figures").glob("[!_]*.py")}
    assert shown == {figure.name for figure in FIGURES}


def test_a_job_asks_a_cluster_for_gpus_only_if_it_needs_some() -> None:
    """Executors for clusters reserve a host with GPUs for a job that has the resource at all."""
    assert PaperFigure("f", "s", minutes=1, memory_mb=5).resources == {"runtime": 4, "mem_mb": 5}
    assert PaperFigure("f", "s", gpus=8).resources["gpu"] == 8


def test_flop_of_convolutions_are_those_that_xla_counts() -> None:
    """XLA leaves out what a convolution multiplies with its padding."""
    model = replace(wide_resnet_steps.SMOKE.model, image_size=64)
    arguments: Any = model.abstract_args()
    state, batch = arguments

    def forward(params: Any, statistics: Any, images: Any) -> Any:
        return state.apply_fn({"params": params, "batch_stats": statistics}, images)

    lowered = jax.jit(forward).lower(state.params, state.batch_stats, batch["images"])
    costs: Any = lowered.compile().cost_analysis()
    assert wide_resnet_steps.convolution_flops(model) == pytest.approx(3 * costs["flops"], rel=0.1)


def test_published_plans_of_wide_resnet_use_all_gpus_and_blocks() -> None:
    for gpus, plan in wide_resnet_steps.alpa_plans().items():
        assert sum(plan.devices) == math.prod(plan.intra_mesh) == gpus
        assert sum(plan.blocks) == sum(BLOCKS[plan.model.num_layers])
        assert plan.model.batch_size % plan.micro_batches == 0
        assert plan.model.batch_size % plan.intra_images == 0


def test_without_all_gathers_every_receiver_is_sent_its_own_copy() -> None:
    groups = ((0, 1), (2, 3))
    gather = Collective("gather x", "all_gather", 8.0, groups)
    program = Program(
        ((0, 1), (2, 3, 4, 5)),
        ((Send("x", 1, 10), Send("y", 1, 6)), (Recv("x", 0, gather), Recv("y", 0))),
    )
    copied = alpa_resharding._copied(program)
    assert copied.instructions == (
        (Send("x", 1, 20), Send("y", 1, 6)),
        (Recv("x", 0), Recv("y", 0)),
    )
    signalled = alpa_resharding._signalled(program)
    assert signalled.instructions[0] == (Send("x", 1, 4), Send("y", 1, 4))


def test_convolutions_of_data_parallel_stages_are_divided_by_the_batch() -> None:
    plan = wide_resnet_steps.plan_wide_resnet(
        wide_resnet_steps.SMOKE, wide_resnet_steps.SMOKE.stages, data_parallel=True
    )
    for stage in plan.stages:
        assert resnet_plans._divided(stage)["batch"] == 1.0


def rates(family: str, *values: float | None) -> list[dict[str, Any]]:
    """Return rows of rates of the kinds of stages for a family on 32 GPUs."""
    return [
        {
            "family": family,
            "group": 32,
            "series": series,
            "unit": "PFLOP/s",
            "ours": value,
            "fits": value is not None,
        }
        for series, value in zip(alpa_inter_operator.ORDER, values, strict=True)
    ]


def test_the_dynamic_program_gains_over_stages_that_do_not_fit() -> None:
    table = pd.DataFrame([*rates("gpt", 2.0, 2.0, 2.0), *rates("wide_resnet", None, 1.0, 1.5)])
    gains = alpa_inter_operator._gains(table, "wide_resnet").loc[32]
    assert list(gains) == [math.inf, 1.5]
    assert alpa_inter_operator.claims(table) == {
        "alpa_program_beats_operators": True,
        "alpa_layers_match_on_gpt": True,
        "alpa_layers_slower_on_wide_resnet": True,
    }
    slower = pd.DataFrame([*rates("gpt", 2.0, 1.0, 2.0), *rates("wide_resnet", 2.0, 1.5, 1.5)])
    assert set(alpa_inter_operator.claims(slower).values()) == {False}
    assert "the only one that fits, beside equal operators" in alpa_inter_operator.caption(table)


def test_stages_that_were_not_found_in_time_have_no_factor() -> None:
    table = pd.DataFrame([*rates("gpt", 2.0, 2.0, 2.0), *rates("wide_resnet", None, 1.0, 1.5)])
    table["fits"] = table["fits"].mask(table["ours"].isna())
    assert math.isnan(alpa_inter_operator._gains(table, "wide_resnet").loc[32].iloc[0])
    assert not alpa_inter_operator.claims(table)["alpa_program_beats_operators"]
    assert "time limit: equal operators of Wide-ResNet on 32." in alpa_inter_operator.caption(table)


def test_layers_of_equal_operators_have_as_many_of_them() -> None:
    """Layers of equal FLOP have three and seven of the ten kernels."""
    model = wide_resnet_steps.SMOKE
    plan = wide_resnet_steps.plan_wide_resnet(model, model.stages, work="count")
    kernels = [
        [value for value in stage.inputs if re.fullmatch(r"0/params/.*kernel", value.path)]
        for stage in plan.stages
    ]
    assert list(map(len, kernels)) == [5, 5]


def code_in(path: str, name: str, body: str) -> Callable[[Callable[[], Any]], Any]:
    """Return a function of one argument, `call`, that looks as if it were in a file of autopar."""
    space: dict[str, Any] = {}
    exec(compile(f"def {name}(call):\n    {body}", f"/tree/autopar/{path}", "exec"), space)
    return space[name]


def test_time_of_planning_belongs_to_the_part_of_the_functions_that_it_is_spent_in() -> None:
    search = code_in("planning/stage_dp.py", "search", "return call()")
    solve = code_in("planning/stage_costs.py", "solve", "return call()")
    traced = code_in("tracing/trace.py", "traced", "return call()")
    other = code_in("planning/plan_step.py", "other", "return call()")
    part = planning_parts.part_of

    def here() -> str:
        return part(sys._getframe())

    assert here() == planning_parts.REST
    assert other(here) == planning_parts.REST
    assert other(lambda: traced(here)) == planning_parts.TRACING
    assert search(here) == planning_parts.PROGRAM
    assert search(lambda: solve(here)) == planning_parts.COSTS

    def work(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    def run() -> None:
        search(lambda: work(0.1))
        solve(lambda: work(0.3))

    seconds = planning_parts.sampled_seconds(run)
    assert sum(seconds.values()) == pytest.approx(0.4, rel=0.3)
    assert seconds[planning_parts.COSTS] > 2 * seconds[planning_parts.PROGRAM] > 0.1


def test_modules_of_the_parts_of_planning_exist() -> None:
    modules = [module for part in planning_parts.MODULES.values() for module in part]
    assert [module for module in modules if not (ROOT / "autopar" / module).exists()] == []
