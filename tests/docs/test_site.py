"""What the site shows of the package's code: defaults as values."""

from __future__ import annotations

import re

import pytest

griffe = pytest.importorskip("griffe")


def test_defaults_of_functions_and_options_are_shown_as_values():
    from scripts.site import Defaults

    found = griffe.load("tpucache", extensions=griffe.load_extensions(Defaults()))
    copies = found["insight.copies.pairs"].parameters["threshold"].default
    assert re.fullmatch(r"\d+", str(copies))
    assert str(found["ondevice.settings.AugmentSettings"].parameters["zoom"].default) == "0.08"
    threads = found["training.settings.TrainSettings"]["threads"]
    assert re.fullmatch(r"\d+", str(threads.value))
    assert threads.docstring.value.startswith("threads that read")
