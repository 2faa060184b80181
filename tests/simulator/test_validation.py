import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from simulator.calibration.backends import fit_backend
from simulator.cli import app
from simulator.formula import EAGER, Backend
from simulator.validation.cases import Case, PublishedSet
from simulator.validation.published import published_sets
from simulator.validation.report import Comparison, as_json, write_report
from simulator.validation.sets.vtrain import vtrain_single_node_case, vtrain_single_node_rows
from simulator.validation.statistics import Coverage, coverage, regret, spearman, statistics

SETS = {published.name: published for published in published_sets()}


@pytest.mark.parametrize("name", [name for name, published in SETS.items() if published.target is not None])
def test_the_targets_are_met(name: str) -> None:
    comparison = Comparison.of(SETS[name])
    assert comparison.met, f"{comparison.statistics.mape:.2%} where {SETS[name].target} is aimed at"


def test_plans_are_ranked_as_they_were_measured() -> None:
    multi = Comparison.of(SETS["vtrain-multi-node"]).statistics
    assert multi.fitted == 0
    assert multi.spearman is not None
    assert multi.spearman >= 0.96
    assert multi.regret is not None
    assert multi.regret < 0.05


def test_the_hosts_times_of_the_eager_backend_come_from_40_rows() -> None:
    table = vtrain_single_node_rows()
    fitted = list(table[table.fitted].itertuples(index=False))
    assert len(fitted) == 40
    found = fit_backend(EAGER, lambda backend: [vtrain_single_node_case(row, backend) for row in fitted])
    assert found.kernel_us == pytest.approx(EAGER.kernel_us, rel=0.02)
    assert found.step_us == pytest.approx(EAGER.step_us, rel=0.2)


def test_planted_times_of_the_host_are_found_again() -> None:
    planted = Backend("planted", kernel_us=20.0, step_us=9e3, update_bytes=60.0)
    table = list(vtrain_single_node_rows().head(12).itertuples(index=False))
    exact = [vtrain_single_node_case(row, planted).predicted for row in table]

    def cases(backend: Backend) -> list[Case]:
        predicted = [vtrain_single_node_case(row, backend).predicted for row in table]
        return [Case("", want, got) for want, got in zip(exact, predicted, strict=True)]

    found = fit_backend(EAGER, cases)
    assert found.kernel_us == pytest.approx(20, rel=0.05)
    assert found.step_us == pytest.approx(9e3, rel=0.1)


def test_statistics_of_three_rows_by_hand() -> None:
    # errors +10 %, -20 %, 0; the plan predicted to be the fastest of the group is the second: 2.5 where 2 was possible
    cases = [
        Case("a", 2.0, 2.2, "group"),
        Case("b", 2.5, 2.0, "group"),
        Case("c", 4.0, 4.0, "group", fitted=True),
    ]
    found = statistics(cases)
    assert (found.count, found.fitted) == (3, 1)
    assert (found.mape, found.unseen, found.median) == pytest.approx((0.1, 0.15, 0.1))
    assert (found.largest, found.bias, found.p90) == pytest.approx((0.2, -0.1 / 3, 0.18))
    assert found.spearman == pytest.approx(0.5)
    assert found.regret == pytest.approx(0.25)


def test_the_measurements_are_in_the_interval_about_as_often_as_it_says() -> None:
    found = coverage([tuple(published.cases()) for published in SETS.values()])
    assert found is not None
    assert found.count > 500
    assert 0.7 < found.covered < 0.9
    assert 0.7 < found.held_out < 0.9


def test_coverage_of_two_sets_by_hand() -> None:
    # from 8 to 10 is as far as to the end of the interval, to 12.5 twice that; 6.4 is as far down as that end
    near = [
        Case("a", 10, 8, interval=(6.4, 10)),
        Case("b", 6.4, 8, interval=(6.4, 10)),
        Case("c", 1, 8, interval=(6.4, 10), fitted=True),
    ]
    far = [Case("d", 12.5, 8, interval=(6.4, 10))]
    # four fifths of the rows of the other set are at most as far as the far one, or as the near ones
    assert coverage([near, far, [Case("e", 1, 2)]]) == Coverage(3, pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert statistics(near).covered == 1
    assert coverage([near, [Case("e", 1, 2)]]) is None


def test_two_alternatives_are_no_choice() -> None:
    assert regret([Case("a", 1, 2, "g"), Case("b", 2, 1, "g"), Case("c", 1, 1)]) is None
    assert spearman([1, 2], [2, 1]) is None
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    with pytest.raises(ValueError, match="no cases"):
        statistics([])


@given(st.lists(st.floats(0.1, 1e3), min_size=3, max_size=20, unique=True), st.floats(0.1, 10))
def test_a_perfect_ranking_has_no_regret(measured: list[float], scale: float) -> None:
    cases = [Case("", seconds, scale * seconds, "all") for seconds in measured]
    found = statistics(cases)
    assert found.regret == 0
    assert found.spearman == pytest.approx(1)
    assert found.mape == pytest.approx(abs(scale - 1))


def test_reports_are_the_same_each_time(tmp_path: Path) -> None:
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


def test_an_unknown_set_lists_the_known_ones() -> None:
    result = CliRunner().invoke(app, ["validate", "korthikanti"])
    assert result.exit_code == 2
    assert "unknown set 'korthikanti'" in result.output
