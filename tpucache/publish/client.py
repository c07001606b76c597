"""Kaggle's own client, run as a program. Only it knows the token: nothing here reads, keeps or shows one."""

from __future__ import annotations

import csv
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tpucache.errors import PublishError
from tpucache.process import tell

State = Literal["ready", "pending", "failed", "unknown"]

NAME: Final = "kaggle"
_ASK_SECONDS: Final = 120
_PAGE: Final = "100"
_MAX_PAGES: Final = 100
_SIGNED_OUT: Final = re.compile(
    r"authentication required|unauthorized|\b401\b|kaggle\.json|kaggle auth login|credentials", re.IGNORECASE
)
_NEXT: Final = "Next Page Token = "
# After some errors the client exits with status 0 and prints them on standard output only.
_REFUSED: Final = re.compile(r"creation error|upload unsuccessful|^skipping", re.IGNORECASE)


def create_command(folder: str | Path, *, public: bool) -> list[str]:
    """Return the command that makes a new dataset of a folder."""
    return [NAME, "datasets", "create", "-p", str(folder), *(["--public"] if public else [])]


def version_command(folder: str | Path, message: str) -> list[str]:
    """Return the command that makes a folder the next version of its dataset."""
    return [NAME, "datasets", "version", "-p", str(folder), "-m", message]


@dataclass(frozen=True)
class KaggleClient:
    """The `kaggle` program at a path."""

    program: str

    @classmethod
    def find(cls) -> KaggleClient | None:
        """Return the client on PATH, or None."""
        program = shutil.which(NAME)
        return cls(program) if program else None

    def state(self, dataset_id: str) -> State | None:
        """Return the state of a dataset, None where none is visible. Raises PublishError when signed out."""
        done = self._ask(["datasets", "status", dataset_id])
        output = f"{done.stdout}\n{done.stderr}".lower()
        if done.returncode:
            if _SIGNED_OUT.search(output):
                raise PublishError(f"{NAME} is not signed in: run `{NAME} auth login`, or see its own help")
            return None
        if "ready" in output:
            return "ready"
        if re.search(r"pending|running|queued|creating|uploading", output):
            return "pending"
        return "failed" if re.search(r"error|fail|delet", output) else "unknown"

    def upload(self, command: Sequence[str]) -> None:
        """Run an upload and pass its output on to standard error. Raises PublishError when it fails."""
        lines: list[str] = []
        words = [self.program, *command[1:]]
        # Its progress bars go to standard error anyway.
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, errors="replace") as process:  # noqa: S603  # no shell, our own words
            for line in process.stdout or ():
                tell(line.rstrip("\n"))
                lines = [*lines[-50:], line.strip()]
        refused = [line for line in lines if _REFUSED.search(line)]
        if process.returncode or refused:
            reason = refused[0] if refused else next((line for line in reversed(lines) if line), "see above")
            raise PublishError(f"`{shlex.join(command)}` failed with status {process.returncode}: {reason}")

    def files(self, dataset_id: str) -> dict[str, int | None]:
        """Return the names of a dataset's files with their bytes, None where only rounded. Raises PublishError."""
        listed: dict[str, int | None] = {}
        token: str | None = None
        for _ in range(_MAX_PAGES):
            paging = ["--page-size", _PAGE, *(["--page-token", token] if token else [])]
            done = self._ask(["datasets", "files", dataset_id, "--csv", *paging])
            if done.returncode:
                reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no reason given"]
                raise PublishError(f"{dataset_id} cannot be listed: {reason[0]}")
            page, token = parse_listing(done.stdout)
            listed |= page
            if not token:
                return listed
        raise PublishError(f"{dataset_id} has more than {_MAX_PAGES} pages of files")

    def _ask(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(  # noqa: S603  # no shell, our own words
                [self.program, *words],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                check=False,
                timeout=_ASK_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PublishError(f"`{NAME} {shlex.join(words)}` did not answer: {error}") from error


def parse_listing(text: str) -> tuple[dict[str, int | None], str | None]:
    """Return the files on a page of `kaggle datasets files --csv`, and the token of the next page, if there is one."""
    lines = text.splitlines()
    token = next((line.removeprefix(_NEXT).strip() for line in lines if line.startswith(_NEXT)), None)
    start = next((at for at, line in enumerate(lines) if line.startswith("name,")), len(lines))
    rows = csv.DictReader(lines[start:])
    # Older clients round: 12MB.
    return {row["name"]: int(row["size"]) if (row.get("size") or "").isdecimal() else None for row in rows}, token


def left_out(sent: Mapping[str, int], arrived: Mapping[str, int | None]) -> list[str]:
    """Return each file that did not arrive as it was sent, as a few words."""
    found = [f"{name} is missing" for name in sent if name not in arrived]
    for name, size in sent.items():
        there = arrived.get(name)
        if there is not None and there != size:
            found.append(f"{name} has {there:,} bytes there and {size:,} here")
    return found
