"""The simulator's subcommands; `python -m simulator` has them alone, without JAX.

`autopar` has the same subcommands. Both report bad input in one line (`error_lines`).
"""

from simulator.cli.simulator_application import app

__all__ = ["app"]
