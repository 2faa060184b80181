"""Locks of checkpoint directories: one process at a time writes to a directory.

A lock is a file that names its owner. The owner touches the file while it runs. A lock is stale,
and may be taken over, if its owner is a process of this machine that has ended, or if it has not
been touched for `STALE_SECONDS` by the clock of the file system.
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
"""Seconds after which an untouched lock of another machine is stale."""

_BEAT_SECONDS = 10
"""Seconds between two touches of a lock by its owner."""

_SETTLE_SECONDS = 0.2
"""Seconds to wait after replacing a stale lock.

Two processes may find the same stale lock. Each replaces it by its own and waits; the process that
wrote last owns the directory.
"""


class Owner(BaseModel):
    """The process that owns a lock.

    Attributes:
        host: name of its machine, for people.
        pid: process id.
        since: when it took the lock, for people.
        machine: the boot of the machine and the namespace of the pid; None if they are unknown.
        birth: start of the process in clock ticks since the boot, which distinguishes it from a
            later process with the same pid.
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
        pid = os.getpid()
        return Owner(
            host=socket.gethostname(),
            pid=pid,
            since=datetime.now().astimezone().isoformat(timespec="seconds"),
            machine=_machine(),
            birth=_birth(pid),
            token=uuid.uuid4().hex,
        )

    @staticmethod
    def load(file: Path) -> "Owner | None":
        """Return the owner that a lock file names, or None if it names none.

        Raises:
            FileNotFoundError: there is no lock file.
        """
        try:
            return Owner.model_validate_json(file.read_bytes())
        except ValidationError:
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class DirectoryLock:
    """This process's lock of a directory.

    Attributes:
        file: the lock file.
        owner: this process.
        uses: number of uses that have not been released.
    """

    def __init__(self, directory: Path) -> None:
        """Take the lock.

        Raises:
            CheckpointError: another process owns it.
        """
        self.file = directory / LOCK
        self.owner = Owner.this()
        self.uses = 0
        self._take()
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="autopar-lock", daemon=True).start()

    def check(self) -> None:
        """Raise CheckpointError if another process has taken over the lock.

        This can happen while this process is suspended.
        """
        owner = self._present_owner()
        if owner != self.owner:
            raise CheckpointError(
                f"{self.file} is no longer the lock of this process, but of"
                f" {owner or 'no process'}: it was removed, or taken over while this process was"
                " suspended, so nothing is saved; go on with one process only"
            )

    def release(self) -> None:
        """End one use; the last one removes the lock."""
        with _guard:
            self.uses -= 1
            if self.uses:
                return
            _locks.pop(self.file, None)
            self._released.set()
            if self._present_owner() == self.owner:
                self.file.unlink(missing_ok=True)

    def _present_owner(self) -> Owner | None:
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
                if self._present_owner() == self.owner:
                    return

    def _is_stale(self) -> bool:
        """Return whether the lock file is stale; False if it has been removed.

        Raises:
            CheckpointError: its owner still runs.
        """
        try:
            owner = Owner.load(self.file)
            age = _age(self.file)
        except FileNotFoundError:
            return False
        machine = None if owner is None else owner.machine
        if owner is not None and machine is not None and machine == self.owner.machine:
            is_gone = _birth(owner.pid) != owner.birth
            seen = ""
        else:
            is_gone = age > STALE_SECONDS
            seen = f" (last seen {max(age, 0):.0f} s ago; its lock expires after {STALE_SECONDS} s)"
        named = "a process that has not written its name" if owner is None else str(owner)
        if not is_gone:
            raise CheckpointError(
                f"{self.file.parent} is in use by {named}{seen}: it trains or saves there. Wait"
                f" until it has ended, or use another directory; remove {self.file} only if you"
                " know that the process is gone"
            )
        log_progress(f"taking over {self.file} of {named}, which is gone")
        return True

    def _beat(self) -> None:
        while not self._released.wait(_BEAT_SECONDS) and self._present_owner() == self.owner:
            with suppress(OSError):
                os.utime(self.file)


_locks: dict[Path, DirectoryLock] = {}
_guard = threading.Lock()


def lock(directory: Path, is_alone: bool = False) -> DirectoryLock:
    """Lock a directory for this process, or share the lock that the process already owns.

    Call `DirectoryLock.release` when done.

    Args:
        directory: the directory, which is created if it does not exist.
        is_alone: whether to refuse a directory that this process has already locked.

    Raises:
        CheckpointError: another process owns the lock, or `directory` is not a directory.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise CheckpointError(
            f"{directory} is not a directory, expected one to save checkpoints in"
        ) from None
    with _guard:
        file = directory.resolve() / LOCK
        own = _locks.get(file)
        # A lock with another pid belongs to the process that this one was forked from.
        if own is not None and own.owner.pid != os.getpid():
            own = None
        if own is not None and is_alone:
            raise CheckpointError(
                f"{directory} is in use by this process, which trains or saves there already; use"
                " another directory"
            )
        if own is None:
            own = _locks[file] = DirectoryLock(directory.resolve())
        own.uses += 1
        return own


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
    """Return an identifier of this boot of the machine and of the PID namespace, or None."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _birth(pid: int) -> int | None:
    """Return the start of a process in clock ticks since the boot, or None if it does not run."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in ("Z", "X") else int(fields[18])
