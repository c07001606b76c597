"""No value reaches a text unescaped, and no template is filled in part."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jinja2
import pytest

import tpucache
from tpucache import DependencyError
from tpucache.report import template
from tpucache.report.template import fill

TEMPLATES = sorted(Path(tpucache.__file__).parent.glob("*/templates/*"))
#: What the card of a published cache has in its code blocks: names that are checked, and in which nothing is escaped.
CHECKED = {"wheel", "packages", "dataset_id", "variant", "metadata"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The templates of a package that only this test has."""
    (tmp_path / "texts_by_test" / "templates").mkdir(parents=True)
    (tmp_path / "texts_by_test" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "texts_by_test" / "templates"
    sys.modules.pop("texts_by_test", None)
    template._environment.cache_clear()


def stars(value):
    return re.sub(r"\S", "*", str(value))


def test_whatever_is_filled_in_is_escaped_once(folder):
    (folder / "a").write_text(
        "{% macro twice(x) %}({{ x }} {{ x }}){% endmacro %}"
        "{% set kept %}<{{ name }}>{% endset %}"
        "{{ name }} {{ twice(name) }} {{ kept }} {{ [name] }} {{ name ~ 1 }}"
    )
    assert fill("texts_by_test", "a", {"name": "ab"}, stars) == "** (** **) <**> ****** ***"


def test_a_name_without_a_value_is_an_error(folder):
    for number, text in enumerate(("{{ name }}", "{{ given.name }}", "{% for each in name %}{% endfor %}")):
        (folder / str(number)).write_text(text)
        with pytest.raises(jinja2.UndefinedError):
            fill("texts_by_test", str(number), {"given": {}}, str)


def test_without_jinja2_the_error_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(DependencyError, match=r"`pip install jinja2`, or install tpucache\[report\]"):
        fill("texts_by_test", "a", {}, str)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_no_template_of_the_package_leaves_a_value_as_it_is(path):
    text = path.read_text()
    assert "autoescape" not in text
    assert "safe" not in re.sub(r"(?<=\w \| )safe(?= }})|unsafe-inline", "", text)
    assert set(re.findall(r"(\w+) \| safe", text)) == (CHECKED if path.name == "card.md.jinja" else set())
    if path.suffix == ".html":
        allowed = re.sub(r'<script>{% include "\w+\.js" %}</script>', "", text)  # which has no value of any cache
        assert not re.search(r"<script|\son\w+=|=[^\"]?{{", allowed)  # and each value in an attribute is quoted
    if path.suffix in (".js", ".css"):
        assert not re.search(r"{{|{%|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", text)
