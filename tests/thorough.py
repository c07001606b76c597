"""What `make test` leaves to `make test-all`: cases of parametrised tests, and examples of properties."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings


def thorough(*cases: object) -> list[ParameterSet]:
    """Mark cases that repeat, for more values, what the other cases of their test show."""
    return [_marked(case) for case in cases]


def _marked(case: object) -> ParameterSet:
    mark = pytest.mark.thorough
    if isinstance(case, ParameterSet):
        return pytest.param(*case.values, marks=[*case.marks, mark], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else [case]), marks=mark)


def examples(number: int) -> int:
    """Return how many examples a property gets that needs `number` of them where others have 100."""
    return number * settings.default.max_examples // 100
