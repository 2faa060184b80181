"""Errors of hosts name the host and its meshes, and say what to do."""

from autopar.hosts.errors import HostLostError, HostTimeoutError


def test_the_error_of_a_lost_host_names_its_meshes_and_the_activities_of_others():
    error = HostLostError(
        1, "10.0.0.2", "it died", [1, 3], ["host 0 has been at recv x<1 of mesh 0 for 3 s"]
    )
    assert str(error) == (
        "host 1 (10.0.0.2), mesh 1 and 3 of the step, is lost: it died. "
        "Meanwhile host 0 has been at recv x<1 of mesh 0 for 3 s. "
        "Its arrays are gone; restore a checkpoint, on the hosts that remain or with the host back"
    )
    assert (error.host, error.meshes) == (1, (1, 3))
    assert str(HostLostError(1, "10.0.0.2", "it died")).startswith(
        "host 1 (10.0.0.2) is lost: it died. Its arrays"
    )


def test_the_error_of_a_hung_host_names_its_instruction():
    error = HostTimeoutError(
        0, "10.0.0.1", "is slow", [0], ["host 1 does not answer"], 0, "0F1", "Wait longer"
    )
    assert str(error) == (
        "host 0 (10.0.0.1), mesh 0 of the step, is slow. "
        "Meanwhile host 1 does not answer. Wait longer"
    )
    assert (error.host, error.meshes, error.mesh, error.instruction) == (0, (0,), 0, "0F1")
