"""Whoever asks a command to stop is obeyed, wherever the signal arrives, with one line and the right status."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from interrupting import PLACES
from thorough import thorough

from tpucache import signals
from tpucache.cli import main
from tpucache.errors import UnfinishedError
from tpucache.training.interrupt import Stopped, StopRequest

BOUND = 60.0  # what only bounds a hang
LINE = f"tpucache: {signals.INTERRUPTED}"
BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
PROGRAM = Path(__file__).parent / "interrupting.py"


#: One for each time that the work went on to its end: what it ends with says nothing, as a signal has come.
unnoticed: list[bool] = []


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """Handlers as a program has them that sets none; they and the hook are put back, and no thread is left."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    hook = sys.unraisablehook
    unnoticed.clear()
    yield
    left = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.unraisablehook
    for each, handler in before.items():
        signal.signal(each, handler)
    assert left == (signal.default_int_handler, signal.SIG_DFL, hook)
    assert not unnoticed


def send(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def go_on() -> None:
    """Do what a command does that has not noticed a signal."""
    until = time.monotonic() + BOUND
    while time.monotonic() < until:
        time.sleep(0.001)
    unnoticed.append(True)


def inspect(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any]) -> int:
    """Run a command of which this is the work, and return its status."""
    monkeypatch.setattr("tpucache.store.manifest.Manifest.load", lambda _: work())
    return main(["inspect", "anywhere"])


