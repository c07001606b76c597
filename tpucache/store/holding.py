"""A lock on a folder, on any file system, so that only one process writes into the folder.

A lock file in the folder says which process holds the lock. If the file system supports `flock`, the kernel releases
the lock when the process ends. Otherwise the lock file is a lease: the process that holds it touches the file every few
seconds, and the lease expires a minute after the last touch. In both cases, other processes on the same machine notice
at once that the holding process has ended.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tpucache.errors import TpucacheError
from tpucache.redact import shown
from tpucache.store.files import open_file
from tpucache.system import fcntl

#: A lease expires this long after the last touch of its file.
LEASE_SECONDS: Final = 60.0
#: The time between two touches.
BEAT_SECONDS: Final = 5.0
#: How long to retry: `is_held` in another process takes a shared lock for a moment.
_PATIENCE_SECONDS: Final = 2.0
_MAX_BYTES: Final = 4096
#: The error numbers that mean "this file system has no locks".
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)
_CREATE: Final = os.O_RDWR | os.O_CREAT | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_BINARY"))

_locks: set[int] = set()


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder, as the lock file describes it.

    `token` is a random text that differs each time a folder is taken. `host` is the machine's name. `pid` is unique
    only in one `place`: one boot of one machine, and one container on it. `start` is the time at which the process
    started, by the kernel's clock; "" if it is unknown. `since` is the time at which the process took the folder, in
    seconds since 1970.
    """

    token: str
    host: str
    pid: int
    place: str
    start: str
    since: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.since))
        return f"process {self.pid} on {shown(self.host)}, since {since} UTC"


class Hold:
    """A folder that this process holds, so that no other process writes into it."""

    def __init__(self, path: Path, token: str) -> None:
        """Store the path of the lock file, and the token that this process wrote into it."""
        self._path = path
        self.token = token

    def is_lost(self) -> bool:
        """Return whether the lock file was removed, or has another process's token. Raises OSError."""
        holder = read_holder(self._path)
        return holder is None or holder.token != self.token


@contextlib.contextmanager
def hold(path: Path, refusal: Callable[[str], TpucacheError]) -> Iterator[Hold]:
    """Hold a folder for this process alone, by the lock file `path` in it. The lock file is removed at the end.

    If another process or thread holds the folder, this raises the error `refusal(text)`; `text` names the process that
    holds it. Raises OSError.
    """
    mine = Holder(secrets.token_hex(16), platform.node(), os.getpid(), _place(), _start(os.getpid()), time.time())
    content = json.dumps(asdict(mine)).encode()
    try:
        number = _take_lock(path, content)
        if number is None:
            _take_lease(path, content)
    except BlockingIOError as error:
        holder = read_holder(path)
        raise refusal("a process that has just begun or ended" if holder is None else str(holder)) from error
    held, ended = Hold(path, mine.token), threading.Event()
    if number is None:
        threading.Thread(target=_beat, args=(path, ended), name="tpucache-lease", daemon=True).start()
    else:
        _locks.add(number)
    try:
        yield held
    finally:
        ended.set()
        if os.getpid() == mine.pid:  # a forked child must not release its parent's lock
            with contextlib.suppress(OSError):
                if not held.is_lost():
                    path.unlink()
            if number is not None:
                _locks.discard(number)
                os.close(number)


def is_held(path: Path, token: str | None = None) -> bool:
    """Return whether a process holds this lock file (with this token, if one is given). Raises OSError."""
    try:
        with open_file(path) as file:
            content = file.read(_MAX_BYTES)
            if token is not None and token.encode() not in content:
                return False
            if fcntl is not None:
                fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return _is_live(path, _holder_in(content))


def read_holder(path: Path) -> Holder | None:
    """Return the process that a lock file names, which holds the lock or was the last to hold it.

    Returns None if there is no lock file, or if it names no process. Raises OSError.
    """
    try:
        with open_file(path) as file:
            return _holder_in(file.read(_MAX_BYTES))
    except FileNotFoundError:
        return None


def _holder_in(data: bytes) -> Holder | None:
    types = {"token": str, "host": str, "pid": int, "place": str, "start": str, "since": float}
    try:
        content = json.loads(data)
        if all(type(content[name]) is kind for name, kind in types.items()) and 0 <= content["since"] < 1 << 33:
            return Holder(**{name: content[name] for name in types})
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return None


