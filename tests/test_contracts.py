"""Every import contract of .importlinter fails when an import that it forbids is added to a copy of the package."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from thorough import thorough

import tpucache
from tpucache.store.codecs import CODECS

pytestmark = pytest.mark.slow

pytest.importorskip("importlinter")

PACKAGE = Path(tpucache.__file__).parent
FILE = PACKAGE.parent / ".importlinter"


def read_contracts() -> list[dict[str, Any]]:
    """Return the contracts, each with its id; a value of several lines is a list."""
    parser = configparser.ConfigParser()
    parser.read_string(FILE.read_text())
    found = []
    for section in parser.sections():
        if section.startswith("importlinter:contract:"):
            values = {key: text.split("\n")[1:] if "\n" in text else text for key, text in parser[section].items()}
            found.append({"id": section.rpartition(":")[2], **values})
    return found


CONTRACTS = read_contracts()
#: Contracts that allow some files what all others may not.
EXCEPTED = [
    contract
    for contract in CONTRACTS
    if any(line.partition(" -> ")[2] in contract["forbidden_modules"] for line in contract.get("ignore_imports", ()))
]


def one_of_each_type(contracts: list[dict[str, Any]]) -> list[Any]:
    """Return the contracts; all but the last of each type are thorough."""
    last = {contract["type"]: contract["id"] for contract in contracts}
    return [each if each["id"] in last.values() else thorough(each)[0] for each in contracts]


# For each line, says what import-linter finds of one contract in the package as it is now.
RUN = """
import sys
from importlinter.cli import lint_imports
for contract in sys.stdin:
    found = lint_imports(limit_to_contracts=(contract.strip(),), no_cache=True)
    print("status", found, flush=True)
"""


#: Imports of which each makes a circle: of two folders, of two files, and one by way of a third file.
CIRCLES = [
    ("tpucache.store.format", "tpucache.loading.dataset"),
    ("tpucache.training.schedule", "tpucache.training.learner"),
    ("tpucache.store.manifest", "tpucache.store.cache"),
]


def forbidden_imports(contract: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (importer, imported) of each pair of modules between which a contract forbids an import."""
    if contract["type"] == "layers":
        layers = [layer.split(" | ") for layer in contract["layers"]]
        upward = [(low, high) for above, below in combinations(layers, 2) for low in below for high in above]
        return upward + [pair for layer in layers for one in combinations(layer, 2) for pair in (one, one[::-1])]
    if contract["type"] == "independence":
        return [pair for one in combinations(contract["modules"], 2) for pair in (one, one[::-1])]
    if contract["type"] == "protected":
        (protected,) = contract["protected_modules"]
        assert contract["allowed_importers"] == [protected]  # all others may not, whatever they are
        files = (each for each in PACKAGE.iterdir() if each.suffix == ".py" or (each / "__init__.py").exists())
        modules = {f"tpucache.{each.stem}" for each in files} - {"tpucache.__init__", protected}
        return [(module, protected) for module in sorted(modules)]
    if contract["type"] == "acyclic_siblings":
        return CIRCLES
    assert contract["type"] == "forbidden", f"what does {contract['type']!r} forbid?"
    return [(source, module) for source in contract["source_modules"] for module in contract["forbidden_modules"]]


def link_text(contract: dict[str, Any], importer: str, imported: str) -> str:
    """Return how import-linter names an import; in a circle, by what is different in the two names."""
    if contract["type"] != "acyclic_siblings":
        return f"{importer} -> {imported} (l."
    one, two = next(pair for pair in zip(importer.split("."), imported.split("."), strict=False) if len({*pair}) > 1)
    return f".{one} -> .{two} (1 import)"


def file_of(module: str, package: Path) -> Path:
    path = package.parent.joinpath(*module.split("."))
    return path / "__init__.py" if (path / "__init__.py").exists() else path.with_suffix(".py")


class Linter:
    """Says what import-linter finds in a copy of the package to which imports are added."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self._folder, self._process = folder, process

    def lint(self, contract: str, imports: list[tuple[str, str]]) -> str:
        """Add imports, return what is said of a contract alone, and take the imports out again."""
        before: dict[Path, str] = {}
        for importer, imported in imports:
            path = file_of(importer, self._folder / "tpucache")
            before.setdefault(path, path.read_text())
            path.write_text(f"{path.read_text()}\n\ndef added() -> None:\n    import {imported}\n")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{contract}\n")
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
    shutil.copy(FILE, folder)
    with subprocess.Popen(
        [sys.executable, "-c", RUN],
        cwd=folder, env={"PYTHONPATH": str(folder), "COLUMNS": "300"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        try:
            yield Linter(folder, process)
        finally:
            process.kill()


@pytest.mark.parametrize(
    "contract",
    one_of_each_type(CONTRACTS),
    ids=lambda contract: contract["id"],
)
def test_a_contract_notices_each_import_that_it_forbids(contract: dict[str, Any], linter: Linter) -> None:
    imports = forbidden_imports(contract)
    assert imports
    said = linter.lint(contract["id"], imports)
    assert "1 broken" in said
    for importer, imported in imports:
        assert link_text(contract, importer, imported) in said


@pytest.mark.parametrize(
    "contract",
    one_of_each_type(EXCEPTED),
    ids=lambda contract: contract["id"],
)
def test_a_library_may_be_imported_where_its_contract_says_alone(contract: dict[str, Any], linter: Linter) -> None:
    paths = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("*.py")]
    modules = {path.removesuffix(".__init__") for path in paths if path.startswith(tuple(contract["source_modules"]))}
    libraries = contract["forbidden_modules"]
    excepted = [each.split(" -> ") for each in contract["ignore_imports"]]
    said = linter.lint(contract["id"], [(module, f"{name}.core") for module in modules for name in libraries])
    for library in libraries:
        allowed = {module for module in modules for own, name in excepted if name == library and fnmatch(module, own)}
        assert allowed
        assert {module for module in modules if f"{module} -> {library} (l." not in said} == allowed


def test_each_codec_is_in_the_contract_of_codecs() -> None:
    (contract,) = (each for each in CONTRACTS if each["id"] == "codecs")
    places = {".".join(type(CODECS[name]).__module__.split(".")[:4]) for name in CODECS.own}
    assert places == {*contract["modules"]}


def test_nothing_is_noticed_where_nothing_was_added(linter: Linter) -> None:
    assert "0 broken" in linter.lint(CONTRACTS[0]["id"], [])