@BOTH
@pytest.mark.parametrize("place", list(PLACES))
def test_an_interrupt_that_python_or_a_library_drops_is_raised_again(
    place: str, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = _thread._count()

    def work() -> None:
        PLACES[place](lambda: send(number))
        go_on()

    assert inspect(monkeypatch, work) == 3
    assert capsys.readouterr().err == f"{LINE}\n"
    until = time.monotonic() + BOUND
    while _thread._count() > threads and time.monotonic() < until:
        time.sleep(0.001)
    assert _thread._count() <= threads


def test_an_interrupt_is_raised_again_as_often_as_it_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[BaseException] = []

    def work() -> None:
        for _ in range(3):
            try:
                if not dropped:
                    send()
                go_on()
            except BaseException as error:  # noqa: BLE001  # this is what libraries do
                dropped.append(error)
        go_on()

    assert inspect(monkeypatch, work) == 3
    assert [type(error) for error in dropped] == [KeyboardInterrupt] * 3


def test_what_is_done_because_of_an_interrupt_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    resent = signals._send

    def counted(thread: Any, number: int) -> None:
        resent(thread, number)
        seen.append("again")

    def work() -> None:
        try:
            send()
            go_on()
        finally:
            try:
                raise OSError("of something that is closed")
            except OSError:
                until = time.monotonic() + BOUND
                while len(seen) < 2 and time.monotonic() < until:
                    time.sleep(0.001)
            seen.append("cleaned")

    monkeypatch.setattr(signals, "_send", counted)
    assert inspect(monkeypatch, work) == 3
    assert seen == ["again", "again", "cleaned"]


def test_a_second_signal_interrupts_what_the_first_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        try:
            send()
            go_on()
        finally:
            send()
            go_on()

    began = time.monotonic()
    assert inspect(monkeypatch, work) == 3
    assert time.monotonic() - began < BOUND / 2


@pytest.mark.parametrize(
    "error", [OSError("no"), RuntimeError("no"), UnfinishedError("the time limit"), BrokenPipeError()]
)
def test_an_error_that_was_made_of_an_interrupt_is_the_interrupt(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        try:
            send()
            go_on()
        except KeyboardInterrupt:
            pass
        raise error

    assert inspect(monkeypatch, work) == 3


def test_signals_that_the_program_handles_itself_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: taken.append(number))
    try:
        monkeypatch.setattr("tpucache.store.manifest.Manifest.load", lambda _: send())
        main(["inspect", "/nowhere"])
    except AttributeError:  # of the manifest, which is none
        pass
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert taken == [signal.SIGINT]


def test_a_command_in_another_thread_changes_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def work(_: Any) -> None:
        seen.append(signal.getsignal(signal.SIGTERM))
        raise UnfinishedError("seen")

    monkeypatch.setattr("tpucache.store.manifest.Manifest.load", work)
    thread = threading.Thread(target=lambda: seen.append(main(["inspect", "anywhere"])))
    thread.start()
    thread.join(BOUND)
    assert seen == [signal.SIG_DFL, 3]


def test_a_signal_after_the_command_is_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpucache.cli.complain", lambda *_: send() or 1)
    with pytest.raises(KeyboardInterrupt):
        main(["inspect", "/nowhere/at/all"])


def test_a_request_is_taken_once_and_a_second_signal_interrupts() -> None:
    stop = StopRequest()

    def work() -> None:
        send(signal.SIGTERM)
        assert stop.is_due
        send(signal.SIGTERM)
        go_on()

    with pytest.raises(KeyboardInterrupt), stop.on_signals():
        work()
    assert stop.is_due


@BOTH
def test_a_run_that_waits_for_data_does_not_wait_any_more(number: int) -> None:
    stop, never = StopRequest(), threading.Event()

    def wait() -> None:
        send(number)
        never.wait(BOUND)

    with pytest.raises(Stopped, match="interrupted while waiting for data"), stop.on_signals():
        signals.wait_for(wait)
    assert type(stop.to_error(Stopped(""))) is KeyboardInterrupt
    several = StopRequest()
    several.share(lambda own: own)
    with several.on_signals():
        signals.wait_for(lambda: send(number))  # the others wait for this process's part of the step
        assert several.is_due


def run_sent(place: str, number: str, words: list[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, PROGRAM, place, number, *words]
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(folder)])
    return subprocess.run(
        [str(word) for word in program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=BOUND,
    )


def errors_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines on standard error but those that say what is being done."""
    return [line for line in done.stderr.splitlines() if not line.startswith(("bench: ", "verify: ", "to do: "))]


#: Lines that Python runs: the first ones, before and in every import, until the command is at work.
FIRST_LINES = (1, 2, 3, 5, 8, 13, 21, 40, 100, 400, 1500, 6000, 20_000, 60_000)


@pytest.mark.slow
def test_a_signal_at_any_of_the_first_lines_is_one_line_and_status_three(cache: Path, tmp_path: Path) -> None:
    def stop(at: int) -> tuple[int, list[str], bool]:
        number = "SIGTERM" if at % 2 else "SIGINT"
        done = run_sent(f"lines:{at}", number, ["bench", cache, "--batch-size", "4"], tmp_path)
        return done.returncode, errors_of(done), done.stdout.startswith("sent")

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(stop, FIRST_LINES)) == [(3, [f"python -m {LINE}"], True)] * len(FIRST_LINES)


@pytest.mark.slow
def test_a_signal_in_a_commands_finalizers_and_callbacks_ends_it(cache: Path, tmp_path: Path) -> None:
    def stop(place: str) -> tuple[int, list[str], bool]:
        done = run_sent(place, "SIGINT", ["bench", cache, "--batch-size", "4"], tmp_path)
        return done.returncode, errors_of(done), done.stdout.startswith("sent")

    places = ("plain:__del__", "finalizer:bench")
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(stop, places)) == [(3, [f"python -m {LINE}"], True)] * len(places)


@pytest.mark.slow
def test_a_signal_when_the_command_has_ended_leaves_its_status(cache: Path, tmp_path: Path) -> None:
    done = run_sent("end", "SIGTERM", ["inspect", cache], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("sent\n")


STUBBORN = """
import collections, sys, time
from tpucache import process, signals
signals.begin(is_own=True)

def cleans():
    try:
        signals.os.kill(signals.os.getpid(), 2)
        time.sleep(60)
    finally:
        time.sleep(60)

class Swallowing:
    def __del__(self):
        signals.os.kill(signals.os.getpid(), 2)
        time.sleep(60)

def swallows():  # in a loop of C: between two rounds of one in Python an interrupt would leave it
    collections.deque(iter(Swallowing, None), maxlen=0)

def ends(at_exit=lambda: None):
    import atexit
    atexit.register(time.sleep, 60)
    atexit.register(at_exit)
    sys.stdout.write("kept")
    signals.finish(5, process.flush_files)
    if sys.argv[1] == "ends":
        signals.os.kill(signals.os.getpid(), 2)
    sys.exit(5)

def ends_late():
    ends(lambda: signals.os.kill(signals.os.getpid(), 2))

globals()[sys.argv[1]]() if sys.argv[1].startswith("ends") else signals.run(globals()[sys.argv[1]])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "status", "said"),
    [*thorough(("cleans", 3, LINE)), ("swallows", 3, LINE), *thorough(("ends", 5, "")), ("ends_late", 5, "")],
)
def test_a_command_that_is_not_at_its_end_soon_is_ended(work: str, status: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUBBORN, work], capture_output=True, text=True, check=False, timeout=BOUND / 2
    )
    assert (done.returncode, done.stderr.strip(), done.stdout) == (
        status,
        said,
        "kept" if work.startswith("ends") else "",
    )


def test_a_signal_that_the_process_was_started_to_ignore_stays_ignored() -> None:
    program = "from tpucache import signals; signals.begin(is_own=True); import os; os.kill(os.getpid(), 2)"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = subprocess.run([sys.executable, "-c", program], check=False, timeout=BOUND)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert done.returncode == 0
