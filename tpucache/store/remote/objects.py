"""ObjectFolder: the files of a folder in S3 or Google Cloud Storage, by obstore.

Access keys come from the places that the clouds' own tools use. They may expire while a cache is read: so after a
refused request, the keys are looked up again and the request is sent once more.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import queue
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tpucache.errors import UsageError, redact
from tpucache.store.files import read_chunks
from tpucache.store.remote.http import ChangedError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES: Final = ("s3", "gs")

_SILENCE_SECONDS: Final = 60.0
_CONNECT_SECONDS: Final = 10.0
_LONGEST_SECONDS: Final = 600.0  # the longest time for a request of any size
_CHUNK: Final = 8 << 20
_PRECONDITION_FAILED: Final = 412
#: The metadata servers of clouds, which give keys of the machine's own account. They are asked last.
_ACCOUNTS: Final = ("169.254.169.254", "metadata.google.internal")
_KEYS: Final = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket. Keys in "
    "~/.aws are found where boto3 is installed",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
}


def is_installed() -> bool:
    """Return whether obstore is installed. Without it, fsspec reads s3:// and gs:// URLs, more slowly."""
    return importlib.util.find_spec("obstore") is not None


class ObjectFolder:
    """A folder at `s3://BUCKET/…` or `gs://BUCKET/…`. Threads may share an ObjectFolder.

    The methods raise FileNotFoundError, PermissionError if the store refuses access, ChangedError if a file was
    replaced since it was first read, OSError for other errors of the store, and UsageError in a process that was forked
    after its parent process sent a request.
    """

    local = None

    def __init__(self, url: str, silence: float | None = None, shown: str = "") -> None:
        """Make the client. A request fails after `silence` seconds without a byte (None: 60)."""
        self._url, self._silence, self._shown = url, silence or _SILENCE_SECONDS, shown
        self._scheme = url.partition("://")[0].lower()
        self._tags: dict[str, str] = {}  # the ETag of each file at its first partial read
        self._lock = threading.Lock()
        if not url.partition("://")[2].partition("/")[0]:
            raise UsageError(
                f"{shown} names no bucket: give the URL of a folder, such as {self._scheme}://bucket/cache"
            )
        self._store = self._open()

    def names(self) -> set[str]:
        import obstore

        found = self._call(obstore.list_with_delimiter, "")
        paths = [item["path"] for item in found["objects"]] + list(found["common_prefixes"])
        return {path.rstrip("/").rpartition("/")[2] for path in paths}

    def files(self) -> dict[str, int]:
        import obstore

        found = self._call(lambda store: [item for part in obstore.list(store) for item in part], "")
        return {item["path"]: int(item["size"]) for item in found}

    def version(self, name: str) -> tuple[int | None, str | None]:
        import obstore

        try:
            found = self._call(lambda store: obstore.head(store, name), name)
        except FileNotFoundError:
            return None, None
        return int(found["size"]), found.get("e_tag")

    def read(self, name: str, most: int) -> bytes | None:
        import obstore

        def get(store: ObjectStore) -> bytes | None:
            answer = obstore.get(store, name)
            return bytes(answer.bytes()) if answer.meta["size"] <= most else None

        found: bytes | None = self._call(get, name)
        return found

    def part(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        data = memoryview(bytearray(stop - start))
        self.read_into(name, start, data, None)
        yield bytes(data)

    def read_into(self, name: str, start: int, target: memoryview, size: int | None) -> None:
        """Fill `target` with a file's bytes from `start` on, by one request. `size` is the file's size, if it is known.

        All parts of a file must come from one version: each request asks for the ETag of the first part.
        """
        import obstore

        tag = self._tags.get(name)

        def get(store: ObjectStore) -> None:
            options: Any = {"range": (start, start + len(target))} | ({"if_match": tag} if tag else {})
            answer = obstore.get(store, name, options=options)
            found, found_size = answer.meta.get("e_tag"), int(answer.meta["size"])
            if size is not None and found_size != size:
                raise ChangedError(
                    f"{name} is {found_size:,} bytes in the store, the manifest says {size:,}", _PRECONDITION_FAILED
                )
            if tag and found and found != tag:
                raise ChangedError(f"{name} was replaced in the store while it was read", _PRECONDITION_FAILED)
            data = memoryview(answer.bytes())
            if tuple(answer.range) != (start, start + len(target)) or len(data) != len(target):
                raise EOFError(f"{len(data):,} bytes came instead of {len(target):,}")
            target[:] = data
            if found:
                self._tags.setdefault(name, found)

        self._call(get, name)

    def write(self, name: str, source: Path | bytes, advance: Callable[[int], None]) -> None:
        import obstore

        def chunks(path: Path) -> Iterator[bytes]:
            done = 0
            for chunk in read_chunks(path):
                yield chunk
                done += len(chunk)
                advance(done)

        def put(store: ObjectStore) -> None:
            data = source if isinstance(source, bytes) else chunks(source)
            obstore.put(store, name, data, chunk_size=_CHUNK)

        self._call(put, name)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file, and return True. Returns False if a file with this name and other bytes exists.

        This is atomic (If-None-Match). If a store does not support that, the file is written if it does not exist, and
        read afterwards, because another process may have replaced it.
        """
        import obstore
        from obstore import exceptions as refused

        def has_data(store: ObjectStore) -> bool:
            return bytes(obstore.get(store, name).bytes()) == data

        def put(store: ObjectStore) -> bool:
            try:
                obstore.put(store, name, data, mode="create")
            except (refused.AlreadyExistsError, refused.PreconditionError):
                return has_data(store)
            except refused.NotSupportedError:
                try:
                    return has_data(store)
                except (refused.NotFoundError, FileNotFoundError):
                    obstore.put(store, name, data)
                return has_data(store)
            return True

        return bool(self._call(put, name))

    def remove(self, name: str) -> None:
        import obstore

        self._call(lambda store: obstore.delete(store, name), name)

    def make_folder(self) -> None:
        """Do nothing: object stores have no folders."""

    def close(self) -> None:
        """Do nothing: obstore closes its connections when its client is freed."""

    def _call(self, ask: Callable[[Any], Any], name: str) -> Any:
        """Send a request, and return its result. If access is refused, read the keys again and send it once more."""
        from obstore import exceptions as refused

        store = self._store
        _Use.check()
        for is_last in (False, True):
            try:
                with _without_panics():
                    return _interruptible(functools.partial(ask, store))
            except (refused.PermissionDeniedError, refused.UnauthenticatedError) as error:
                if is_last:
                    raise PermissionError(f"the store refuses {name or 'the folder'}: {_text(error)}") from None
                store = self._renew(store)
            except (refused.NotFoundError, FileNotFoundError) as error:
                raise FileNotFoundError(f"the store has no {name or 'such folder'}: {_text(error)}") from None
            except refused.PreconditionError:
                message = f"{name} was replaced in the store while it was read"
                raise ChangedError(message, _PRECONDITION_FAILED) from None
            except refused.BaseError as error:
                if any(place in str(error) for place in _ACCOUNTS):
                    raise PermissionError(f"there are no keys for this bucket: {_KEYS[self._scheme]}") from None
                raise OSError(_text(error)) from None
        raise PermissionError(f"the store refuses {name}")

    def _renew(self, old: ObjectStore) -> ObjectStore:
        with self._lock:
            if self._store is old:  # otherwise another thread has renewed it
                self._store = self._open()
            return self._store

    def _open(self) -> ObjectStore:
        from obstore.store import from_url

        # Servers that environment variables (AWS_ENDPOINT_URL...) set in place of AWS's own.
        endpoints = [
            value for name, value in os.environ.items() if self._scheme == "s3" and name.startswith("AWS_ENDPOINT_URL")
        ]
        options: Any = {
            "connect_timeout": timedelta(seconds=min(_CONNECT_SECONDS, self._silence)),
            "read_timeout": timedelta(seconds=self._silence),
            "timeout": timedelta(seconds=_LONGEST_SECONDS),
            # Servers without TLS are allowed only if the user names one in the environment.
            "allow_http": any(value.startswith("http://") for value in endpoints),
        }
        # No retries here: the caller decides when to try again.
        retries: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=self._silence)}
        more: Any = {"credential_provider": _profile_keys()} if self._scheme == "s3" else {}
        try:
            with _without_panics():
                return from_url(self._url.rstrip("/"), client_options=options, retry_config=retries, **more)
        except Exception as error:  # noqa: BLE001  # obstore does not document what it raises for wrong settings
            raise UsageError(f"{self._shown} cannot be opened: {_text(error)}") from None


class _Use:
    """The process that sent the first request. obstore's threads belong to it; a forked process does not have them."""

    process: int | None = None

    @classmethod
    def check(cls) -> None:
        if cls.process is None:
            cls.process = os.getpid()
        if cls.process != os.getpid():
            raise UsageError(
                "s3:// and gs:// cannot be read in a process that was forked after its parent process has read them: "
                'give a DataLoader multiprocessing_context="forkserver", or use CachedLoader, which needs no other '
                "processes"
            )


def _interruptible(call: Callable[[], Any]) -> Any:
    """Return the result of `call`. The main thread runs it in another thread, and waits, so that Ctrl-C works."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put((call(), None))
        except BaseException as error:  # noqa: BLE001  # it is raised where the call was made
            ended.put((None, error))

    try:
        threading.Thread(target=run, name="tpucache-store", daemon=True).start()
    except RuntimeError:  # no thread can start
        return call()
    answer, error = ended.get()
    if error is not None:
        raise error
    return answer


def _profile_keys() -> Any:
    files = (os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), "~/.aws/config")
    is_wanted = "AWS_PROFILE" in os.environ or any(Path(name).expanduser().exists() for name in files)
    if "AWS_ACCESS_KEY_ID" in os.environ or not is_wanted or importlib.util.find_spec("boto3") is None:
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider()
    except ValueError as error:
        if not type(error).__module__.startswith("botocore"):  # the files contain no keys
            return None
        failure: Exception = error
    except Exception as error:  # noqa: BLE001  # botocore raises whatever a broken file makes it raise
        failure = error
    raise UsageError(
        f"the keys of AWS cannot be read: {_text(failure)}. Repair ~/.aws or AWS_PROFILE, or set AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY"
    )


@contextlib.contextmanager
def _without_panics() -> Iterator[None]:
    """Turn a panic of obstore, which is not an Exception, into OSError. obstore still works after a panic."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise OSError(f"obstore cannot send the request: {_text(error)}") from None


def _text(error: BaseException) -> str:
    """Return an error's text in one line, without secrets and without obstore's debug output."""
    return f"{type(error).__name__}: {' '.join(redact(str(error)).partition('Debug source:')[0].split())}"
