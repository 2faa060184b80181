"""Published step times: statistics of errors, held-out rows and reports."""

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from simulator.cli import app
from simulator.transformer import EAGER, Backend
from simulator.validation.cases import Case, Outcome, PublishedSet
from simulator.validation.fit_backends import fit_backend, fit_eager
from simulator.validation.published import PUBLISHED_SETS
from simulator.validation.report import Comparison, as_json, write_report
from simulator.validation.sets.published_rows import PUBLISHED
from simulator.validation.sets.steps import STEP_SETS
from simulator.validation.sets.vtrain import vtrain_single_node_case, vtrain_single_node_rows
from simulator.validation.statistics import (
    Coverage,
    OutOfMemory,
    coverage,
    out_of_memory,
    regret,
    spearman,
    statistics,
)

ROOT = Path(__file__).parents[2]
SETS = {published.name: published for published in PUBLISHED_SETS}
RECORDED = pd.read_csv(ROOT / "results/validation/summary.csv", index_col="set")


@pytest.mark.parametrize(
    "name", [name for name, published in SETS.items() if published.target is not None]
)
def test_the_error_on_published_sets_meets_its_target(name: str) -> None:
    comparison = Comparison.of(SETS[name])
    assert comparison.met, f"{comparison.statistics.mape:.2%} where {SETS[name].target} is aimed at"


def test_the_tables_of_results_have_every_set() -> None:
    assert [*RECORDED.index] == list(SETS)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED.index)
def test_the_tables_of_results_have_the_present_errors(name: str) -> None:
    """After a change of predictions, `autopar validate` writes the tables again."""
    numbers = Comparison.of(SETS[name]).statistics
    assert RECORDED["count"][name] == numbers.count
    assert RECORDED["mape"][name] == pytest.approx(numbers.mape, abs=1e-3)


def test_predicted_and_measured_rankings_of_plans_agree() -> None:
    multi = Comparison.of(SETS["vtrain-multi-node"]).statistics
    assert multi.fitted == 0
    assert multi.spearman is not None
    assert multi.spearman >= 0.96
    assert multi.regret is not None
    assert multi.regret < 0.05


def test_the_eager_backend_is_the_fit_to_40_rows() -> None:
    assert vtrain_single_node_rows().fitted.sum() == 40
    fitted = fit_eager()
    assert fitted.kernel_us == pytest.approx(EAGER.kernel_us, rel=0.02)
    assert fitted.step_us == pytest.approx(EAGER.step_us, rel=0.2)


def test_the_fit_of_a_backend_recovers_planted_parameters() -> None:
    planted = Backend("planted", kernel_us=20.0, step_us=9e3, update_bytes=60.0)
    table = list(vtrain_single_node_rows().head(12).itertuples(index=False))
    exact = [vtrain_single_node_case(row, planted).predicted for row in table]

    def cases(backend: Backend) -> list[Case]:
        predicted = [vtrain_single_node_case(row, backend).predicted for row in table]
        return [Case("", want, got) for want, got in zip(exact, predicted, strict=True)]

    fitted = fit_backend(EAGER, cases)
    assert fitted.kernel_us == pytest.approx(20, rel=0.05)
    assert fitted.step_us == pytest.approx(9e3, rel=0.1)


def test_statistics_of_three_rows_equal_values_by_hand() -> None:
    # Errors are +10 %, -20 % and 0. The plan that is predicted to be the fastest of its group takes
    # 2.5, where 2 was possible.
    cases = [
        Case("a", 2.0, 2.2, "group"),
        Case("b", 2.5, 2.0, "group"),
        Case("c", 4.0, 4.0, "group", fitted=True),
    ]
    summary = statistics(cases)
    assert (summary.count, summary.fitted) == (3, 1)
    assert (summary.mape, summary.unseen, summary.median) == pytest.approx((0.1, 0.15, 0.1))
    assert (summary.largest, summary.bias, summary.p90) == pytest.approx((0.2, -0.1 / 3, 0.18))
    assert summary.spearman == pytest.approx(0.5)
    assert summary.regret == pytest.approx(0.25)


def test_prediction_intervals_cover_about_80_percent_of_measurements() -> None:
    compared = [published for published in SETS.values() if published not in STEP_SETS]
    coverage_of_sets = coverage([Comparison.of(published).cases for published in compared])
    assert coverage_of_sets is not None
    assert coverage_of_sets.count > 500
    assert 0.7 < coverage_of_sets.covered < 0.9
    assert 0.7 < coverage_of_sets.held_out < 0.9


