"""The lock of a directory of checkpoints: one process at a time writes there.

A lock is a file that names its owner. The owner touches the file while it runs. A lock is stale, and may be taken over, when its
owner is a process of this machine that has ended, or when it has not been touched for `STALE_SECONDS`, by the clock of the file
system.
"""

import os
import socket
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from autopar.checkpoint.manifest import CheckpointError
from autopar.progress import log_progress

LOCK = "autopar.lock"
STALE_SECONDS = 120
_BEAT_SECONDS = 10
_SETTLE_SECONDS = 0.2
"""Two processes may find the same stale lock. Each replaces it with its own and waits this long; the one that wrote last owns it."""


class Owner(BaseModel):
    """The process that has a lock.

    Attributes:
        host, pid, since: its names for a reader.
        machine: the boot of the machine and the namespace of the pid; None where they are unknown.
        birth: start of the process in clock ticks since the boot; a later process with the same pid has another.
        token: unique to this lock.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    pid: int
    since: str
    machine: str | None
    birth: int | None
    token: str

    @staticmethod
    def this() -> "Owner":
        """Return this process as the owner of a new lock."""
        pid, since = os.getpid(), datetime.now().astimezone().isoformat(timespec="seconds")
        return Owner(
            host=socket.gethostname(),
            pid=pid,
            since=since,
            machine=_machine(),
            birth=_birth(pid),
            token=uuid.uuid4().hex,
        )

    @staticmethod
    def load(file: Path) -> "Owner | None":
        """Return the owner that a lock file names, or None if the file names none.

        Raises:
            FileNotFoundError: there is no lock.
        """
        try:
            return Owner.model_validate_json(file.read_bytes())
        except ValidationError:
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class DirectoryLock:
    """The lock of a directory, held by this process until every use of it is released."""

    def __init__(self, directory: Path) -> None:
        """Take the lock.

        Raises:
            CheckpointError: another process has it.
        """
        self.file, self.owner, self.uses = directory / LOCK, Owner.this(), 0
        self._take()
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="autopar-lock", daemon=True).start()

    def check(self) -> None:
        """Raise CheckpointError if another process has taken the lock over, e.g. while this one was suspended."""
        holder = self._holder()
        if holder != self.owner:
            raise CheckpointError(
                f"{self.file} is no longer the lock of this process, but of {holder or 'nobody'}: it was removed, or taken over while this"
                " process was suspended, so nothing is saved; go on with one process only"
            )

    def release(self) -> None:
        """End one use; the last one removes the lock."""
        with _guard:
            self.uses -= 1
            if self.uses:
                return
            _locks.pop(self.file, None)
            self._released.set()
            if self._holder() == self.owner:
                self.file.unlink(missing_ok=True)

    def _holder(self) -> Owner | None:
        try:
            return Owner.load(self.file)
        except FileNotFoundError:
            return None

    def _take(self) -> None:
        text = self.owner.model_dump_json()
        while True:
            with suppress(FileExistsError):
                _create(self.file, text)
                return
            if self._is_stale():
                mine = self.file.with_name(f"{LOCK}.{self.owner.token}")
                _create(mine, text)
                mine.replace(self.file)
                time.sleep(_SETTLE_SECONDS)
                if self._holder() == self.owner:
                    return

    def _is_stale(self) -> bool:
        """Return whether the current lock is stale; False if it has been removed.

        Raises:
            CheckpointError: its owner still runs.
        """
        try:
            holder, age = Owner.load(self.file), _age(self.file)
        except FileNotFoundError:
            return False
        if (
            holder is not None
            and holder.machine is not None
            and holder.machine == self.owner.machine
        ):
            is_gone, seen = _birth(holder.pid) != holder.birth, ""
        else:
            is_gone = age > STALE_SECONDS
            seen = f", last seen {max(age, 0):.0f} s ago and taken for gone after {STALE_SECONDS} s"
        named = "a process that has not written its name" if holder is None else str(holder)
        if not is_gone:
            raise CheckpointError(
                f"{self.file.parent} is in use by {named}{seen}: it trains or saves there. Wait until it has ended, or use another"
                f" directory; remove {self.file} only if you know that the process is gone"
            )
        log_progress(f"taking over {self.file} of {named}, which is gone")
        return True

    def _beat(self) -> None:
        while not self._released.wait(_BEAT_SECONDS) and self._holder() == self.owner:
            with suppress(OSError):
                os.utime(self.file)


_locks: dict[Path, DirectoryLock] = {}
_guard = threading.Lock()


def lock(directory: Path, is_alone: bool = False) -> DirectoryLock:
    """Lock a directory for this process, or share the lock that it already has. Call `DirectoryLock.release` when done.

    Args:
        directory: created if it does not exist.
        is_alone: whether to refuse a directory that this process has already locked.

    Raises:
        CheckpointError: another process has the lock, or `directory` is no directory.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise CheckpointError(
            f"{directory} is not a directory, expected one to save checkpoints in"
        ) from None
    with _guard:
        held = _locks.get(file := directory.resolve() / LOCK)
        if (
            held is not None and held.owner.pid != os.getpid()
        ):  # of the process that this one was forked from
            held = None
        if held is not None and is_alone:
            raise CheckpointError(
                f"{directory} is in use by this process, which trains or saves there already; use another directory"
            )
        if held is None:
            held = _locks[file] = DirectoryLock(directory.resolve())
        held.uses += 1
        return held


def _create(file: Path, text: str) -> None:
    """Create a file with `text`, or no file at all if writing fails."""
    with file.open("x") as new:
        try:
            new.write(text)
            new.flush()
        except BaseException:
            file.unlink()
            raise


def _age(file: Path) -> float:
    """Return the seconds since a file was touched, by the clock of its file system."""
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f"{LOCK}.") as probe:
        return os.stat(probe.name).st_mtime - file.stat().st_mtime


def _machine() -> str | None:
    """Return an identifier of this boot of this machine and of its PID namespace, or None if the system has none."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _birth(pid: int) -> int | None:
    """Return the start time of a process of this machine, in clock ticks since the boot, or None if it does not run."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in ("Z", "X") else int(fields[18])
