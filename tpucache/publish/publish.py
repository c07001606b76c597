"""Publish a cache as a Kaggle dataset: verify the cache, make the folder, upload the folder, and check what arrived.

Kaggle's own client, the program `kaggle`, does the upload. Only that program reads the user's token.
"""

from __future__ import annotations

import csv
import itertools
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tpucache.errors import DamageError, PublishError
from tpucache.process import tell
from tpucache.publish.bundle import Bundle, make_bundle
from tpucache.publish.rules import Metadata, PublishOptions
from tpucache.store.manifest import Manifest, ShardEntry
from tpucache.store.verify import verify_cache

State = Literal["ready", "pending", "failed", "unknown"]

_NAME: Final = "kaggle"
_ASK_SECONDS: Final = 120
_PAGE: Final = "100"
_SIGNED_OUT: Final = re.compile(
    r"authentication required|unauthorized|\b401\b|kaggle\.json|kaggle auth login|credentials", re.IGNORECASE
)
_NEXT: Final = "Next Page Token = "
#: Words of `requests` and `urllib3` when a server could not be asked, and the statuses of a server that cannot answer.
_UNANSWERED: Final = re.compile(r"max retries|connection|timed out|timeout|name resolution|\b50[0234]\b")
# After some errors the client exits with status 0, and prints the error only on standard output.
_REFUSED: Final = re.compile(r"creation error|upload unsuccessful|^skipping", re.IGNORECASE)
_INTERVAL: Final = 5.0
# Seconds until Kaggle lists all files of a new dataset, and of a new version. At first it lists the previous version.
_NEW_DATASET_SECONDS: Final = 10.0
_NEW_VERSION_SECONDS: Final = 60.0
_MOST_NAMED: Final = 10


@dataclass(frozen=True)
class Published:
    """The folder to upload, the command that uploads it, and whether the command was run."""

    bundle: Bundle
    command: str
    uploaded: bool

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.bundle.folder),
            "files": self.bundle.files,
            "bytes": self.bundle.total_bytes,
            "command": self.command,
            "uploaded": self.uploaded,
        }


def prepare(
    cache: str | Path,
    metadata: Metadata,
    out: str | Path | None = None,
    on_progress: Callable[[ShardEntry], None] = lambda entry: None,
    *,
    hashes: bool = False,
) -> Bundle:
    """Verify a cache and make the folder to upload (see `make_bundle`). `on_progress` is called after each shard.

    Raises DamageError for a damaged cache, and the errors of `make_bundle`.
    """
    damages = verify_cache(cache, on_progress)
    if damages:
        names = ", ".join(sorted({damage.name for damage in damages})[:_MOST_NAMED])
        raise DamageError(f"{cache} is damaged: {names}. Run `tpucache verify {cache}`, and build the cache again")
    return make_bundle(cache, metadata, out, hashes=hashes)


def send(
    bundle: Bundle, options: PublishOptions | None = None, announce: Callable[[str], None] = lambda command: None
) -> Published:
    """Upload a folder with Kaggle's client, as a new dataset or as the dataset's next version, and check what arrived.

    Nothing is uploaded on a dry run, or when the client is not on PATH. `announce` is called with the client's command
    before it runs. Raises PublishError.
    """
    options = options or PublishOptions()
    words = ["create", "-p", str(bundle.folder), *(["--public"] if options.public else [])]
    program = None if options.dry_run else shutil.which(_NAME)
    client, is_new = KaggleClient(program or _NAME), True
    if program is not None:
        try:
            is_new = client.state(bundle.metadata.dataset_id) is None
        except PublishError as error:
            announce(_command(words))
            raise PublishError(f"{error}; then run `{_command(words)}`") from error
    if not is_new:
        manifest = Manifest.load(bundle.folder)
        message = f"{manifest.samples:,} samples, {manifest.records:,} records, {manifest.fingerprint[:12]}"
        words = ["version", "-p", str(bundle.folder), "-m", options.message or message]
    announce(_command(words))
    if program is not None:
        client.upload(words)
        _await_arrival(client, bundle, options.patience, is_new=is_new)
    return Published(bundle, _command(words), program is not None)


def _command(words: Sequence[str]) -> str:
    return shlex.join([_NAME, "datasets", *words])


