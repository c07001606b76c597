"""The script of the page of findings writes names as Python does, and reads what Python wrote."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any, Final

import pytest
from hostile_texts import HOSTILE
from patience import PATIENCE

from tpucache.redact import join_names, part_names, to_cell
from tpucache.report.page import fill_template

_CONSTANTS: Final = r"^const \w+ = (?:\"|new RegExp\().*?;$"
_FUNCTIONS: Final = r"^function (?:cell|marked|partNames|unquoted|joinNames)\(.*?^}$"


@pytest.fixture(scope="module")
def script() -> str:
    """The functions of the page that make cells, without those that need a browser."""
    text = fill_template("findings.js", {}, "tpucache.insight")
    return "\n".join(found[0] for part in (_CONSTANTS, _FUNCTIONS) for found in re.finditer(part, text, re.M | re.S))


def evaluated(script: str, expression: str, values: list[Any]) -> Any:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: no script of a page is run")
    code = f"{script}\nconsole.log(JSON.stringify(JSON.parse({json.dumps(json.dumps(values))}).map({expression})))"
    done = subprocess.run([node, "-"], input=code, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return json.loads(done.stdout)


def test_cells_are_those_that_python_makes(script: str) -> None:
    texts = [*HOSTILE, "-1-1", "+.5", "-1_0", "-inf;nan", "=1;2"]
    quoted = ['"{}"'.format(to_cell(text).replace('"', '""')) for text in texts]
    assert evaluated(script, "cell", texts) == quoted


def test_several_classes_of_a_sample_are_joined_and_parted_as_python_does(script: str) -> None:
    lists = [[name, other] for name in HOSTILE for other in ("a", "b;c")]
    texts = [join_names(names) for names in lists]
    assert [part_names(text) for text in texts] == lists
    assert evaluated(script, 'names => joinNames(names, ";")', lists) == texts
    assert evaluated(script, 'text => partNames(text, ";")', texts) == lists
