"""Publish a cache as a Kaggle dataset: verify the cache, make the folder, upload the folder, and check what arrived.

Kaggle's own client, the program `kaggle`, does the upload. Only that program reads the user's token.
"""

from __future__ import annotations

import csv
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
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

NAME: Final = "kaggle"
_ASK_SECONDS: Final = 120
_PAGE: Final = "100"
_MAX_PAGES: Final = 100
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
    """The result of `send`: `bundle` is the folder to upload, and `command` the command that uploads the folder.

    `uploaded` is whether the command was run.
    """

    bundle: Bundle
    command: str
    uploaded: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "folder": str(self.bundle.folder),
            "files": self.bundle.files,
            "bytes": self.bundle.total_bytes,
            "wheels": [wheel.to_dict() for wheel in self.bundle.wheels],
            "command": self.command,
            "uploaded": self.uploaded,
        }


def prepare(
    cache: str | Path,
    metadata: Metadata,
    out: str | Path | None = None,
    on_progress: Callable[[ShardEntry], None] = lambda entry: None,
    wheels: str | None = None,
    *,
    hashes: bool = False,
) -> Bundle:
    """Verify a cache and make the folder to upload. `on_progress` is called after each verified shard.

    The folder is `out`, by default `CACHE.publish` next to the cache. `wheels` is the tag of a Python version, such as
    "cp312": add the wheels that the cache's codecs need with this version. With `hashes`, add the perceptual hashes of
    all pictures; `tpucache.insight` uses these to find copies.

    Raises DamageError for a damaged cache, and the errors of `make_bundle`.
    """
    damages = verify_cache(cache, on_progress)
    if damages:
        names = ", ".join(sorted({damage.name for damage in damages})[:_MOST_NAMED])
        raise DamageError(f"{cache} is damaged: {names}. Run `tpucache verify {cache}`, and build the cache again")
    return make_bundle(cache, metadata, out, wheels, hashes=hashes)


def send(
    bundle: Bundle, options: PublishOptions | None = None, announce: Callable[[str], None] = lambda command: None
) -> Published:
    """Upload a folder with Kaggle's client, as a new dataset or as the dataset's next version, and check what arrived.

    Nothing is uploaded on a dry run, or when the client is not on PATH. `announce` is called with the client's command,
    before the command runs. Raises PublishError when the client is not signed in or fails, or when Kaggle lists other
    files than were sent.
    """
    options = options or PublishOptions()
    command = create_command(bundle.folder, public=options.public)
    client = None if options.dry_run else KaggleClient.find()
    if client is None:
        announce(shlex.join(command))
        return Published(bundle, shlex.join(command), False)
    try:
        new = client.state(bundle.metadata.dataset_id) is None
    except PublishError as error:
        announce(shlex.join(command))
        raise PublishError(f"{error}; then run `{shlex.join(command)}`") from error
    if not new:
        command = version_command(bundle.folder, options.message or _message(Manifest.load(bundle.folder)))
    announce(shlex.join(command))
    client.upload(command)
    _await_arrival(client, bundle, options.patience, new=new)
    return Published(bundle, shlex.join(command), True)


def _message(manifest: Manifest) -> str:
    return f"{manifest.samples:,} samples, {manifest.records:,} records, {manifest.fingerprint[:12]}"


def _await_arrival(client: KaggleClient, bundle: Bundle, patience: float, *, new: bool) -> None:
    """Wait until Kaggle lists all files of a bundle with the right sizes.

    Raises PublishError, which names the files that differ, if that takes longer than `patience` seconds, if Kaggle
    cannot process the dataset, or if it has processed the dataset and still lists other files after a short time.
    """
    dataset_id, began = bundle.metadata.dataset_id, time.monotonic()
    while True:
        try:
            state = client.state(dataset_id)
        except PublishError as error:  # the upload has ended, so ask again
            state, missing = "unknown", [str(error)]
        else:
            missing = [] if state == "pending" else _missing(client, bundle)
        if state != "pending" and not missing:
            return
        passed = time.monotonic() - began
        limit = patience if state == "pending" else min(patience, _NEW_DATASET_SECONDS if new else _NEW_VERSION_SECONDS)
        if state == "failed" or passed + _INTERVAL > limit:
            break
        time.sleep(_INTERVAL)
    reason = "; ".join(missing[:_MOST_NAMED]) or f"Kaggle is still preparing it after {passed:,.0f} s"
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    raise PublishError(
        f"{dataset_id} differs from what was sent: {reason}{more}. Look at "
        f"https://www.kaggle.com/datasets/{dataset_id}, then publish again, which makes a new version"
    )


