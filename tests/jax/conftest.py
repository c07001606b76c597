"""A port for JAX programs that run in several processes."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def port() -> Callable[[], int]:
    """Return a port that is free now."""

    def find() -> int:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            return int(free.getsockname()[1])

    return find