def _await_arrival(client: KaggleClient, bundle: Bundle, patience: float, *, is_new: bool) -> None:
    """Wait until Kaggle lists all files of a bundle with the right sizes.

    Raises PublishError if that takes longer than `patience` seconds, or if Kaggle has processed the dataset and still
    lists other files after a short time.
    """
    dataset_id, began = bundle.metadata.dataset_id, time.monotonic()
    while True:
        state: State | None = "unknown"
        try:
            state = client.state(dataset_id)
            missing = [] if state == "pending" else _differences(bundle, client.files(dataset_id))
        except PublishError as error:  # the upload has ended, so ask again
            missing = [str(error)]
        if state != "pending" and not missing:
            return
        passed = time.monotonic() - began
        settled = _NEW_DATASET_SECONDS if is_new else _NEW_VERSION_SECONDS
        limit = patience if state == "pending" else min(patience, settled)
        if state == "failed" or passed + _INTERVAL > limit:
            break
        time.sleep(_INTERVAL)
    reason = "; ".join(missing[:_MOST_NAMED]) or f"Kaggle is still preparing it after {passed:,.0f} s"
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    raise PublishError(
        f"{dataset_id} differs from what was sent: {reason}{more}. Look at "
        f"https://www.kaggle.com/datasets/{dataset_id}, then publish again, which makes a new version"
    )


def _differences(bundle: Bundle, arrived: dict[str, int | None]) -> list[str]:
    """Return one text for each file that is missing at Kaggle or has another size."""
    found = [f"{name} is missing" for name in bundle.files if name not in arrived]
    for name, size in bundle.files.items():
        there = arrived.get(name)
        if there is not None and there != size:
            found.append(f"{name} has {there:,} bytes at Kaggle and {size:,} here")
    return found


@dataclass(frozen=True)
class KaggleClient:
    """Kaggle's client: the program `kaggle` at the path `program`."""

    program: str

    def state(self, dataset_id: str) -> State | None:
        """Return Kaggle's state of a dataset; None if there is none. Raises PublishError without an answer."""
        done = self._ask(["status", dataset_id])
        said = f"{done.stdout}\n{done.stderr}"
        # Words in the dataset's name say nothing: it may be "connection-500" or "already-there".
        output = said.lower().replace(dataset_id.lower().partition("/")[2], "")
        if done.returncode:
            if _SIGNED_OUT.search(output):
                raise PublishError(f"{_NAME} is not signed in: run `{_NAME} auth login`, or see `{_NAME} --help`")
            if _UNANSWERED.search(output):
                reason = said.strip().rpartition("\n")[2]
                raise PublishError(
                    f"`{_NAME} datasets status {dataset_id}`: {reason}. Check the network, and try again"
                )
            return None
        if "ready" in output:
            return "ready"
        if re.search(r"pending|running|queued|creating|uploading", output):
            return "pending"
        return "failed" if re.search(r"error|fail|delet", output) else "unknown"

    def upload(self, words: Sequence[str]) -> None:
        """Run the command of an upload, and pass its output on to standard error."""
        lines: list[str] = []
        # Standard error is not redirected, so the client's progress bars are shown.
        with subprocess.Popen(  # noqa: S603  # no shell, our own words
            [self.program, "datasets", *words], stdout=subprocess.PIPE, text=True, errors="replace"
        ) as process:
            for line in process.stdout or ():
                tell(line.rstrip("\n"))
                lines = [*lines[-50:], line.strip()]
        refused = [line for line in lines if _REFUSED.search(line)]
        if process.returncode or refused:
            reason = (refused or list(filter(None, reversed(lines))) or ["see above"])[0]
            raise PublishError(f"`{_command(words)}` failed with status {process.returncode}: {reason}")

    def files(self, dataset_id: str) -> dict[str, int | None]:
        """Return the bytes of each file of a dataset; None if Kaggle lists only a rounded size, such as 12MB."""
        listed: dict[str, int | None] = {}
        token = ""
        while True:
            paging = ["--page-size", _PAGE, *(["--page-token", token] if token else [])]
            done = self._ask(["files", dataset_id, "--csv", *paging])
            if done.returncode:
                reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no reason given"]
                raise PublishError(f"{dataset_id} cannot be listed: {reason[0]}")
            before, lines = token, done.stdout.splitlines()
            token = next((line.removeprefix(_NEXT).strip() for line in lines if line.startswith(_NEXT)), "")
            for row in csv.DictReader(itertools.dropwhile(lambda line: not line.startswith("name,"), lines)):
                listed[row["name"]] = int(row["size"]) if row["size"].isdecimal() else None
            if token in ("", before):
                return listed

    def _ask(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(  # noqa: S603  # no shell, our own words
                [self.program, "datasets", *words],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                check=False,
                timeout=_ASK_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PublishError(f"`{_command(words)}` did not answer: {error}") from error
