"""A process that runs one contender and answers by lines of JSON; only the one that is asked works.

Its own end is `peers/protocol.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

from scripts.commands import ROOT, CommandError, reason

PATIENCE: Final = 900.0  # seconds for an answer, the compiling of a pipeline and a slow disk included

Setting = dict[str, Any]


class Worker:
    """The process of a module of `scripts.bench.peers`, run by the interpreter of the peer's environment."""

    def __init__(self, python: Path, role: tuple[str, str], setting: Setting, log: Path) -> None:
        self._log = log
        command = [str(python), "-m", f"scripts.bench.peers.{role[0]}", role[1], json.dumps(setting)]
        # Where the environment forbids bytecode, each process would compile all modules anew.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
            )

    def ask(self, command: str, argument: object = "", patience: float = PATIENCE) -> dict[str, Any]:
        """Send a command, return the answer once the process is idle again. Raises CommandError."""
        try:
            _pipe(self._process.stdin).write(f"{command} {argument}\n".encode())
            answer = self._answer(patience)
        except BrokenPipeError:
            answer = b""
        if not answer:
            raise CommandError(reason(self._log))
        self._settle()
        return dict(json.loads(answer))

    def rate(self, argument: object) -> float:
        """Let it work for a turn, and return images a second. Raises CommandError."""
        turn = self.ask("go", argument)
        return float(turn["images"] / turn["seconds"])

    def close(self) -> None:
        """End the process and those it started."""
        _pipe(self._process.stdin).close()  # it ends by itself at the end of its input
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            _pipe(self._process.stdout).close()

    def _answer(self, patience: float) -> bytes:
        deadline = time.monotonic() + patience
        output = _pipe(self._process.stdout).fileno()
        line = b""
        while not line.endswith(b"\n"):
            if select.select([output], [], [], 0.5)[0]:
                part = os.read(output, 1 << 16)
                if not part:
                    return b""
                line += part
            elif self._process.poll() is not None:
                return b""
            elif time.monotonic() > deadline:
                raise CommandError(f"gave no answer within {patience:.0f} s")
        return line

    def _settle(self) -> None:
        """Wait, not for ever, until the process and its children have read ahead as far as they do, and are still."""
        before = -1
        for _ in range(50):
            now = _session_ticks(self._process.pid)
            if now - before <= 1 and before >= 0:
                return
            before = now
            time.sleep(0.1)


def log_name(words: Sequence[str]) -> str:
    """Return a file name that words make, without what is hard to type."""
    return "".join(letter for letter in "-".join(" ".join(words).split()) if letter.isalnum() or letter in "-.")


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise TypeError("the process was started without pipes")
    return stream


def _session_ticks(session: int) -> int:
    """Return the processor time that the processes of a session have used, in clock ticks."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))  # its own, and those of its children that were waited for
    return ticks
