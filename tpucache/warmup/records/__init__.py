"""Turns one sample into its records. Opens no file; only this folder imports image libraries.

Code here that does not know the sample's path raises a `refusal`, and its caller adds the path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tpucache.errors import SampleError


def refusal(reason: str) -> SampleError:
    """Return the error for a sample that cannot be used, still without its path."""
    return SampleError("", reason)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Add a sample's path to each SampleError of the `with` block."""
    try:
        yield
    except SampleError as error:
        raise SampleError(path, error.reason) from error
