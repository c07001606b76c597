"""Tables by which the core finds functions of wings. Only this file names modules of a wing.

tpucache has a core and two wings, the folders `training` and `insight`. The core imports no wing, and no wing imports
the other. If the core or a wing needs a function of a wing, this file names the function as `module:name`, and
`imports.load` imports it on demand. If the folder of a wing is missing, everything else works, and `load` says what is
missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tpucache.imports import load, missing_part

if TYPE_CHECKING:
    from tpucache.report.page import Page

#: The commands, by the groups of `--help`. Each has a module, whose function `add` adds the command, and a line of
#: help.
COMMANDS: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "build": {
        "warmup": ("tpucache.cli.warming", "Build a cache, or finish a build that was interrupted."),
        "relabel": ("tpucache.cli.warming", "Give a cache other labels, folds or columns."),
        "delete": ("tpucache.cli.warming", "Make a version of a cache without some samples, or undo that."),
        "compact": ("tpucache.cli.warming", "Write a cache anew, without deleted samples and versions."),
        "verify": ("tpucache.cli.warming", "Compare every byte of a cache with its manifest, or repair it."),
    },
    "look": {
        "inspect": ("tpucache.cli.inspecting", "Show what a cache contains, its size, and how it was made."),
        "preview": ("tpucache.cli.inspecting", "Draw a contact sheet: samples down, variants across."),
        "report": ("tpucache.cli.inspecting", "Write a page about a cache, its findings, or a run."),
        "bench": ("tpucache.cli.inspecting", "Measure how fast this machine reads a cache."),
        "doctor": ("tpucache.cli.inspecting", "Show what this machine has for tpucache, and what to fix."),
        "compare": ("tpucache.insight.commands", "Find pictures that caches have in common."),
        "suspects": ("tpucache.insight.commands", "List the samples whose labels are the least probable."),
    },
    "train": {
        "train": ("tpucache.training.commands.train", "Train a model on a cache, or on a source."),
        "predict": ("tpucache.training.commands.predict", "Predict every sample of a cache by trained models."),
    },
    "share": {
        "publish": ("tpucache.cli.publishing", "Publish a cache as a Kaggle Dataset."),
        "fetch": ("tpucache.cli.publishing", "Copy a cache from a URL into a folder."),
        "push": ("tpucache.cli.publishing", "Copy a cache to a URL."),
        "cached": ("tpucache.cli.publishing", "List the caches that this machine keeps, or remove them."),
    },
}

#: The functions that make pages for `report`. Each returns a `report.page.Page`.
PAGES: Final[Mapping[str, str]] = {
    "cache": "tpucache.report.inspect:report_cache",
    "run": "tpucache.training.page:report_run",
    "findings": "tpucache.insight.page:report_findings",
}

#: The functions of wings that others call, by name.
FUNCTIONS: Final[Mapping[str, str]] = {
    "hashes": "tpucache.insight.hashing:hashes",  # for publish --hashes and push --hashes
    "folds": "tpucache.insight.commands:make_folds",  # for relabel --make-folds
    "leak": "tpucache.insight.comparison:find_leak",  # for train
    "upload": "tpucache.training.commands.device:open_upload",  # for bench --upload
    "upload_rate": "tpucache.training.feed.upload:measure_xla",  # for doctor
}


def report_page(name: str, *arguments: Any, **named: Any) -> Page:
    """Return the page made by the function at `name` in PAGES. Raises DependencyError if its wing is missing."""
    page: Page = load(PAGES[name])(*arguments, **named)
    return page


def call(name: str, *arguments: Any, **named: Any) -> Any:
    """Call the function at `name` in FUNCTIONS; return its result. Raises DependencyError if its wing is missing."""
    return load(FUNCTIONS[name])(*arguments, **named)


def is_there(name: str) -> bool:
    """Return whether the wing with the function at `name` in FUNCTIONS is installed."""
    return not missing_part(FUNCTIONS[name])
