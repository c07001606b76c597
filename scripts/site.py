"""Gives mkdocs what `docs/` does not hold: pages from elsewhere, and the help of options as documentation.

`.mkdocs.yml` names this file twice: as a hook of mkdocs, and as an extension of Griffe, which reads the package for the
API pages.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any, Final

import griffe
from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).parents[1]

#: Pages of the site by the file of the repository that they are made of.
PAGES: Final = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", ".github/CONTRIBUTING.md": "contributing.md"}

_LINK: Final = re.compile(r"(\]\()([^)#\s]+)")
_FOLDERS: Final = {"docs/notebooks": "notebooks/01-warmup.ipynb"}  # the site has no page of a folder


def on_files(files: Files, config: Any) -> Files:
    """Add the pages whose files are not in `docs/`, with links as the site has them."""
    for source, page in PAGES.items():
        text = _LINK.sub(lambda link: link[1] + to_site_link(link[2]), (ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def to_site_link(link: str) -> str:
    """Return where a link of a page in the repository's top folder, or one below it, leads in the site."""
    path = link.removeprefix("../")
    return PAGES.get(path, _FOLDERS.get(path, path.removeprefix("docs/")))


def on_page_markdown(_markdown: str, *, page: Any, **_: Any) -> None:
    """Have the search show guides before pages of the API and of the history, which name everything more often."""
    if page.file.src_uri.startswith("api/") or page.file.src_uri in ("changelog.md", "numbers.md"):
        page.meta.setdefault("search", {"boost": 0.1})


class Defaults(griffe.Extension):
    """Shows defaults as values, and documents each field that is an option by the help of the command line."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Take default and help out of `name: type = option(default, help)`, and show a constant's value."""
        if isinstance(attr.value, griffe.ExprCall) and str(attr.value.function).endswith("option"):
            found = evaluate(attr.value, attr)
            if isinstance(found, dataclasses.Field):
                (option,) = found.metadata.values()
                attr.docstring = attr.docstring or griffe.Docstring(option[0], parent=attr)
                attr.value = "" if found.default is dataclasses.MISSING else repr(found.default)
        elif "class-attribute" in attr.labels:
            attr.value = to_value(attr.value, attr)

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Show the values of constants that are defaults."""
        for parameter in func.parameters:
            parameter.default = to_value(parameter.default, func)


def to_value(default: Any, where: griffe.Object) -> Any:
    """Return the value of a default that is a constant's name, as text, and any other default unchanged."""
    if not isinstance(default, (griffe.ExprName, griffe.ExprAttribute)):
        return default
    value = evaluate(default, where)
    return repr(value) if isinstance(value, (str, bytes, int, float, tuple)) else default


def evaluate(expression: griffe.Expr, where: griffe.Object) -> Any:
    """Return the value of an expression of the package's code in its module, or None for a name of another scope."""
    try:
        return eval(str(expression), vars(importlib.import_module(where.module.path)))
    except NameError:
        return None
