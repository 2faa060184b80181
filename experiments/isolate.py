"""Runs a script of the workflow in a process of its own, so that a cell that fails, or takes the process with it, loses no other.

    python -m experiments.isolate simulate JOB DIRECTORY [ARGUMENT ...]

starts `experiments.scripts.simulate_cells` with the same arguments. When that ends with an error (an exception, a compiler's abort, a
kill for lack of memory) the first cell without a result gets one with status "failed" and the reason, and the script is
started again for the rest.
"""

import re
import signal
import subprocess
import sys
from pathlib import Path

from experiments.cells import Cell, remaining, write_cell, write_job
from experiments.sweep_job import Job


def main(what: str, job_json: str, directory: str, *arguments: str) -> None:
    job, results = Job.from_json(job_json), Path(directory)
    write_job(results, job)
    while left := remaining(job, results):
        code, errors = _run(
            [
                sys.executable,
                "-m",
                f"experiments.scripts.{what}_cells",
                job_json,
                directory,
                *arguments,
            ]
        )
        if code == 0:
            assert not remaining(job, results), f"{what} ended well but left out {left}"
            return
        failed = remaining(job, results)
        if not failed:
            raise SystemExit(f"{what} computed every cell and then failed:\n{errors}")
        write_cell(what, job, results, failed[0], Cell("failed", reason_of(code, errors)))


def reason_of(code: int, errors: str) -> str:
    """Why a process ended: the message of its last exception, or the signal that killed it and its last words."""
    if code < 0:
        name = signal.Signals(-code).name
        words = [line.strip() for line in errors.splitlines() if not _FRAME.match(line)][-1:]
        return ": ".join([f"killed by {name}", *words])
    last = errors.rsplit("Traceback (most recent call last):\n", 1)[-1]
    message = re.search(r"^(?=\S).*", last, re.MULTILINE | re.DOTALL)
    return (message[0] if message else f"exit status {code}").strip()


_FRAME = re.compile(r"\s*(@ |\*\*\*|$)")
"""A line of the stack trace that an abort prints after its message."""


def _run(command: list[str]) -> tuple[int, str]:
    """Exit status and stderr, which is passed on as it comes."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            sys.stderr.write(line)
            lines.append(line)
    return process.returncode, "".join(lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
