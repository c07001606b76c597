"""Locks of folders and files between processes, on any file system.

`hold` locks a folder by a file in it that names the process. The lock is the kernel's (`flock`), which ends with its
process. On a file system without such locks, the file itself is the lock: whoever makes it has it, and that of a
process of this machine that has ended is replaced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import secrets
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tpucache.errors import DependencyError, StoreError, TpucacheError
from tpucache.store.files import OpenFolder, open_file
from tpucache.text import shown

_PAUSE: Final = 0.01  # seconds between two attempts
#: How long `hold` retries: `is_held` in another process takes a shared lock for a moment.
_PATIENCE: Final = 0.5
_MAX_BYTES: Final = 4096
#: The error numbers that mean "this file system has no locks".
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)
_OPEN: Final = os.O_RDWR | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_BINARY"))
_NEW: Final = _OPEN | os.O_CREAT | os.O_EXCL

_held: set[int] = set()  # descriptors of lock files


def check_locks(doing: str) -> None:
    if not (hasattr(fcntl, "F_OFD_SETLK") and sys.platform == "linux"):
        raise DependencyError(
            f"{doing} needs locks of open files, which only Linux has: copy the cache with `tpucache fetch` instead"
        )


def flock(number: int, *, is_shared: bool = False, patience: float = 0.0) -> bool:
    """Lock an open file, until it is closed or the process ends; wait at most `patience` seconds. Returns whether it
    is locked.
    """
    kind, until = (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB, time.monotonic() + patience
    while True:
        try:
            fcntl.flock(number, kind)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_PAUSE)
        else:
            return True


def lock_byte(number: int, byte: int, *, is_shared: bool = False) -> bool:
    """Lock one byte of an open file for this open file, without waiting. Returns whether that worked. Linux only.

    Waiting locks are not used: the system refuses them if it suspects a deadlock.
    """
    return _set_byte(number, byte, fcntl.F_RDLCK if is_shared else fcntl.F_WRLCK)


def unlock_byte(number: int, byte: int) -> None:
    _set_byte(number, byte, fcntl.F_UNLCK)


def _set_byte(number: int, byte: int, kind: int) -> bool:
    try:
        fcntl.fcntl(number, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


@contextlib.contextmanager
def only_one(path: Path, patience: float) -> Iterator[None]:
    """Let one process at a time run the `with` block, by a lock file that stays. No link is followed."""
    number = OpenFolder(path.parent).open(path.name, os.O_RDWR | os.O_CREAT)
    try:
        if not flock(number, patience=patience):
            raise StoreError(f"another process has locked {path} for {patience:.0f} s: end that process")
        yield
    finally:
        os.close(number)


@dataclass(frozen=True)
class Holder:
    """The process that a lock file names. `token` differs each time a folder is taken."""

    token: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {shown(self.host)}"

    @property
    def may_run(self) -> bool:
        """Whether the process runs; True if that is unknown, as for one of another machine."""
        if self.host != platform.node() or os.name != "posix" or self.pid <= 0:
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except (PermissionError, OverflowError):
            return True
        return True


class Hold:
    def __init__(self, path: Path, token: str) -> None:
        self._path = path
        self.token = token

    def is_lost(self) -> bool:
        """Return whether the lock file was removed, or has another process's token."""
        holder = read_holder(self._path)
        return holder is None or holder.token != self.token


@contextlib.contextmanager
def hold(path: Path, refusal: Callable[[str], TpucacheError], patience: float = _PATIENCE) -> Iterator[Hold]:
    """Hold a folder for this process alone, by the lock file `path` in it, which is removed at the end.

    If another process or thread holds the folder for `patience` seconds, this raises the error `refusal(text)`; `text`
    names the process.
    """
    mine = Holder(secrets.token_hex(16), platform.node(), os.getpid())
    number = _take(path, json.dumps(asdict(mine)).encode(), refusal, patience)
    held = Hold(path, mine.token)
    try:
        yield held
    finally:
        if os.getpid() == mine.pid:  # a forked child must not release its parent's lock
            with contextlib.suppress(OSError):
                if not held.is_lost():
                    path.unlink()
            if number is not None:
                _held.discard(number)
                os.close(number)


def is_held(path: Path, token: str | None = None) -> bool:
    """Return whether a process holds this lock file (with this token, if one is given)."""
    try:
        with open_file(path) as file:
            content = file.read(_MAX_BYTES)
            if token is not None and token.encode() not in content:
                return False
            return not flock(file.fileno(), is_shared=True)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    holder = _parse(content)
    return holder is None or holder.may_run


def read_holder(path: Path) -> Holder | None:
    """Return the process that a lock file names, which holds the lock or was the last to hold it; None if none is."""
    try:
        with open_file(path) as file:
            return _parse(file.read(_MAX_BYTES))
    except FileNotFoundError:
        return None


def _parse(data: bytes) -> Holder | None:
    types = {"token": str, "host": str, "pid": int}
    try:
        content = json.loads(data)
        if all(type(content[name]) is kind for name, kind in types.items()):
            return Holder(**{name: content[name] for name in types})
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return None


def _close_inherited() -> None:
    """Close the lock files that a forked child has inherited: the child would hold the locks after its parent's end."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_inherited)


def _take(path: Path, content: bytes, refusal: Callable[[str], TpucacheError], patience: float) -> int | None:
    """Take a lock. Returns the descriptor of the locked file; None on a file system without locks."""
    until = time.monotonic() + patience
    while True:
        number, is_new = _open(path)
        advice = ""
        try:
            # The last holder may have removed the file meanwhile.
            if flock(number) and os.path.samestat(os.fstat(number), path.stat()):
                os.ftruncate(number, 0)
                os.write(number, content)
                _held.add(number)
                return number
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if is_new:
                path.unlink()
            if _make(path, content):
                return None
            advice = f" (if it has ended, remove {path})"
        finally:
            if number not in _held:
                os.close(number)
        if time.monotonic() >= until:
            raise refusal(f"{read_holder(path) or 'a process that has just begun or ended'}{advice}")
        time.sleep(_PAUSE)


def _open(path: Path) -> tuple[int, bool]:
    """Open a lock file. Returns its descriptor, and whether this call made the file."""
    while True:
        with contextlib.suppress(FileExistsError):
            return os.open(path, _NEW, 0o666), True
        with contextlib.suppress(FileNotFoundError):  # another process removed it meanwhile
            return os.open(path, _OPEN, 0o666), False


def _make(path: Path, content: bytes) -> bool:
    """Make a lock file, or replace that of a process that has ended. Returns whether that worked."""
    try:
        _write_new(path, content)
        return True
    except FileExistsError:
        holder = read_holder(path)
        if holder is None or holder.may_run:
            return False
    mark = path.with_name(f"{path.name}.replaced")  # only one process at a time replaces a lock file
    with contextlib.suppress(FileExistsError):
        os.close(os.open(mark, _NEW, 0o666))
        try:
            if read_holder(path) == holder:
                path.unlink()
                _write_new(path, content)
                return True
        finally:
            mark.unlink()
    return False


def _write_new(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, _NEW, 0o666), "wb") as file:
        file.write(content)
