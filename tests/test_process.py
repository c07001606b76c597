"""A command's process: closed standard files, output that cannot be written, little memory, signals at any moment."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import zipapp
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from thorough import thorough

import tpucache
from tpucache import Recipe, build_cache, cli, process, verify_cache
from tpucache.progress import Progress
from tpucache.training.interrupt import Stopped, StopRequest

PROGRAM = [sys.executable, "-m", "tpucache"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


def run(words: list[str | Path], folder: Path, shell: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in a shell that closes, redirects or limits something around it."""
    command = shlex.join(map(str, [*PROGRAM, *words]))
    return subprocess.run(
        ["bash", "-c", shell.format(command) if shell else command],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "closed", [*thorough("2>&-", ">&-", "<&-"), "<&- >&- 2>&-", "2>/dev/full", *thorough("2</dev/null")]
)
def test_a_cache_is_built_whatever_standard_file_is_closed_or_full(closed: str, photos: Path, tmp_path: Path) -> None:
    jobs = "2" if closed.count("-") == 3 else "1"
    done = run(["warmup", photos, "cache", "--size", "8", "--jobs", jobs], tmp_path, f"{{}} {closed}")
    assert done.returncode == 0
    assert ("samples      150" in done.stdout) == (">&-" not in closed.replace("2>&-", ""))
    assert verify_cache(tmp_path / "cache") == []


@pytest.mark.slow
@pytest.mark.parametrize("buffering", ["", *thorough("1")])
def test_the_status_of_a_failure_is_kept_where_nobody_can_be_told(buffering: str, tmp_path: Path) -> None:
    done = run(["verify", "nothing"], tmp_path, f"PYTHONUNBUFFERED={buffering} {{}} 2> /dev/full")
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["inspect"], ["inspect", "--json"], ["verify"], ["--help"], ["train", "--help"]], ids=str
)
@pytest.mark.parametrize("buffering", ["", *thorough("1")])
def test_output_that_cannot_be_written_is_one_line_and_status_one(
    words: list[str], buffering: str, cache: Path, tmp_path: Path
) -> None:
    place = [] if "--help" in words else [cache]
    done = run([*words, *place], tmp_path, f"PYTHONUNBUFFERED={buffering} {{}} > /dev/full")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if not line.startswith("verify:")]
    assert len(lines) == 1
    assert lines[0].startswith("python -m tpucache: standard output takes no more (No space left on device)")


@pytest.mark.slow
def test_what_was_built_is_kept_when_its_report_cannot_be_written(photos: Path, tmp_path: Path) -> None:
    done = run(["warmup", photos, "cache", "--size", "8", "--jobs", "1"], tmp_path, "{} > /dev/full")
    assert done.returncode == 1
    assert "is kept" in done.stderr
    assert "Traceback" not in done.stderr
    assert verify_cache(tmp_path / "cache") == []


@pytest.mark.slow
@pytest.mark.parametrize("words", [["inspect", "--json"], ["--help"], ["train", "--help-all"]], ids=str)
def test_a_pipe_whose_reader_went_away_is_no_traceback(words: list[str], cache: Path, tmp_path: Path) -> None:
    is_help = "inspect" not in words
    done = run([*words, *([] if is_help else [cache])], tmp_path, "{{ sleep 0.1; {}; echo $? >&2; }} | true")
    assert done.stderr.split() in (["0"], ["0" if is_help else "1"])


@pytest.mark.slow
def test_a_package_in_a_zip_runs(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "tpucache").symlink_to(Path(process.__file__).parent)
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz", main="tpucache.__main__:run_command")
    words = [sys.executable, tmp_path / "app.pyz", "doctor", "--no-xla", "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, check=True, timeout=PATIENCE)
    assert json.loads(done.stdout)["tpucache"] == tpucache.__version__


def test_a_python_that_is_too_old_is_told_so_at_once() -> None:
    code = "import sys; sys.version_info = (3, 10); import tpucache"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.stderr.splitlines()[-1].startswith("ImportError: tpucache needs Python 3.11 or newer, and this is")


def test_progress_goes_on_where_nobody_can_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(28, "No space left on device")

    with Progress(3, "count", "steps", stream=Full()) as progress:
        progress.advance(3)
    monkeypatch.setattr(sys, "stderr", None)
    with Progress(3, "count", "steps") as progress:
        progress.advance(3)
    process.tell("nobody reads this")


@pytest.mark.slow
def test_a_cache_is_built_in_a_process_without_standard_error(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdout", None)
    assert build_cache(photos, tmp_path / "cache", Recipe(size=8), jobs=1).samples == 150


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [30_000, 100_000, 150_000])
@pytest.mark.parametrize("command", ["inspect", "bench", "warmup"])
def test_too_little_memory_is_one_line(kilobytes: int, command: str, cache: Path, photos: Path, tmp_path: Path) -> None:
    words = [photos, "built", "--variants", "1", "--augment", "standard"] if command == "warmup" else [cache]
    done = run([command, *words], tmp_path, f"ulimit -v {kilobytes}; {{}}")
    if done.returncode == 0:  # on a machine where less is enough
        assert done.stdout
        return
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[-1].startswith("python -m tpucache: memory is short")
    assert "ulimit -v" in lines[-1]
    assert [line for line in lines[:-1] if not line.startswith("to do:")] == []


WORK_WITHOUT_ROOM = """
import resource
from pathlib import Path
from tpucache.store.ahead import Threads
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))
with Threads(2) as pool:
    print(pool.submit(pow, 2, 3).result())
"""


def test_that_no_thread_starts_for_want_of_memory_is_no_line_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORK_WITHOUT_ROOM],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    assert (done.stdout, done.stderr) == ("8\n", "")


