"""Runs a script of the workflow in a process of its own, so that no cell fails because of another.

    python -m experiments.isolate JOB DIRECTORY CODE [SETTINGS]

starts `experiments.scripts.simulate_cells`, or `measure_cells` for a measured job. If that process
ends with an error (an exception, an abort of the compiler, a kill for lack of memory), the first
cell without a result gets one with status "failed" and the reason, and the script starts again for
the others.

Results go to DIRECTORY.unfinished, which gets the name DIRECTORY when it is complete. If the run
is stopped before, the next one with the same arguments goes on from there.
"""

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from experiments import sweep_progress
from experiments.cells import Cell, remaining, write_cell, write_job
from experiments.sweep_job import Job

SWEEP_PROCESS = "AUTOPAR_SWEEP_PROCESS"
"""The environment variable with the host and the process of the run, without which its jobs end."""

_SCRIPTS = {"simulated": "simulate_cells", "measured": "measure_cells"}


def main(job_json: str, directory: str, code: str, *settings: str) -> None:
    """Run a script until every cell of a job has a result.

    Args:
        job_json: the job, by `Job.to_json`.
        directory: where the results go.
        code: the hash of the code, with which an unfinished job must agree to be continued.
        settings: the other arguments of the script.
    """
    job = Job.from_json(job_json)
    results = _unfinished(job, Path(directory), [code, *settings])
    script = f"experiments.scripts.{_SCRIPTS[job.source]}"
    command = [sys.executable, "-m", script, job_json, str(results), *settings]
    while left := remaining(job, results):
        status, errors = run_script(command)
        unfinished = remaining(job, results)
        check_not_stopped(status)
        if status == 0:
            assert not unfinished, f"{script} ended well but left out {left}"
        elif not unfinished:
            raise SystemExit(f"{script} computed every cell and then failed:\n{errors}")
        else:
            write_cell(job, results, unfinished[0], Cell("failed", reason_of(status, errors)))
    shutil.rmtree(directory, ignore_errors=True)
    results.rename(directory)


def _unfinished(job: Job, directory: Path, inputs: list[str]) -> Path:
    """Return the folder of the results so far; those with other inputs are deleted."""
    results = directory.with_name(f"{directory.name}.unfinished")
    text = json.dumps([job.to_json(), *inputs])
    inputs_file = results / "inputs.json"
    if not inputs_file.exists() or inputs_file.read_text() != text:
        shutil.rmtree(results, ignore_errors=True)
        write_job(results, job)
        inputs_file.write_text(text)
    for strategy in set(job.strategies) - set(remaining(job, results)):
        sweep_progress.finish(f"{job.name}/{strategy}", computed=False)
    return results


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


def run_script(command: list[str]) -> tuple[int, str]:
    """Run a command, and pass on its stderr line by line.

    Args:
        command: the command.

    Returns:
        Its exit status, negative for the signal that killed it, and its stderr.
    """
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None
        lines = []
        try:
            for line in process.stderr:
                sys.stderr.write(line)
                lines.append(line)
        except BaseException:
            # The script may be in the compiler, which a signal for Python does not interrupt.
            process.kill()
            raise
    return process.returncode, "".join(lines)


def check_not_stopped(status: int) -> None:
    """Stop this process if a script ended because a person stopped the run.

    Args:
        status: exit status of the script.

    Raises:
        SystemExit: a signal by which runs are stopped ended the script.
    """
    if status in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP):
        raise SystemExit("stopped")


def this_process() -> str:
    """Return the host and the number of this process, as `SWEEP_PROCESS` has those of the run."""
    return f"{socket.gethostname()}:{os.getpid()}"


def end_with_run() -> None:
    """End this process and its script when the run of the sweep ends, however it ends.

    A job on another host than the run goes on: the cluster's scheduler ends it.
    """
    # An exception instead of an immediate end, so that `run_script` kills the script.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    host, _, run = os.environ.get(SWEEP_PROCESS, "").rpartition(":")
    if run and host == socket.gethostname():
        threading.Thread(target=_stop_with, args=(int(run),), daemon=True).start()


def _stop_with(run: int) -> None:
    """Stop this process when the process of the run has ended, e.g. by SIGKILL."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(run)], [], [])  # readable when it has ended
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    end_with_run()
    main(*sys.argv[1:])