def _missing(client: KaggleClient, bundle: Bundle) -> list[str]:
    """Return one text for each file that is missing at Kaggle or has another size.

    If the files cannot be listed, the reason is the only text.
    """
    try:
        return find_differences(bundle.files, client.files(bundle.metadata.dataset_id))
    except PublishError as error:
        return [str(error)]


def create_command(folder: str | Path, *, public: bool) -> list[str]:
    """Return the command that uploads a folder as a new dataset."""
    return [NAME, "datasets", "create", "-p", str(folder), *(["--public"] if public else [])]


def version_command(folder: str | Path, message: str) -> list[str]:
    """Return the command that uploads a folder as the next version of its dataset."""
    return [NAME, "datasets", "version", "-p", str(folder), "-m", message]


@dataclass(frozen=True)
class KaggleClient:
    """Kaggle's client: the program `kaggle` at the path `program`."""

    program: str

    @classmethod
    def find(cls) -> KaggleClient | None:
        """Return the client that is on PATH, or None if there is none."""
        program = shutil.which(NAME)
        return cls(program) if program else None

    def state(self, dataset_id: str) -> State | None:
        """Return Kaggle's state of a dataset; None if the client does not find the dataset.

        Raises PublishError if the user is signed out, or if the client or Kaggle does not answer.
        """
        done = self._ask(["datasets", "status", dataset_id])
        said = f"{done.stdout}\n{done.stderr}"
        # Words in the dataset's name say nothing: it may be "connection-500" or "already-there".
        output = said.lower().replace(dataset_id.lower().partition("/")[2], "")
        if done.returncode:
            if _SIGNED_OUT.search(output):
                raise PublishError(f"{NAME} is not signed in: run `{NAME} auth login`, or see `{NAME} --help`")
            if _UNANSWERED.search(output):
                reason = said.strip().rpartition("\n")[2]
                raise PublishError(f"`{NAME} datasets status {dataset_id}`: {reason}. Check the network, and try again")
            return None
        if "ready" in output:
            return "ready"
        if re.search(r"pending|running|queued|creating|uploading", output):
            return "pending"
        return "failed" if re.search(r"error|fail|delet", output) else "unknown"

    def upload(self, command: Sequence[str]) -> None:
        """Run the command of an upload, and pass its output on to standard error. Raises PublishError when it fails."""
        lines: list[str] = []
        words = [self.program, *command[1:]]
        # Standard error is not redirected, so the client's progress bars are shown.
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, errors="replace") as process:  # noqa: S603  # no shell, our own words
            for line in process.stdout or ():
                tell(line.rstrip("\n"))
                lines = [*lines[-50:], line.strip()]
        refused = [line for line in lines if _REFUSED.search(line)]
        if process.returncode or refused:
            reason = refused[0] if refused else next((line for line in reversed(lines) if line), "see above")
            raise PublishError(f"`{shlex.join(command)}` failed with status {process.returncode}: {reason}")

    def files(self, dataset_id: str) -> dict[str, int | None]:
        """Return the size in bytes of each file of a dataset; None if Kaggle lists only a rounded size.

        Raises PublishError.
        """
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
    """Return the files on a page of `kaggle datasets files --csv`, and the token of the next page.

    The files are sizes in bytes by name, None for a rounded size. The token is None on the last page.
    """
    lines = text.splitlines()
    token = next((line.removeprefix(_NEXT).strip() for line in lines if line.startswith(_NEXT)), None)
    start = next((at for at, line in enumerate(lines) if line.startswith("name,")), len(lines))
    rows = csv.DictReader(lines[start:])
    # Older clients list rounded sizes, such as 12MB.
    return {row["name"]: int(row["size"]) if (row.get("size") or "").isdecimal() else None for row in rows}, token


def find_differences(sent: Mapping[str, int], arrived: Mapping[str, int | None]) -> list[str]:
    """Return one text for each sent file that did not arrive, or that arrived with another size.

    `sent` and `arrived` have sizes in bytes by file name; a size that arrived is None if it is not known exactly.
    """
    found = [f"{name} is missing" for name in sent if name not in arrived]
    for name, size in sent.items():
        there = arrived.get(name)
        if there is not None and there != size:
            found.append(f"{name} has {there:,} bytes at Kaggle and {size:,} here")
    return found
