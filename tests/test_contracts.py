"""Every import contract of pyproject.toml fails when an import that it forbids is added to a copy of the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import tpucache

pytestmark = pytest.mark.slow

pytest.importorskip("importlinter")

PACKAGE = Path(tpucache.__file__).parent
PROJECT = PACKAGE.parent / "pyproject.toml"
LINTER: dict[str, Any] = tomllib.loads(PROJECT.read_text())["tool"]["importlinter"]
CONTRACTS: list[dict[str, Any]] = LINTER["contracts"]
EXCEPTED = [contract for contract in CONTRACTS if "ignore_imports" in contract]

# For each line, says what import-linter finds of one contract in the package as it is now.
RUN = """
import sys
from importlinter.cli import lint_imports
for contract in sys.stdin:
    found = lint_imports(limit_to_contracts=(contract.strip(),), no_cache=True)
    print("status", found, flush=True)
"""


def forbidden_imports(contract: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (importer, imported) of each pair of modules between which a contract forbids an import."""
    if contract["type"] == "layers":
        layers = [layer.split(" | ") for layer in contract["layers"]]
        upward = [(low, high) for above, below in combinations(layers, 2) for low in below for high in above]
        return upward + [pair for layer in layers for one in combinations(layer, 2) for pair in (one, one[::-1])]
    if contract["type"] == "independence":
        return [pair for one in combinations(contract["modules"], 2) for pair in (one, one[::-1])]
    assert contract["type"] == "forbidden", f"what does {contract['type']!r} forbid?"
    return [(source, module) for source in contract["source_modules"] for module in contract["forbidden_modules"]]


def file_of(module: str, package: Path) -> Path:
    path = package.parent.joinpath(*module.split("."))
    return path / "__init__.py" if (path / "__init__.py").exists() else path.with_suffix(".py")


class Linter:
    """Says what import-linter finds in a copy of the package to which imports are added."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self._folder, self._process = folder, process

    def lint(self, contract: str, imports: list[tuple[str, str]]) -> str:
        """Add imports, return what is said of a contract alone, and take the imports out again."""
        (number,) = (number for number, each in enumerate(CONTRACTS) if each["name"] == contract)
        before: dict[Path, str] = {}
        for importer, imported in imports:
            path = file_of(importer, self._folder / "tpucache")
            before.setdefault(path, path.read_text())
            path.write_text(f"{path.read_text()}\n\ndef added() -> None:\n    import {imported}\n")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"c{number}\n")
        self._process.stdin.flush()
        lines = [self._process.stdout.readline()]
        while lines[-1] and not lines[-1].startswith("status "):
            lines.append(self._process.stdout.readline())
        for path, text in before.items():
            path.write_text(text)
        said = "".join(lines)
        assert lines[-1] == f"status {bool(imports):d}\n", said
        return said


@pytest.fixture(scope="module")
def linter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Linter]:
    folder = tmp_path_factory.mktemp("linted")
    shutil.copytree(PACKAGE, folder / "tpucache", ignore=shutil.ignore_patterns("__pycache__"))
    text = PROJECT.read_text()
    for number, each in enumerate(CONTRACTS):
        text = text.replace(f'name = "{each["name"]}"\n', f'id = "c{number}"\nname = "{each["name"]}"\n')
    (folder / "pyproject.toml").write_text(text)
    with subprocess.Popen(
        [sys.executable, "-c", RUN],
        cwd=folder, env={"PYTHONPATH": str(folder), "COLUMNS": "300"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        try:
            yield Linter(folder, process)
        finally:
            process.kill()


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract["name"])
def test_a_contract_notices_each_import_that_it_forbids(contract: dict[str, Any], linter: Linter) -> None:
    imports = forbidden_imports(contract)
    assert imports
    said = linter.lint(contract["name"], imports)
    assert "1 broken" in said
    for importer, imported in imports:
        assert f"{importer} -> {imported} (l." in said


@pytest.mark.parametrize("contract", EXCEPTED, ids=lambda contract: contract["name"])
def test_a_library_may_be_imported_where_its_contract_says_alone(contract: dict[str, Any], linter: Linter) -> None:
    paths = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("*.py")]
    modules = {path.removesuffix(".__init__") for path in paths if path.startswith(tuple(contract["source_modules"]))}
    libraries = contract["forbidden_modules"]
    excepted = [each.split(" -> ") for each in contract["ignore_imports"]]
    said = linter.lint(contract["name"], [(module, f"{name}.core") for module in modules for name in libraries])
    for library in libraries:
        allowed = {module for module in modules for own, name in excepted if name == library and fnmatch(module, own)}
        assert allowed
        assert {module for module in modules if f"{module} -> {library} (l." not in said} == allowed


def test_nothing_is_noticed_where_nothing_was_added(linter: Linter) -> None:
    assert "0 broken" in linter.lint(CONTRACTS[0]["name"], [])
