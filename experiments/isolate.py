"""Runs a script of the workflow in a process of its own, so that no cell fails because of another.

    python -m experiments.isolate simulate JOB DIRECTORY [ARGUMENT ...]

starts `experiments.scripts.simulate_cells` with the same arguments. If that process ends with an
error (an exception, an abort of the compiler, a kill for lack of memory), the first cell without a
result gets one with status "failed" and the reason, and the script starts again for the others.
"""

import re
import signal
import subprocess
import sys
from pathlib import Path

from experiments.cells import Cell, remaining, write_cell, write_job
from experiments.sweep_job import Job


def main(what: str, job_json: str, directory: str, *arguments: str) -> None:
    """Run a script until every cell of a job has a result.

    Args:
        what: "plan", "measure" or "simulate".
        job_json: the job, by `Job.to_json`.
        directory: where the results go.
        arguments: the other arguments of the script.
    """
    job, results = Job.from_json(job_json), Path(directory)
    write_job(results, job)
    script = f"experiments.scripts.{what}_cells"
    command = [sys.executable, "-m", script, job_json, directory, *arguments]
    while left := remaining(job, results):
        code, errors = _run(command)
        if code == 0:
            assert not remaining(job, results), f"{what} ended well but left out {left}"
            return
        unfinished = remaining(job, results)
        if not unfinished:
            raise SystemExit(f"{what} computed every cell and then failed:\n{errors}")
        write_cell(what, job, results, unfinished[0], Cell("failed", reason_of(code, errors)))


def reason_of(code: int, errors: str) -> str:
    """Return why a process ended.

    Args:
        code: exit status; negative for the signal that killed it.
        errors: what it wrote to stderr.

    Returns:
        The message of its last exception, or the signal that killed it and the last line before it.
    """
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
    """Return the exit status and stderr of a command; stderr is also passed on line by line."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            sys.stderr.write(line)
            lines.append(line)
    return process.returncode, "".join(lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
