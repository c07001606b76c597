"""Gives mkdocs what `docs/` does not hold: pages from elsewhere, and the help of options as documentation.

`.mkdocs.yml` names this file twice: as a hook of mkdocs, and as an extension of Griffe, which reads the package for the
API pages.
"""

from __future__ import annotations

import ast
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


class OptionHelp(griffe.Extension):
    """Documents each field of a dataclass that is an option, by its default and the help of the command line."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Take default and text out of `name: type = option(default, text)`."""
        call = attr.value
        if attr.docstring is None and isinstance(call, griffe.ExprCall) and str(call.function) == "option":
            attr.docstring = griffe.Docstring(ast.literal_eval(str(call.arguments[1])), parent=attr)
            attr.value = call.arguments[0]
