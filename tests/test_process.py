"""A command's process: closed standard files, output that cannot be written, little memory, signals at any moment."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from thorough import thorough

from tpucache import Recipe, build_cache, cli, process, signals, verify_cache
from tpucache.errors import DependencyError, RecipeError, TpucacheError, calling
from tpucache.progress import Progress

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
    assert ("150 samples" in done.stdout) == (">&-" not in closed.replace("2>&-", ""))
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
def test_a_pipe_whose_reader_went_away_is_no_traceback(cache: Path, tmp_path: Path) -> None:
    done = run(["inspect", cache, "--json"], tmp_path, "{{ sleep 0; {}; echo $? >&2; }} | true")
    assert done.stderr.split() in (["1"], ["0"])


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
    assert (done.returncode, done.stderr) == (3, f"python -m tpucache: {signals.INTERRUPTED}\n")


LEFT_OPEN = """
import atexit, sys
from tpucache.process import end_soon

class Log:
    def __init__(self, path):
        self.file, self.me = open(path, "w"), self

atexit.register(end_soon)
log = Log(sys.argv[1])
log.file.write("kept")
"""


@pytest.mark.slow
def test_files_that_users_code_leaves_open_are_written_at_the_end(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LEFT_OPEN, tmp_path / "log"], env=ENVIRONMENT, check=True, timeout=PATIENCE)
    assert (tmp_path / "log").read_text() == "kept"


#: Leaves an object in a reference cycle, as Triton does, which at its end complains of objects that are still there.
CYCLE = """
import atexit, sys
from tpucache import process

class Attribute:
    def __del__(self):
        print("freed", flush=True)

attribute = Attribute()
attribute.own = attribute
del attribute
sys.modules.update(dict.fromkeys(sys.argv[1:], sys))
atexit.register(process.end_soon)
"""


@pytest.mark.parametrize(("library", "printed"), [("triton", "freed\n"), ("another", "")])
def test_objects_in_cycles_are_freed_at_the_end_only_where_triton_would_print_them(library: str, printed: str) -> None:
    words = [sys.executable, "-c", CYCLE, library]
    found = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert (found.stdout, found.stderr) == (printed, "")


@pytest.mark.parametrize("kind", [DependencyError, RecipeError])
def test_memory_that_is_short_while_a_library_is_imported_is_told_as_that(
    kind: type[TpucacheError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_library(_: object) -> int:
        with calling("albumentations", kind):
            raise OSError(12, "Cannot allocate memory", "zoneinfo")

    monkeypatch.setattr(cli, "_main", import_library)
    assert cli.main([]) == 1
    assert "tpucache: memory is short (" in capsys.readouterr().err
