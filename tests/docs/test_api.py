"""Every public name has its entry in docs/api/, followed by an example, and the examples of each page run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from thorough import thorough

import tpucache

PACKAGE = Path(tpucache.__file__).parent
FOLDER = PACKAGE.parent / "docs" / "api"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")
ENTRY = re.compile(r"^::: (tpucache[\w.]*)$", re.MULTILINE)
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def public_names() -> dict[str, str]:
    """Return where each public name is defined, as `module.name`, by the names under which it is imported."""
    found = {}
    for stub in PACKAGE.rglob("__init__.pyi"):
        module = ".".join(stub.parent.relative_to(PACKAGE.parent).parts)
        for each in ast.parse(stub.read_text()).body:
            if isinstance(each, ast.ImportFrom):
                found.update({f"{module}.{alias.asname}": f"{each.module}.{alias.name}" for alias in each.names})
    return found


def program(page: Path) -> str:
    """Return the examples of a page as one program, whose lines have the numbers that they have in the page."""
    text = page.read_text()
    lines = [""] * text.count("\n")
    for block in EXAMPLE.finditer(text):
        first = text.count("\n", 0, block.start(1))
        for number, line in enumerate(block[1].splitlines(), first):
            lines[number] = line
    return "\n".join(lines)


def test_every_public_name_has_an_entry_and_every_entry_is_a_public_name():
    names = public_names()
    entries = {entry for page in PAGES for entry in ENTRY.findall(page.read_text())} - {"tpucache.errors"}
    defined = {names.get(entry, entry) for entry in entries}
    assert sorted(set(names.values()) - defined) == []
    assert sorted(entry for entry in entries if entry not in {*names, *names.values()}) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "errors.md"], ids=lambda page: page.stem)
def test_every_entry_is_followed_by_an_example_in_its_own_part(page):
    for part in re.split(r"^## .*$", page.read_text(), flags=re.MULTILINE):
        entries = [entry.start() for entry in ENTRY.finditer(part)]
        examples = [block.start() for block in EXAMPLE.finditer(part)]
        assert not entries or (examples and max(entries) < max(examples)), part[max(entries) :]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        *thorough(*(page for page in PAGES if page.stem in ("training", "warmup"))),
        *(page for page in PAGES if page.stem not in ("training", "warmup", "jax")),
    ],
    ids=lambda page: page.stem,
)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(program(page), str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.thorough
def test_the_examples_for_jax_run(tmp_path, run_with_jax):
    """In a process of its own: in one with JAX, every later fork warns."""
    (tmp_path / "page.py").write_text(program(FOLDER / "jax.md"))
    done = run_with_jax("page.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "(8, 2)" in done.stdout
