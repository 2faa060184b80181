"""Outcomes are counted, and faults are listed."""

import time

from tests.fuzz.outcomes import Outcomes, as_table


def test_errors_that_an_input_may_raise_are_no_faults():
    outcomes = Outcomes()

    def fail(error):
        raise error

    outcomes.add("a", lambda: "right", (ValueError,))
    outcomes.add("b", lambda: "WRONG: 1 for 2", (ValueError,))
    outcomes.add("c", lambda: fail(ValueError("devices is -1")), (ValueError,))
    outcomes.add("d", lambda: fail(ValueError()), (ValueError,))
    outcomes.add("e", lambda: fail(KeyError("x")), (ValueError,))
    outcomes.add("f", lambda: str(time.sleep(10)), (ValueError,), seconds=1)
    assert outcomes.counts == {
        "right": 1,
        "wrong": 1,
        "refused": 1,
        "empty": 1,
        "internal": 1,
        "hang": 1,
    }
    assert [fault.split(":")[0] for fault in outcomes.faults] == ["b", "d", "e", "f"]


def test_counts_are_a_table():
    lines = as_table({"files": {"accepted": 2, "refused": 1}, "steps": {"right": 30}})
    assert lines == [
        "      | accepted | refused | right | in all",
        "files |        2 |       1 |     0 |      3",
        "steps |        0 |       0 |    30 |     30",
    ]
