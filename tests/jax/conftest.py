"""JAX programs in processes of their own, because the number of simulated devices is set once a process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python with these arguments on so many simulated CPU devices; what still runs at the end is killed.

    Keywords are added to its environment.
    """
    started = []

    def run(*arguments: object, devices: int = 1, **more: object) -> subprocess.Popen[str]:
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        added = {name: str(value) for name, value in more.items()}
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **added}
        words = [sys.executable, *map(str, arguments)]
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(process)
        return process

    try:
        yield run
    finally:
        for process in started:
            process.kill()


@pytest.fixture(scope="session")
def port() -> Callable[[], int]:
    """Return a port that is free now."""

    def find() -> int:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            return int(free.getsockname()[1])

    return find
