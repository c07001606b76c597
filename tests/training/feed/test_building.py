"""Building: how long a run waited while its cache was built, and later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tpucache.training.feed.building import Building


class Clock:
    def __init__(self) -> None:
        self.now = self.waited = 0.0

    def pass_(self, seconds: float, waited: float) -> None:
        self.now, self.waited = self.now + seconds, self.waited + waited


def test_waiting_is_told_of_the_epochs_that_built_the_cache_and_of_the_others() -> None:
    clock = Clock()
    shown: Any = SimpleNamespace(
        is_finished=False,
        place="kept",
        cache=SimpleNamespace(built=0.25, is_growing=True),
        manifest=SimpleNamespace(total_bytes=7),
    )
    building = Building(shown, lambda: clock.now)
    building.begin(lambda: clock.waited)
    clock.pass_(10, 8)
    assert building.text == "cache built 25%, waited 80%"
    building.begin(lambda: clock.waited)  # after the warm-up, which does not end it
    building.end()
    building.end_epoch()
    clock.pass_(100, 0)  # an evaluation
    building.end()  # a stop in it
    shown.is_finished = True
    for _ in range(2):
        building.begin(lambda: clock.waited)
        clock.pass_(5, 1)
        building.end()
        building.end_epoch()
    assert building.text == ""
    assert building.to_dict() == {"cache": "kept", "bytes": 7, "epochs": 1, "waited": 0.8, "later": 0.2}


def test_of_a_finished_cache_nothing_is_told() -> None:
    finished: Any = SimpleNamespace(cache=SimpleNamespace(is_growing=False))
    building = Building(finished)
    building.begin(lambda: 0.0)
    building.end()
    assert (building.text, building.to_dict()) == ("", {})
