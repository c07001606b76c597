"""Which tests may be skipped where CI is set: those that the machine cannot run, and those that another step runs."""

from __future__ import annotations

import os
import re

import pytest

#: Patterns of reasons. Whoever adds a package here says which other step runs its tests.
ALLOWED = (
    r"needs (fastai|flax|grain|keras|timm|torchvision|transformers): `python -m scripts.checks integrations`",
    r"flax is not installed",  # the same step runs it
    r"torch_xla is not installed: it has no release for this Python or machine",
    r"no browser is found",
    r"no GPU is found",
    r"nginx is not installed on this machine",
    r"no file system may be mounted here",
    r"this (Pillow|filesystem|system) has no ",
    r"other C libraries give memory back by their own rules",
    r"the page shows a file of 4 KiB pages",
)


def failing(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a report of a skip into a failure where CI is set, unless its reason is among those that are allowed."""
    if report.outcome != "skipped" or hasattr(report, "wasxfail") or not os.environ.get("CI"):
        return
    reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not any(re.search(pattern, reason) for pattern in ALLOWED):
        report.outcome = "failed"
        report.longrepr = (
            f"{reason}\nIn CI nothing is skipped for want of a package: add it to the extra `dev` of pyproject.toml, "
            "or, where it cannot be installed beside the others, name the step that runs this test in tests/skips.py."
        )
