"""The tables by which the core finds what is not its own: the only place where it names modules of a wing.

tpucache has a core and two wings, `training` and `insight`. The core imports nothing of a wing, and a wing nothing of
the other one. What one of them needs of another is named here as `module:name`, and is imported by `imports.load` when
somebody asks for it. Without the folder of a wing all else works, and `load` says what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tpucache.imports import load, missing_part

if TYPE_CHECKING:
    from tpucache.report.page import Page

#: The commands, by the groups of `--help` and by the modules whose function `add` adds them to the command line.
COMMANDS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "build": {
        "tpucache.cli.warming": ("warmup", "relabel", "delete", "compact", "verify"),
        "tpucache.cli.planning": ("plan",),
    },
    "look": {
        "tpucache.cli.inspecting": ("inspect", "preview", "report", "bench", "doctor"),
        "tpucache.insight.commands": ("compare", "suspects"),
    },
    "train": {
        "tpucache.training.commands.train": ("train",),
        "tpucache.training.commands.predict": ("predict",),
    },
    "share": {"tpucache.cli.publishing": ("publish", "fetch", "push", "cached")},
}

#: The functions that make the pages of `report`. Each returns a `report.page.Page`.
PAGES: Final[Mapping[str, str]] = {
    "cache": "tpucache.report.cache_page:report_cache",
    "run": "tpucache.training.page:report_run",
    "findings": "tpucache.insight.page:report_findings",
}

#: The functions of a wing that others call, by name.
FUNCTIONS: Final[Mapping[str, str]] = {
    "hashes": "tpucache.insight.hashing:hashes",  # for publish --hashes and push --hashes
    "folds": "tpucache.insight.commands:make_folds",  # for relabel --make-folds
    "leak": "tpucache.insight.comparison:find_leak",  # for train
    "upload": "tpucache.training.commands.device:open_upload",  # for bench --upload
    "upload_rate": "tpucache.training.feed.upload:measure_xla",  # for doctor
}


def make_page(name: str, *arguments: Any, **named: Any) -> Page:
    """Return the page that one of PAGES makes. Raises DependencyError where its wing is not installed."""
    page: Page = load(PAGES[name])(*arguments, **named)
    return page


def call(name: str, *arguments: Any, **named: Any) -> Any:
    """Return what one of FUNCTIONS returns. Raises DependencyError where its wing is not installed."""
    return load(FUNCTIONS[name])(*arguments, **named)


def is_there(name: str) -> bool:
    """Return whether the wing of one of FUNCTIONS is installed."""
    return not missing_part(FUNCTIONS[name])
