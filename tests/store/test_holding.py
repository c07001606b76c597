"""A folder is held by one process at a time, on any file system, and by none that has ended."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import PATIENCE, wait_for

from tpucache.errors import BuildError
from tpucache.store import holding

HOLD = """
import errno, sys
from pathlib import Path
from tpucache.errors import BuildError
from tpucache.store import holding

def no_locks(*_):
    raise OSError(errno.ENOLCK, "no locks available")

if sys.argv[2] == "lease":
    holding.fcntl.flock = no_locks
with holding.hold(Path(sys.argv[1]), BuildError):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=["flock", "lease"])
def kind(request, monkeypatch):
    """Of locks: the kernel's, or leases as on a file system that has none."""
    if request.param == "lease":

        def no_locks(*_):
            raise OSError(errno.ENOLCK, "no locks available")

        monkeypatch.setattr(holding.fcntl, "flock", no_locks)
    monkeypatch.setattr(holding, "_PATIENCE_SECONDS", 0.0)
    return request.param


@pytest.fixture
def other(tmp_path, kind):
    """Another process that holds `tmp_path / "lock"`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock"), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()
            process.wait(PATIENCE)


def refused(path: Path) -> str:
    with pytest.raises(BuildError) as error, holding.hold(path, BuildError):
        pass
    return str(error.value)


def test_a_folder_is_held_once_also_within_a_process(tmp_path, kind):
    with holding.hold(tmp_path / "lock", BuildError) as held:
        assert f"process {os.getpid()} on " in refused(tmp_path / "lock")
        assert holding.is_held(tmp_path / "lock", held.token)
        assert not holding.is_held(tmp_path / "lock", "another one")
        assert not held.is_lost()
    assert not holding.is_held(tmp_path / "lock")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_it_is_said_who_holds_a_folder_and_a_killed_process_holds_nothing(tmp_path, other):
    path = tmp_path / "lock"
    assert f"process {other.pid} on " in refused(path)
    assert holding.is_held(path)
    other.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # nobody has taken note of its end yet: it is a zombie
    assert not holding.is_held(path)
    with holding.hold(path, BuildError) as held:
        assert holding.read_holder(path).token == held.token
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["lease"], indirect=True)
def test_a_lease_of_another_machine_expires_when_it_is_no_longer_touched(tmp_path, kind, monkeypatch):
    path = tmp_path / "lock"
    with holding.hold(path, BuildError):
        content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "place": "another machine", "host": "far"}))
    assert f"process {os.getpid()} on far" in refused(path)
    old = path.stat().st_mtime - holding.LEASE_SECONDS - 1
    os.utime(path, (old, old))
    with holding.hold(path, BuildError):
        assert holding.read_holder(path).host != "far"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["lease"], indirect=True)
def test_a_lease_is_touched_while_it_is_held(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(holding, "BEAT_SECONDS", 0.01)
    with holding.hold(tmp_path / "lock", BuildError):
        os.utime(tmp_path / "lock", (0, 0))
        wait_for(lambda: (tmp_path / "lock").stat().st_mtime > 0)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"token": 1}', b"[" * 4000])
def test_an_unreadable_lease_counts_until_it_is_old(tmp_path, kind, content):
    path = tmp_path / "lock"
    path.write_bytes(content)
    if kind == "lease":  # an empty one is being written
        assert "just begun or ended" in refused(path)
    os.utime(path, (0, 0))
    with holding.hold(path, BuildError):
        assert "on" in refused(path)


def test_of_many_that_find_an_expired_lease_one_takes_it(tmp_path, kind):
    path = tmp_path / "lock"
    for _ in range(20):
        path.write_text("left by somebody")
        os.utime(path, (0, 0))
        ready, done, taken = threading.Barrier(4), threading.Barrier(4), []

        def take(ready=ready, done=done, taken=taken):
            ready.wait(PATIENCE)
            try:
                with holding.hold(path, BuildError):
                    taken.append(True)
                    done.wait(PATIENCE)
            except BuildError:
                done.wait(PATIENCE)

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(taken) <= 1
    with holding.hold(path, BuildError):
        pass


def test_a_hold_that_was_taken_away_is_noticed_and_not_removed(tmp_path, kind):
    path = tmp_path / "lock"
    with holding.hold(path, BuildError) as held:
        path.unlink()
        assert held.is_lost()
        with holding.hold(path, BuildError) as other:
            assert held.is_lost()
            assert not other.is_lost()
    assert not path.exists()


def test_no_link_is_followed_to_the_file_of_somebody_else(tmp_path, kind):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises((OSError, BuildError)), holding.hold(tmp_path / "lock", BuildError):
        pass
    assert victim.read_text() == "mine"


@pytest.mark.slow
def test_what_a_run_forks_does_not_hold_its_folder(tmp_path):
    program = """
import os, signal, sys
from pathlib import Path
from tpucache.errors import BuildError
from tpucache.store import holding

with holding.hold(Path(sys.argv[1]), BuildError):
    if not (child := os.fork()):
        sys.stdin.read()
        os._exit(0)
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        process.wait(PATIENCE)  # the forked process still waits for its input
        with holding.hold(tmp_path / "lock", BuildError):
            pass
