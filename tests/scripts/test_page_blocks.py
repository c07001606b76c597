"""What the check of the pages' blocks runs, and what it refuses."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.checks.page_blocks import PAGES, Page, Part, Place, check, installs, read_blocks, required
from scripts.commands import ROOT, CommandError
from scripts.kaggle_server import KaggleServer


def have_nothing(place: Place) -> None:
    pass


PAGE = Page("docs/page.md", (Part("# Page", have_nothing),))


class PlaceOfTests(Place):
    def begin(self, name: str, libraries: tuple[str, ...]) -> None:
        self.python = Path(sys.executable)
        self.variables = {"PATH": f"{self.python.parent}:{os.defpath}", "HOME": str(self.root)}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    server = KaggleServer()
    server.server.server_close()
    return PlaceOfTests(tmp_path / "place", server)


@pytest.mark.slow
def test_blocks_run_in_order_as_they_are_shown_in_folders_of_their_own(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """# Page

```sh
echo "from shell" > /kaggle/working/a.txt
echo two > /content/b.txt
```

```python
from pathlib import Path

Path("c.txt").write_text(Path("/kaggle/working/a.txt").read_text() + Path("/content/b.txt").read_text())
```
"""
    check(PAGE, text, place)
    assert (place.here / "c.txt").read_text() == "from shell\ntwo\n"
    assert "docs/page.md: 2 blocks of 16 words work" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("language", "wrong", "shown"),
    [
        ("sh", "tpucache verify cache --sise 64", "+ tpucache verify cache --sise 64\ntpucache"),
        ("sh", "echo no > no\nfalse\necho yes", "+ echo no\n+ false"),
        (
            "python",
            "from tpucache import Recipe\n\nRecipe(sise=3)",
            "unexpected keyword argument",
        ),
    ],
)
def test_a_wrong_block_fails_with_its_page_number_text_and_output(
    place: Place, language: str, wrong: str, shown: str
) -> None:
    text = f"# Page\n\n```sh\ntouch first\n```\n\n```{language}\n{wrong}\n```\n\n```sh\ntouch last\n```\n"
    with pytest.raises(CommandError) as found:
        check(PAGE, text, place)
    message = str(found.value)
    assert message.startswith(f"docs/page.md, block 2:\n\n{wrong}\n\nit ends with status ")
    assert shown in message
    assert (place.here / "first").exists()
    assert not (place.here / "last").exists()


@pytest.mark.parametrize("language", ["", "bash", "console", "diff"])
def test_a_block_that_is_neither_run_nor_listed_is_refused(language: str) -> None:
    text = f"# Page\n\n```{language}\ntpucache doctor\n```\n"
    with pytest.raises(CommandError, match=r"docs/page.md, block 1, is not run, and not listed(?s:.*)tpucache doctor"):
        read_blocks(PAGE, text)
    (block,) = read_blocks(replace(PAGE, left_out={"doctor": "it looks at the machine"}), text)
    assert block.reason == "it looks at the machine"


def test_a_block_above_all_parts_is_refused() -> None:
    with pytest.raises(CommandError, match="block 1, is not run"):
        read_blocks(PAGE, "```sh\ntpucache doctor\n```\n\n# Page\n")


@pytest.mark.parametrize(
    "page",
    [
        replace(PAGE, left_out={"serve": "gone"}),
        replace(PAGE, before={"serve": have_nothing}),
        replace(PAGE, replaced={"serve": "verify"}),
        replace(PAGE, left_out={"tpucache": "in two blocks"}),
        replace(PAGE, before={"doctor": "pip install serve"}),
        replace(PAGE, parts=(Part("# Page", have_nothing, command="pip install serve"),)),
        replace(PAGE, parts=(Part("# Serve", have_nothing),)),
    ],
)
def test_what_is_listed_has_to_be_on_the_page(page: Page) -> None:
    with pytest.raises(CommandError, match=r"a rule for '.*([sS]erve|tpucache).*', which is not there once"):
        read_blocks(page, "# Page\n\n```sh\ntpucache doctor\n```\n\n```sh\ntpucache --version\n```\n")


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_hold_what_is_listed(name: str) -> None:
    page = PAGES[name]
    text = (ROOT / page.path).read_text()
    run = [block for block in read_blocks(page, text) if block.reason is None]
    assert len(run) > 1
    assert sum(f"```{block.language}\n{block.text}```\n" not in text for block in run) == len(page.replaced)


def test_an_install_line_brings_what_it_asks_for() -> None:
    first, second, third = installs(
        """pip install -q "$(find /kaggle/input -name 'tpucache-*.whl' | tail -n 1)[lz4,kaggle]"
tpucache doctor
pip install --no-deps /content/tpucache
pip install -q kagglesdk jinja2  # both
"""
    )
    assert required(first) == ["numpy", "pillow", "lmdb", "joblib", "tqdm", "lz4", "kagglesdk", "jinja2"]
    assert required(second) == []
    assert required(third) == ["kagglesdk", "jinja2"]
