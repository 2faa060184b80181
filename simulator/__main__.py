"""Entry point of `python -m simulator`, the subcommands of autopar that need no JAX."""

from simulator.cli import app

if __name__ == "__main__":
    app(prog_name="python -m simulator")
