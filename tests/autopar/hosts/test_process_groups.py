"""Workers start JAX in groups, on ports that no other program takes."""

from collections.abc import Sequence

import pytest

from autopar.hosts.errors import PortTakenError
from autopar.hosts.process_groups import start_process_groups
from autopar.hosts.worker import ProcessGroup


def test_ports_that_are_always_in_use_are_an_error_after_three_attempts():
    class WorkersWithoutFreePort:
        """Workers on whose hosts another process takes every port before JAX does."""

        addresses = ("127.0.0.1",) * 2
        restarts = 0

        def free_port(self, host: int) -> int:
            return 1

        def start_jax(self, groups: Sequence[ProcessGroup | None]) -> list[str]:
            raise PortTakenError("host 0: port 1")

        def restart(self) -> None:
            self.restarts += 1

    stub = WorkersWithoutFreePort()
    with pytest.raises(PortTakenError, match="host 0: port 1"):
        start_process_groups(stub, {(0, 1)}, ports=3)
    assert stub.restarts == 2
