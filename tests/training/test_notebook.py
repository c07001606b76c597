"""In a notebook a run shows its curves while it trains; in any other program it shows nothing."""

from __future__ import annotations

import importlib.util
import io
import math
import sys
import types

import pytest
import tiny_models
from PIL import Image

from tpucache.training import RunOptions, TrainSettings, train
from tpucache.training.watch import NotebookCurves, notebook_watchers, warn_once


class Display:
    """What IPython's display shows: pictures in places, each place as often as it is drawn."""

    def __init__(self):
        self.places = []

    def display(self, picture, display_id):
        assert display_id
        self.places.append([picture])
        return types.SimpleNamespace(update=self.places[-1].append)


@pytest.fixture
def notebook(monkeypatch):
    """A stand-in for IPython in a notebook."""
    shown = Display()
    module = types.ModuleType("IPython")
    module.version_info = (9, 0)  # matplotlib asks
    module.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    module.display = types.ModuleType("IPython.display")
    module.display.Image, module.display.display = lambda data: data, shown.display
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", module.display)
    return shown


@pytest.mark.slow
def test_a_run_draws_its_curves_in_one_place_after_each_epoch(cache, notebook, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("tpucache.training.watch._EVERY", math.inf)  # a slow machine draws within an epoch
    train(tiny_models.tiny, cache, 0.2, TrainSettings(epochs=2, batch_size=50), options=RunOptions(replay=False))
    (place,) = notebook.places
    assert len(place) == 2
    first, second = (Image.open(io.BytesIO(png)) for png in place)
    assert first.size == second.size
    assert first.tobytes() != second.tobytes()


@pytest.mark.slow
def test_within_an_epoch_pictures_are_ten_seconds_apart():
    pytest.importorskip("matplotlib")
    now, shown = [0.0], []
    watcher = NotebookCurves(shown.append, lambda: now[0])
    for number in range(6):
        now[0] += 4
        watcher.losses(100 + number, [1.0 / (number + 1)])
    assert len(shown) == 2


@pytest.mark.slow
def test_a_notebook_that_shows_nothing_ends_no_run(caplog):
    pytest.importorskip("matplotlib")
    warn_once.cache_clear()

    def fail(png):
        raise RuntimeError("the kernel is gone")

    watcher = NotebookCurves(fail)
    watcher.losses(0, [1.0, 0.5])
    for epoch in (1, 2):
        watcher.epoch({"epoch": epoch, "step": 2 * epoch, "valid_loss": 0.5})
    assert caplog.text.count("RuntimeError: the kernel is gone") == 1


def test_nothing_is_shown_in_a_terminal_or_without_matplotlib(notebook, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert notebook_watchers() == ()
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", types.SimpleNamespace)
    assert notebook_watchers() == ()
    monkeypatch.delitem(sys.modules, "IPython")
    assert notebook_watchers() == ()
