"""A folder is held by one process at a time, on any file system, and by none that has ended."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import PATIENCE, wait_for

from tpucache.errors import BuildError, StoreError
from tpucache.store import lock

HOLD = """
import errno, fcntl, os, signal, sys
from pathlib import Path
from tpucache.errors import BuildError
from tpucache.store import lock

def no_locks(*_):
    raise OSError(errno.ENOLCK, "no locks available")

if sys.argv[2] == "file":
    fcntl.flock = no_locks
with lock.hold(Path(sys.argv[1]), BuildError):
    if not (child := os.fork()):
        sys.stdin.read()
        os._exit(0)
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGKILL if sys.argv[3] == "killed" else signal.SIGSTOP)
"""


@pytest.fixture(params=["flock", "file"])
def kind(request, monkeypatch):
    """Of locks: the kernel's, or files as on a file system that has none."""
    if request.param == "file":

        def no_locks(*_):
            raise OSError(errno.ENOLCK, "no locks available")

        monkeypatch.setattr(fcntl, "flock", no_locks)
    return request.param


@pytest.fixture
def start(tmp_path, kind):
    """Start a process that holds `tmp_path / "lock"`, forks another one, and is killed or not."""
    processes = []

    def begin(state):
        command = [sys.executable, "-c", HOLD, str(tmp_path / "lock"), kind, state]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert processes[0].stdout.readline() == "held\n"
        return processes[0]

    yield begin
    for process in processes:
        process.kill()
        process.communicate(timeout=PATIENCE)


def refused(path: Path) -> str:
    with pytest.raises(BuildError) as error, lock.hold(path, BuildError, patience=0.0):
        pass
    return str(error.value)


def test_a_folder_is_held_once_also_within_a_process(tmp_path, kind):
    path = tmp_path / "lock"
    with lock.hold(path, BuildError) as held:
        assert f"process {os.getpid()} on " in refused(path)
        assert (f"remove {path}" in refused(path)) == (kind == "file")
        assert lock.is_held(path, held.token)
        assert lock.is_held(path)
        assert not lock.is_held(path, "another one")
        assert not held.is_lost()
    assert not lock.is_held(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_it_is_said_which_process_holds_a_folder(tmp_path, start):
    process = start("stopped")
    assert f"process {process.pid} on " in refused(tmp_path / "lock")
    assert lock.is_held(tmp_path / "lock")


@pytest.mark.slow
def test_a_killed_process_holds_nothing_and_neither_does_what_it_forked(tmp_path, start):
    path, process = tmp_path / "lock", start("killed")
    process.wait(PATIENCE)
    assert path.exists()
    wait_for(lambda: not lock.is_held(path))  # the forked process may only now begin, and let go of it
    with lock.hold(path, BuildError) as held:
        assert lock.read_holder(path).token == held.token
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["file"], indirect=True)
@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"token": 1}', b"[" * 4000, b"far"])
def test_a_file_that_names_no_process_of_this_machine_counts_until_it_is_removed(tmp_path, kind, content):
    path = tmp_path / "lock"
    if content == b"far":
        with lock.hold(path, BuildError):
            content = json.dumps({**json.loads(path.read_text()), "host": "far"}).encode()
    path.write_bytes(content)
    assert lock.is_held(path)
    assert f"remove {path}" in refused(path)
    path.unlink()
    with lock.hold(path, BuildError):
        pass


def test_of_many_that_find_the_lock_of_an_ended_process_one_takes_it(tmp_path, kind):
    path, ended = tmp_path / "lock", subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(PATIENCE)
    with lock.hold(path, BuildError):
        content = json.dumps({**json.loads(path.read_text()), "pid": ended.pid})
    for _ in range(20):
        path.write_text(content)
        ready, done, taken = threading.Barrier(4), threading.Barrier(4), []

        def take(ready=ready, done=done, taken=taken):
            ready.wait(PATIENCE)
            try:
                with lock.hold(path, BuildError, patience=0.0):
                    taken.append(True)
                    done.wait(PATIENCE)
            except BuildError:
                done.wait(PATIENCE)

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(taken) == 1
    assert not list(tmp_path.iterdir())


def test_a_hold_that_was_taken_away_is_noticed_and_not_removed(tmp_path, kind):
    path = tmp_path / "lock"
    with lock.hold(path, BuildError) as held:
        path.unlink()
        assert held.is_lost()
        with lock.hold(path, BuildError) as other:
            assert held.is_lost()
            assert not other.is_lost()
    assert not path.exists()


def test_no_link_is_followed_to_the_file_of_somebody_else(tmp_path, kind):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises((OSError, BuildError)), lock.hold(tmp_path / "lock", BuildError):
        pass
    with pytest.raises(OSError, match="lock"), lock.only_one(tmp_path / "lock", 0.0):
        pass
    assert victim.read_text() == "mine"


def test_one_at_a_time_waits_for_the_other_and_gives_up(tmp_path):
    path = tmp_path / "lock"
    refused = pytest.raises(StoreError, match="another process has locked")
    with lock.only_one(path, 0.0), refused, lock.only_one(path, 0.02):
        pass
    with lock.only_one(path, 0.0):
        pass


def test_bytes_of_a_file_are_locked_one_by_one(tmp_path):
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("r+b") as first, (tmp_path / "file").open("r+b") as second:
        one, other = first.fileno(), second.fileno()
        assert lock.lock_byte(one, 1)
        assert not lock.lock_byte(other, 1, is_shared=True)
        assert lock.lock_byte(other, 2, is_shared=True)
        assert lock.lock_byte(one, 2, is_shared=True)
        assert not lock.lock_byte(one, 2)
        lock.unlock_byte(one, 1)
        assert lock.lock_byte(other, 1)
