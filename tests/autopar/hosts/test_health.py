"""The host that counts as hung, and the seconds until it does."""

import pytest

from autopar.hosts.health import Activity, Unresponsive, culprit, silence_seconds

WAITS = Activity(1, "recv x<0", 30.0)


@pytest.mark.parametrize(
    ("states", "asked", "host"),
    [
        ([WAITS, Activity(1, "1F0", 3.0), Unresponsive.MUTE], [0], 2),
        ([WAITS, Unresponsive.GONE, Activity(2, "2F0", 9.0)], [0], 1),
        ([WAITS, Activity(1, "1F0", 3.0), Activity(2, "2F0", 9.0)], [0], 2),
        ([Activity(0, "0F1", 5.0), WAITS], [1], 0),
        ([None, WAITS, None], [2, 0], 2),
    ],
)
def test_a_silent_host_is_the_culprit_before_a_busy_one_and_that_before_a_late_one(
    states, asked, host
):
    assert culprit(states, asked) == host


def test_the_seconds_of_silence_may_be_set():
    assert silence_seconds({}) == 8
    assert silence_seconds({"AUTOPAR_SILENCE_SECONDS": "30"}) == 30
    for wrong in ("soon", "0", "nan"):
        with pytest.raises(
            ValueError, match=rf"AUTOPAR_SILENCE_SECONDS='{wrong}', expected a number of seconds"
        ):
            silence_seconds({"AUTOPAR_SILENCE_SECONDS": wrong})
