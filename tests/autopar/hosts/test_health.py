"""The host that counts as hung, and the seconds until it does."""

import pytest

from autopar.hosts.health import Activity, Unresponsive, culprit, silence_seconds

WAITS = Activity(1, "recv x<0", 30.0)


@pytest.mark.parametrize(
    ("states", "awaited_hosts", "host"),
    [
        ([WAITS, Activity(1, "1F0", 3.0), Unresponsive.MUTE], [0], 2),
        ([WAITS, Unresponsive.GONE, Activity(2, "2F0", 9.0)], [0], 1),
        ([WAITS, Activity(1, "1F0", 3.0), Activity(2, "2F0", 9.0)], [0], 2),
        ([Activity(0, "0F1", 5.0), WAITS], [1], 0),
        ([None, WAITS, None], [2, 0], 2),
    ],
)
def test_the_culprit_is_a_silent_host_else_a_busy_one_else_a_late_one(states, awaited_hosts, host):
    assert culprit(states, awaited_hosts) == host


def test_an_environment_variable_sets_the_seconds_of_silence():
    assert silence_seconds({}) == 8
    assert silence_seconds({"AUTOPAR_SILENCE_SECONDS": "30"}) == 30
    for value in ("soon", "0", "nan"):
        with pytest.raises(
            ValueError, match=rf"AUTOPAR_SILENCE_SECONDS='{value}', expected a number of seconds"
        ):
            silence_seconds({"AUTOPAR_SILENCE_SECONDS": value})
