"""The command line `autopar`: its subcommands have the names of the functions that they call.

Input that can't be used is reported in one message without a traceback, and the exit code is 2.
"""

from autopar.command_line.application import app

__all__ = ["app"]
