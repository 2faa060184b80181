"""Hosts of a Ray cluster that are reserved, and the devices that each contributes."""

from typing import Any

import pytest

from autopar.hosts import reservation
from autopar.hosts.errors import HostsError
from autopar.hosts.reservation import choose_devices, reserve


def test_hosts_may_contribute_different_numbers_of_devices():
    assert choose_devices([0, 0, 0], None, (4, 2)) == [4, 2]
    assert choose_devices([8, 0, 4], 2, [2, 8]) == [2, 8]


@pytest.mark.parametrize(
    ("gpus", "num_nodes", "per_node", "error", "message"),
    [
        ([0, 0, 0], 3, (4, 2), ValueError, r"\(4, 2\) is for 2 hosts, but num_nodes=3"),
        (
            [0, 0, 0],
            None,
            (),
            ValueError,
            r"\(\), expected a number of devices, or one for each host",
        ),
        ([0, 0, 0], None, (4, 0), ValueError, r"\(4, 0\), expected a number"),
        (
            [0, 0, 0],
            None,
            (1, 1, 1, 1),
            HostsError,
            r"\[1, 1, 1, 1\] devices asked for, but .* are 3 \(none with GPUs\)",
        ),
        (
            [8, 4, 0],
            None,
            (5, 8),
            HostsError,
            r"\[5, 8\] devices asked for, but .* have \[8, 4, 0\] GPUs",
        ),
    ],
)
def test_numbers_of_devices_that_hosts_do_not_have_are_refused(
    gpus, num_nodes, per_node, error, message
):
    with pytest.raises(error, match=message):
        choose_devices(gpus, num_nodes, per_node)


@pytest.mark.parametrize("gpus", [0, 4])
def test_the_driver_leaves_the_gpus_of_a_cluster(gpus, monkeypatch):
    calls: list[bool] = []
    nodes = [{"Resources": {"CPU": 2.0, "GPU": float(gpus), "accelerator_type:A100": 1.0}}]
    monkeypatch.setattr(reservation, "alive_nodes", lambda: nodes)
    monkeypatch.setattr(reservation, "leave_gpus", lambda: calls.append(True))

    def refuse(bundles: Any, strategy: str) -> None:
        raise HostsError(f"would take {bundles}")

    monkeypatch.setattr(reservation, "placement_group", refuse)
    with pytest.raises(HostsError, match=r"would take \[\{'CPU': 1.0"):
        reserve(None, 2, 60.0)
    assert calls == [True] * bool(gpus)
