"""A browser without a window, which playwright drives: for pictures of pages, and for their checks and tests."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from scripts.commands import CommandError

_PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS: Final = ("--no-sandbox", "--disable-gpu", "--disable-quic")  # beside what playwright gives by itself


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """Yield playwright's browser: the system's Chromium, or else the one that playwright has installed.

    Raises CommandError where there is none, ImportError without playwright.
    """
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    with sync_playwright() as started:
        if program is None and not Path(started.chromium.executable_path).exists():
            raise CommandError(f"no browser is found, neither {', '.join(_PROGRAMS)} nor playwright's own")
        browser = started.chromium.launch(executable_path=program, args=list(_OPTIONS))
        try:
            yield browser
        finally:
            browser.close()