def _close_inherited() -> None:
    """Close the lock files that a forked child has inherited: the child would hold the locks after its parent's end."""
    while _locks:
        os.close(_locks.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


def _take_lock(path: Path, content: bytes) -> int | None:
    """Lock a file, write `content` to it and return its descriptor; None on a file system without locks.

    Raises BlockingIOError if another process keeps the file locked for two seconds, and OSError for other failures.
    """
    if fcntl is None:
        return None
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        number, is_new = _open_lock(path)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(number, path):  # the last holder may have removed the file meanwhile
                os.ftruncate(number, 0)
                os.write(number, content)
                return number
            os.close(number)
        except BlockingIOError:
            os.close(number)
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        except OSError as error:
            if is_new and error.errno in _NO_LOCKS:  # the empty file must not look like a lease
                with contextlib.suppress(OSError):
                    if _is_named(number, path):
                        path.unlink()
            os.close(number)
            if error.errno in _NO_LOCKS:
                return None
            raise


def _open_lock(path: Path) -> tuple[int, bool]:
    """Open a lock file. Returns its descriptor, and whether this call made the file. Raises OSError."""
    while True:
        with contextlib.suppress(FileExistsError):
            return os.open(path, _CREATE | os.O_EXCL, 0o666), True
        with contextlib.suppress(FileNotFoundError):  # another process removed it meanwhile
            return os.open(path, _CREATE & ~os.O_CREAT, 0o666), False


def _is_named(number: int, path: Path) -> bool:
    """Return whether `path` still leads to the open file with the descriptor `number`."""
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False


def _take_lease(path: Path, content: bytes) -> None:
    """Create the lock file `path` as a lease, and write `content` into it. An expired lease is replaced.

    Raises BlockingIOError while another process holds or replaces the lease, and OSError for other failures.
    """
    while True:
        try:
            number = os.open(path, _CREATE | os.O_EXCL, 0o666)
        except FileExistsError:
            _remove_expired(path)
            continue
        with os.fdopen(number, "wb") as file:
            file.write(content)
        return


def _remove_expired(path: Path) -> None:
    """Remove an expired lease. Raises BlockingIOError if it has not expired, or another process is removing it."""
    if _is_live(path, read_holder(path)):
        raise BlockingIOError(errno.EWOULDBLOCK, "the lease is held", os.fspath(path))
    mark = path.with_name(f"{path.name}.expired")
    try:
        os.close(os.open(mark, _CREATE | os.O_EXCL, 0o666))
    except FileExistsError:
        if (_age(mark) or 0.0) < LEASE_SECONDS:
            raise BlockingIOError(errno.EWOULDBLOCK, "the lease is being taken", os.fspath(path)) from None
    try:
        # Another process may have replaced the lease since the first look. No process can while the file `mark` exists.
        if not _is_live(path, read_holder(path), if_gone=True):
            path.unlink(missing_ok=True)
    finally:
        mark.unlink(missing_ok=True)


def _is_live(path: Path, holder: Holder | None, *, if_gone: bool = False) -> bool:
    """Return whether the process that holds a lease still runs, or, if this is unknown, whether the lease is valid.

    It is unknown for a process on another machine. Returns `if_gone` if the file no longer exists.
    """
    if holder is not None and holder.place == _place():
        if not _is_running(holder.pid):
            return False
        if holder.start:
            return _start(holder.pid) == holder.start
    age = _age(path)
    return if_gone if age is None else age < LEASE_SECONDS


def _age(path: Path) -> float | None:
    """Return the seconds since a file was touched, by its file system's clock; None without a file. Raises OSError."""
    now = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    number = os.open(now, _CREATE | os.O_EXCL, 0o600)
    try:
        return os.fstat(number).st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return None
    finally:
        os.close(number)
        now.unlink(missing_ok=True)


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):  # the next touch may succeed
            os.utime(path)


def _place() -> str:
    """Return the scope in which this process's pid is unique: the boot of the machine, and the container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return platform.node()


def _start(pid: int) -> str:
    """Return the time at which a process started, by the kernel's clock; "ended" for a zombie, "" if it is unknown."""
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "ended" if values[0] in "ZX" else values[19]  # a zombie has ended
    except (OSError, IndexError):
        return ""


def _is_running(pid: int) -> bool:
    """Return whether a process with this number runs; True if that is unknown."""
    if os.name != "posix" or pid <= 0:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
