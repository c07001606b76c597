"""A report as a whole HTML page, which needs nothing else: neither network nor script."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tpucache.errors import TpucacheError
from tpucache.report.page.markup import escape
from tpucache.report.page.style import STYLE
from tpucache.runs import check_no_run_file
from tpucache.store.copying import check_no_cache_file
from tpucache.version import __version__

# What the page may load: nothing but the pictures and the style within it. Not even its own mistakes load more.
_POLICY: Final = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Report:
    """A page about a cache or a run; a notebook shows it by itself."""

    name: str
    html: str = field(repr=False)

    def save(self, path: str | Path) -> Path:
        """Write the page to a file and return its path.

        Raises UsageError for a file of a cache or a run, TpucacheError when it cannot be written.
        """
        check_no_cache_file(Path(path))
        check_no_run_file(Path(path))
        try:
            Path(path).write_text(self.html, encoding="utf-8")
        except OSError as error:
            raise TpucacheError(f"the report cannot be written: {error}. Give another path") from error
        return Path(path)

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own, so that its style and the notebook's do not meet."""
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" title="{escape(self.name)}" sandbox '
            'style="width:100%;height:760px;border:0"></iframe>'
        )


def make_page(name: str, head: str, sections: Iterable[str], parts: Iterable[tuple[str, Iterable[str]]] = ()) -> Report:
    """Return a page of this name; its head and its sections are HTML already.

    Below them come parts of a head and sections each, to which `#part-1` and so on lead.
    """
    title = escape(name)
    below = "".join(
        f'<article id="part-{number}">{top}<div class="main">{"".join(each)}</div></article>\n'
        for number, (top, each) in enumerate(parts, 1)
    )
    return Report(
        name,
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title} \u00b7 tpucache</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{head}\n"
        f"<main>{''.join(sections)}</main>\n{below}<footer>Written by tpucache {escape(__version__)}. Nothing on this "
        "page comes from elsewhere: it can be kept, sent and opened without a network.</footer>\n</body>\n</html>\n",
    )