def test_a_lack_of_memory_is_told_of_although_a_source_failed_by_it(tmp_path: Path) -> None:
    (tmp_path / "short_by_test.py").write_text('def photos():\n    raise RuntimeError("can\'t start new thread")\n')
    done = run(["warmup", "short_by_test:photos", "built"], tmp_path)
    assert (done.returncode, done.stderr.startswith("python -m tpucache: memory is short")) == (1, True), done.stderr


@pytest.mark.parametrize(
    ("error", "is_short"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (ImportError("libtorch.so: failed to map segment from shared object"), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (ImportError("libgomp.so: cannot allocate memory in static TLS block"), False),
        (OSError(28, "No space left on device"), False),
        (ValueError("can't allocate memory"), False),
        (KeyError("a"), False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_errors(error: Exception, is_short: bool) -> None:
    outer = ImportError("it cannot be imported")
    outer.__cause__ = error
    for each in (error, outer):
        assert (process.shortage(each) is not None) == is_short


# A library whose import is interrupted, which makes of it what numpy's does: an ImportError of many lines.
INTERRUPTED_IMPORT = """
import os, signal, threading, time
{thread}
try:
    os.kill(os.getpid(), signal.{number})
    time.sleep(600)
except BaseException as error:
    raise ImportError("a long explanation\\n" * 50) from error
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("thread", ["", "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"])
def test_a_signal_during_an_import_is_one_line_and_status_three(number: str, thread: str, tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text(INTERRUPTED_IMPORT.format(number=number, thread=thread))
    done = run(["inspect", "cache"], tmp_path)
    assert (done.returncode, done.stderr) == (3, f"python -m tpucache: {process.INTERRUPTED}\n")


#: A source that sends its process a signal, in different ways: each is a name for `warmup MODULE:NAME`.
STOPPING = """
import os, signal, threading, time

def stop():
    os.kill(os.getpid(), int(os.environ["STOP_WITH"]))
    time.sleep(60)

def converts():  # as libraries do that catch all
    try:
        stop()
    except BaseException as error:
        raise RuntimeError("a library made this of it") from error

def waits():
    threading.Thread(target=time.sleep, args=(600,)).start()
    stop()

def cleans():
    try:
        stop()
    finally:
        stop()
"""


@pytest.fixture
def stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], list[str]]]:
    """Return a function that returns a command which is sent a signal; handlers are those of a plain program."""
    (tmp_path / "stopping_by_test.py").write_text(STOPPING)
    monkeypatch.syspath_prepend(tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    plain = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

    def command(name: str, number: int) -> list[str]:
        monkeypatch.setenv("STOP_WITH", str(int(number)))
        monkeypatch.setitem(ENVIRONMENT, "STOP_WITH", str(int(number)))
        return ["warmup", f"stopping_by_test:{name}", str(tmp_path / "cache"), "--jobs", "1"]

    for number, handler in plain.items():
        signal.signal(number, handler)
    yield command
    left = {number: signal.getsignal(number) for number in plain}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert left == plain


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["stop", "converts", "cleans"])
def test_a_signal_is_one_line_and_status_three(
    name: str, number: int, stopping: Callable[[str, int], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(stopping(name, number)) == 3
    assert capsys.readouterr().err == f"tpucache: {process.INTERRUPTED}\n"
    assert not process.is_leaving()


@pytest.mark.slow
def test_a_command_that_is_interrupted_does_not_wait_for_threads(
    stopping: Callable[[str, int], list[str]], tmp_path: Path
) -> None:
    began = time.monotonic()
    done = run(stopping("waits", signal.SIGINT), tmp_path)
    assert (done.returncode, done.stderr) == (3, f"python -m tpucache: {process.INTERRUPTED}\n")
    assert time.monotonic() - began < PATIENCE / 2


def test_signals_that_the_program_handles_or_ignores_are_left_to_it(
    stopping: Callable[[str, int], list[str]],
) -> None:
    taken: list[int] = []
    own: list[Any] = [lambda number, _: taken.append(number), signal.SIG_IGN]
    for handler in own:
        signal.signal(signal.SIGINT, handler)
        try:
            with process.stoppable():
                os.kill(os.getpid(), signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    assert taken == [signal.SIGINT]


def test_a_command_in_another_thread_changes_no_handler(stopping: Callable[[str, int], list[str]]) -> None:
    def look() -> Any:
        with process.stoppable():
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(look).result() == signal.SIG_DFL


@pytest.mark.usefixtures("stopping")
def test_a_request_is_taken_once_and_a_second_signal_interrupts() -> None:
    stop = StopRequest()
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_due
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert stop.is_due


@pytest.mark.usefixtures("stopping")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_waits_for_data_does_not_wait_any_more(number: int) -> None:
    def wait() -> None:
        os.kill(os.getpid(), number)
        time.sleep(PATIENCE)

    stop = StopRequest()
    with pytest.raises(Stopped, match="interrupted while waiting for data"), stop.on_signals():
        process.wait_for(wait)
    assert type(stop.to_error(Stopped(""))) is KeyboardInterrupt
    several = StopRequest()
    several.share(lambda own: own)
    with several.on_signals():  # the others wait for this process's part of the step
        process.wait_for(lambda: os.kill(os.getpid(), number))
        assert several.is_due