def test_the_coverage_of_two_sets_equals_values_by_hand() -> None:
    # On a log scale, the interval ends as far below 8 as above it, and 12.5 is twice as far.
    near = [
        Case("a", 10, 8, interval=(6.4, 10)),
        Case("b", 6.4, 8, interval=(6.4, 10)),
        Case("c", 1, 8, interval=(6.4, 10), fitted=True),
    ]
    far = [Case("d", 12.5, 8, interval=(6.4, 10))]
    # each set's interval has the width that covers four fifths of the other set's rows
    assert coverage([near, far, [Case("e", 1, 2)]]) == Coverage(
        3, pytest.approx(2 / 3), pytest.approx(2 / 3)
    )
    assert statistics(near).covered == 1
    assert coverage([near, [Case("e", 1, 2)]]) is None


def test_statistics_of_outcomes_equal_values_by_hand() -> None:
    outcomes = [
        # the fastest that is predicted to fit takes 12 where 10 was possible
        Outcome("a", True, True, 1.0, 12.0, "one"),
        Outcome("b", True, True, 2.0, 10.0, "one"),
        Outcome("c", False, False, 0.5, None, "one"),
        # the choice runs out of memory
        Outcome("d", False, True, 1.0, None, "two"),
        Outcome("e", True, False, 2.0, 10.0, "two"),
        # nothing ran
        Outcome("f", False, False, 2.0, None, "three"),
    ]
    summary = out_of_memory(outcomes)
    assert summary == OutOfMemory(
        hits=2,
        false_alarms=1,
        misses=1,
        correct_fits=2,
        groups=2,
        regret=pytest.approx(0.2),
        failed_choices=1,
    )
    assert summary is not None
    assert (summary.accuracy, summary.precision, summary.recall) == pytest.approx(
        (4 / 6, 2 / 3, 2 / 3)
    )
    assert out_of_memory([]) is None


def test_rankings_of_fewer_than_three_alternatives_have_no_statistics() -> None:
    assert regret([Case("a", 1, 2, "g"), Case("b", 2, 1, "g"), Case("c", 1, 1)]) is None
    assert spearman([1, 2], [2, 1]) is None
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    with pytest.raises(ValueError, match="no cases"):
        statistics([])


@given(st.lists(st.integers(1, 10**6), min_size=3, max_size=20, unique=True), st.floats(0.1, 10))
def test_a_perfect_ranking_has_no_regret(measured: list[int], scale: float) -> None:
    cases = [Case("", seconds, scale * seconds, "all") for seconds in measured]
    summary = statistics(cases)
    assert summary.regret == 0
    assert summary.spearman == pytest.approx(1)
    assert summary.mape == pytest.approx(abs(scale - 1))


def test_reports_are_reproducible(tmp_path: Path) -> None:
    comparison = Comparison.of(
        PublishedSet("toy", "Toy", "s", "made up", lambda: [Case("a", 1, 1.1), Case("b", 2, 1.9)])
    )
    first = {path.name: path.read_bytes() for path in write_report([comparison], tmp_path / "one")}
    second = {path.name: path.read_bytes() for path in write_report([comparison], tmp_path / "two")}
    assert first == second
    assert set(first) == {"summary.csv", "cases.csv", "scatter.svg", "errors.svg"}
    assert first["cases.csv"].decode().splitlines()[1] == "toy,a,s,1,1.1,0.1,False"
    assert as_json([comparison])[0]["mape"] == pytest.approx(0.075)


def test_the_command_line_prints_a_table_or_json(tmp_path: Path) -> None:
    run = CliRunner().invoke
    table = run(app, ["validate", "korthikanti-table5", "--output", str(tmp_path), "--worst", "1"])
    assert table.exit_code == 0
    assert "korthikanti-table5" in table.stdout
    assert "530B full" in table.stdout
    assert (tmp_path / "summary.csv").exists()
    data = run(app, ["validate", "korthikanti-table5", "--json", "--no-write"])
    (only,) = json.loads(data.stdout)
    assert only["met"] is True
    assert len(only["cases"]) == only["count"]


def write_edited(folder: Path, name: str, edit: Callable[[pd.DataFrame], pd.DataFrame]) -> Path:
    """Return a folder with an edited published table."""
    folder.mkdir(exist_ok=True)
    edit(pd.read_csv(PUBLISHED / f"{name}.csv")).to_csv(folder / f"{name}.csv", index=False)
    return folder


