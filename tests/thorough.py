"""Cases of a parametrised test that `make test` leaves to `make test-all`."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet


def thorough(*cases: object) -> list[ParameterSet]:
    """Mark cases that repeat, for more values, what the other cases of their test show."""
    return [_marked(case) for case in cases]


def _marked(case: object) -> ParameterSet:
    mark = pytest.mark.thorough
    if isinstance(case, ParameterSet):
        return pytest.param(*case.values, marks=[*case.marks, mark], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else [case]), marks=mark)
