"""Publishes a cache as a Kaggle Dataset: verify it, make the folder, upload it, check what arrived."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tpucache.errors import DamageError, PublishError
from tpucache.publish.bundle import Bundle, make_bundle
from tpucache.publish.client import KaggleClient, create_command, left_out, version_command
from tpucache.publish.options import Metadata, PublishOptions
from tpucache.store.manifest import Manifest, ShardEntry
from tpucache.store.verify import verify_cache

_INTERVAL: Final = 5.0
# A listing may be a little behind, and for a while a dataset that has a new version shows the one before.
_GRACE: Final = {True: 10.0, False: 60.0}
_NAMED: Final = 10


@dataclass(frozen=True)
class Published:
    """The result: the folder and its files, the command that uploads it, and whether it was run."""

    bundle: Bundle
    command: str
    uploaded: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values."""
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
    progress: Callable[[ShardEntry], None] = lambda entry: None,
    wheels: str | None = None,
) -> Bundle:
    """Verify a cache and make the folder to upload; `progress` is called after each verified shard.

    `wheels` is the tag of a Python, such as "cp312": wheels of the packages that the cache's codecs need are added.

    Raises DamageError for a damaged cache, and what `make_bundle` raises.
    """
    damages = verify_cache(cache, progress)
    if damages:
        names = ", ".join(sorted({damage.name for damage in damages})[:_NAMED])
        raise DamageError(f"{cache} is damaged: {names}. Run `python -m tpucache verify {cache}` and warm it up again")
    return make_bundle(cache, metadata, out, wheels)


def send(
    bundle: Bundle, options: PublishOptions | None = None, announce: Callable[[str], None] = lambda command: None
) -> Published:
    """Upload a folder by Kaggle's client, as a new dataset or its next version, and check what arrived.

    Without the client on PATH, or on a dry run, nothing is uploaded. `announce` is called with the command before it is
    run. Raises PublishError when the client is not signed in, fails, or leaves a file out.
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
        raise PublishError(f"{error}; then `{shlex.join(command)}`") from error
    if not new:
        command = version_command(bundle.folder, options.message or _message(Manifest.load(bundle.folder)))
    announce(shlex.join(command))
    client.upload(command)
    _await_arrival(client, bundle, options.patience, new=new)
    return Published(bundle, shlex.join(command), True)


def _message(manifest: Manifest) -> str:
    return f"{manifest.samples:,} samples x {len(manifest.variants)} variants, {manifest.fingerprint[:12]}"


def _await_arrival(client: KaggleClient, bundle: Bundle, patience: float, *, new: bool) -> None:
    """Wait until all files are listed as they were sent. Raises PublishError that names those that are not."""
    dataset_id, began = bundle.metadata.dataset_id, time.monotonic()
    while True:
        state = client.state(dataset_id)
        missing = [] if state == "pending" else _missing(client, bundle)
        if state != "pending" and not missing:
            return
        passed = time.monotonic() - began
        limit = patience if state == "pending" else min(patience, _GRACE[new])
        if state == "failed" or passed + _INTERVAL > limit:
            break
        time.sleep(_INTERVAL)
    reason = "; ".join(missing[:_NAMED]) or f"Kaggle still prepares it after {passed:,.0f} s"
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    raise PublishError(
        f"{dataset_id} is not what was sent: {reason}{more}. Look at https://www.kaggle.com/datasets/{dataset_id}, "
        "then publish again, which makes a new version"
    )


def _missing(client: KaggleClient, bundle: Bundle) -> list[str]:
    """Return each file that did not arrive as it was sent, or why the files cannot be listed."""
    try:
        return left_out(bundle.files, client.files(bundle.metadata.dataset_id))
    except PublishError as error:
        return [str(error)]