def validate(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["validate", *map(str, args)], env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    return result.stdout if not code else " ".join(result.output.split())


def test_rows_of_a_user_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_edited(
        tmp_path / "mine",
        "vtrain_multi_node",
        lambda rows: rows.head(5).assign(**{rows.columns[-1]: 1e3}),
    )
    write_edited(
        folder, "korthikanti_table5", lambda rows: rows.head(1)[list(reversed(rows.columns))]
    )
    sets = json.loads(validate("--data", folder, "--json", code=1))
    assert {row_set["name"]: row_set["count"] for row_set in sets} == {
        "korthikanti-table5": 2,
        "vtrain-multi-node": 5,
    }
    assert [case["measured"] for case in sets[1]["cases"]] == [1.0] * 5
    shipped = Comparison.of(SETS["korthikanti-table5"])
    assert sets[0]["cases"][0]["predicted"] == shipped.cases[0].predicted
    assert not (tmp_path / "results").exists()


def test_only_rows_of_the_fit_count_as_fitted(tmp_path: Path) -> None:
    folder = write_edited(tmp_path, "vtrain_single_node", lambda rows: rows.head(60))
    rows = vtrain_single_node_rows()
    assert vtrain_single_node_rows(folder).fitted.sum() == rows.fitted.head(60).sum() < 40
    write_edited(
        tmp_path, "vtrain_single_node", lambda rows: rows.head(60).assign(**{"global batch": 4096})
    )
    assert not vtrain_single_node_rows(folder).fitted.any()
    write_edited(
        tmp_path,
        "megatron_sc21_table2",
        lambda rows: rows.assign(derived_iter_s=2 * rows.derived_iter_s),
    )
    assert Comparison.of(SETS["sc21-zero3"], tmp_path).statistics.fitted == 0
    assert {
        name: Comparison.of(SETS[name]).statistics.fitted for name in ("sc21-zero3", "llm-foundry")
    } == {
        "sc21-zero3": 2,
        "llm-foundry": 2,
    }


def test_rows_without_a_feasible_plan_are_counted_and_named(tmp_path: Path) -> None:
    one, two = (lambda rows: rows.assign(pp=1).head(2), lambda rows: rows.tail(1))
    huge = write_edited(
        tmp_path / "mine",
        "megatron_sc21_table1",
        lambda rows: pd.concat(
            [one(rows).assign(tp=1, dp=rows.gpus, hidden=24576, layers=999), two(rows)]
        ),
    )
    comparison = Comparison.of(SETS["sc21-ptd"], huge)
    assert (comparison.statistics.count, comparison.statistics.unpredicted) == (1, 2)
    assert [row.name for row in comparison.unpredicted] == ["1.7B on 32", "7.5B on 128"]
    assert as_json([comparison])[0]["unpredicted"] == 2
    table = validate("sc21-ptd", "--data", huge)
    assert (
        "sc21-ptd: 2 not predicted, as no microbatch and interleave divides the model "
        "and fits in memory: 1.7B on 32, 7.5B on 128" in table
    )


def test_simumax_models_with_experts_are_predicted_and_unknown_ones_named(tmp_path: Path) -> None:
    shipped = Comparison.of(SETS["simumax-memory"])
    with_experts = [case for case in shipped.cases if case.name.startswith("deepseek")]
    assert (len(with_experts), shipped.statistics.unpredicted) == (6, 0)
    assert max(abs(case.error) for case in with_experts) < 0.01
    folder = write_edited(
        tmp_path,
        "simumax_b200",
        lambda rows: rows.head(2).assign(case=["qwen3_l4_tp1", rows.case[1]]),
    )
    unknown = Comparison.of(SETS["simumax-time"], folder).unpredicted
    assert [row.why for row in unknown] == [
        "sizes are known of llama3_70b, llama3_405b, deepseekv2, deepseekv3"
    ]


def test_rows_that_can_not_be_compared_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no rows to compare; expected some of korthikanti_table5.csv, " in validate(
        "--data", tmp_path / "empty", code=2
    )
    folder_without_column = write_edited(
        tmp_path / "less", "korthikanti_table5", lambda rows: rows.drop(columns="mbs")
    )
    assert "korthikanti_table5.csv: no column 'mbs'; expected model, heads" in validate(
        "--data", folder_without_column, code=2
    )
    folder_of_unknown_model = write_edited(
        tmp_path / "other", "korthikanti_table5", lambda rows: rows.assign(model="3B")
    )
    assert (
        "korthikanti-table5: unknown model '3B' in the table; expected one of 22B, 175B"
        in validate("--data", folder_of_unknown_model, code=2)
    )
    folder_of_one_set = write_edited(
        tmp_path / "only", "megatron_sc21_table2", lambda rows: rows[rows.scheme == "ZeRO-3"]
    )
    assert [
        row_set["name"] for row_set in json.loads(validate("--data", folder_of_one_set, "--json"))
    ] == ["sc21-zero3"]


def test_an_unknown_set_is_refused() -> None:
    result = CliRunner().invoke(app, ["validate", "korthikanti"])
    assert result.exit_code == 2
    assert "unknown set 'korthikanti'" in result.output
