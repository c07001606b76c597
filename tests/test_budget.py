"""The project stays within tests/budget.toml, and only public names need a docstring."""

from __future__ import annotations

import gc
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest

from scripts.checks import budget

pytestmark = pytest.mark.slow

CEILINGS = budget.read_ceilings()


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    gc.disable()  # else the collector looks at millions of nodes again and again
    try:
        return budget.measure()
    finally:
        gc.enable()


def test_nothing_is_above_its_ceiling(found: dict[str, Any]) -> None:
    assert [*budget.compare(found, CEILINGS)] == []


def test_the_ceilings_follow_each_cut_downwards(found: dict[str, Any]) -> None:
    far = {
        f"{folder} {what}": (count, sizes[what])
        for folder, sizes in CEILINGS["folders"].items()
        for what, count in found["folders"].get(folder, dict.fromkeys(sizes, 0)).items()
        if sizes[what] > 1.02 * count + 2
    }
    assert far == {}, "run `python -m scripts.checks budget --lower`"


def source_of(tmp_path: Path, name: str, text: str) -> budget.Source:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return budget.Source(path, tmp_path)


def test_comments_docstrings_and_layout_count_nothing(tmp_path: Path) -> None:
    bare = source_of(tmp_path, "tpucache/bare.py", "def f(x):\n    return f'{x} {x!r:>{x}}'\n")
    full = source_of(
        tmp_path,
        "tpucache/full.py",
        '''
        """Three words here."""

        def f(
            x):
            """And two."""
            # why
            return f'{x} {x!r:>{x}}'
        ''',
    )
    assert bare.tokens() == full.tokens() == 8
    assert (bare.words(), full.words()) == (0, 5)


@pytest.mark.parametrize(
    ("code", "mechanism"),
    [
        ("from tpucache.machine import fcntl", "locks of files"),
        ("import fcntl", "locks of files"),
        ("import threading\nthreading.Thread()", "threads"),
        ("def f():\n    from concurrent.futures import ThreadPoolExecutor", "threads"),
        ("from time import sleep", "pauses"),
        ("import time\ntime.sleep(1)", "pauses"),
        ("import ctypes.util", "ctypes"),
        ("import os\nos.register_at_fork(before=print)", "fork hooks"),
    ],
)
def test_a_second_place_of_a_mechanism_is_noticed(code: str, mechanism: str, tmp_path: Path) -> None:
    found = {"places": budget.find_places([source_of(tmp_path, "tpucache/new.py", code)])}
    assert [*budget.compare(found, CEILINGS)] == [f"places {mechanism}: tpucache/new.py is a new place"]


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("from tpucache.store import _x", {"private": 1, "replaced": 0}),
        ("import tpucache.store\ntpucache.store._x", {"private": 1, "replaced": 0}),
        ("def test(loader):\n    loader._reader", {"private": 1, "replaced": 0}),
        ("import os\nos._exit(1)\nself._x = row._replace()", {"private": 0, "replaced": 0}),
        ("from tpucache import store\nmonkeypatch.setattr(store, 'X', 1)", {"private": 0, "replaced": 1}),
        ("monkeypatch.setattr('tpucache.store.X', 1)", {"private": 0, "replaced": 1}),
        ("import os\nmonkeypatch.setattr(os, 'getpid', int)", {"private": 0, "replaced": 0}),
    ],
)
def test_tests_that_reach_inside_are_counted(code: str, count: dict[str, int], tmp_path: Path) -> None:
    assert budget.count_inside([source_of(tmp_path, "tests/test_new.py", code)]) == count


def test_a_docstring_beside_that_of_the_overridden_method_is_counted(tmp_path: Path) -> None:
    text = """
    class A:
        def f(self): "Does it."
        def g(self): "Does that."

    class B(A[int]): ...

    class C(B):
        def f(self): "Does it again."
        def g(self): ...
    """
    assert budget.count_overriding([source_of(tmp_path, "tpucache/new.py", text)]) == 1


def test_every_public_name_and_its_methods_have_a_docstring() -> None:
    missing = []
    for name, each in budget.public_names().items():
        if not inspect.isroutine(each) and not isinstance(each, type):
            continue
        members = vars(each).items() if isinstance(each, type) else ()
        methods = {
            f"{name}.{member}": getattr(each, member)
            for member, value in members
            if member[0] != "_" and (inspect.isroutine(value) or isinstance(value, property))
        }
        missing += [path for path, value in {name: each, **methods}.items() if not inspect.getdoc(value)]
    assert missing == []
