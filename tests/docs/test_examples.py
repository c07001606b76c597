"""What the pages show works: commands parse, Python compiles, calls bind, links lead somewhere, tests are found.

The quick start and the pages for agents and about text are also run from top to bottom.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import blocks, commands, run_blocks
from patience import PATIENCE

import tpucache
from scripts.kaggle_server import KaggleServer
from tpucache.cli import main, make_parser

ROOT = Path(__file__).parents[2]
DOCS = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "format.md")
PAGES = [ROOT / "README.md", ROOT / "llms.txt", ROOT / ".github/CONTRIBUTING.md", *DOCS]
OURS = re.compile(r"(?:\S*/)?python3? -m (scripts\.[\w.]+)")
PYTEST = re.compile(r"(?:\S*/)?(?:python3? -m )?pytest(?= )")
SHELLS = ("sh", "bash", "console")
PARSER = make_parser()
COMMANDS = {*PARSER.commands}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def spans(page: Path) -> list[str]:
    """Return every piece of code within a line."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def shell(page: Path) -> list[str]:
    """Return all that a page shows of a shell: blocks, and code within lines."""
    return [text for language, text in blocks(page) if language in SHELLS] + spans(page)


def has_arguments(span: str) -> bool:
    """Return whether a span is a command with its arguments, rather than a name such as `tpucache warmup`."""
    _, *words = span.split()
    return len(words) > 1 and words[0] in COMMANDS


@each_page
def test_every_command_parses(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shown = [text for language, text in blocks(page) if language in SHELLS]
    shown += [span for span in spans(page) if span.startswith("python") or has_arguments(span)]
    for words in (words for text in shown for words in commands(text)):
        for path in (Path(words[at + 1]) for at, word in enumerate(words) if word == "--config"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        try:
            PARSER.parse_args(words)
        except SystemExit:
            pytest.fail(f"{page.name}: {' '.join(words)}: {capsys.readouterr().err}")


@each_page
def test_every_target_of_make_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {word for text in shell(page) for words in commands(text, re.compile("make ")) for word in words}
    assert {word for word in asked if "=" not in word and not word.startswith("-")} <= targets


@each_page
def test_every_script_of_ours_exists_and_has_the_options_shown(page):
    for text in shell(page):
        for line in text.replace("\\\n", " ").splitlines():
            for module, words in [(found[1], line[found.end() :].split()) for found in OURS.finditer(line)]:
                names = [*module.split("."), *(words[:1] if module in ("scripts.bench", "scripts.checks") else ())]
                if names[-1].startswith("-"):
                    continue  # `--help` of all
                path = ROOT.joinpath(*names)
                path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
                assert path.is_file(), line
                options = {word.strip("`[]").partition("=")[0] for word in words if word.startswith(("--", "[--"))}
                known = path.read_text()
                for imported in re.findall(r"^from (scripts[\w.]*) import", known, re.MULTILINE):
                    source = ROOT.joinpath(*imported.split(".")).with_suffix(".py")
                    known += source.read_text() if source.is_file() else ""
                assert {option for option in options - {"--help"} if f'"{option}"' not in known} == set(), line


@pytest.mark.slow
def test_every_command_of_pytest_selects_tests(tmp_path):
    shown = [words for page in PAGES for text in shell(page) for words in commands(text, PYTEST)]
    assert shown
    for words in shown:
        command = [sys.executable, "-m", "pytest", *words, "--collect-only", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert done.returncode == 0, f"pytest {' '.join(words)}\n{done.stdout[-400:]}"


@each_page
def test_every_block_of_python_compiles(page):
    for language, text in blocks(page):
        if language == "python":
            compile(text, page.name, "exec")


@each_page
def test_every_call_shown_binds(page):
    shown = [text for language, text in blocks(page) if language == "python"]
    shown += [span for span in spans(page) if re.match(r"[a-zA-Z_]+\(", span) and "…" not in span]
    for tree in map(ast.parse, shown):
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in tpucache.__all__:
                signature = inspect.signature(getattr(tpucache, call.func.id))
                signature.bind(*call.args, **{keyword.arg: keyword.value for keyword in call.keywords if keyword.arg})


@each_page
def test_every_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_readme_has_at_most_600_words():
    """Of what is read: no code, no table of figures, no addresses of links."""
    text = re.sub(r"^```.*?^```$|^\|[^\n]*$", "", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text).split()
    assert len(words) <= 600


@pytest.fixture
def here(photos, tmp_path, monkeypatch):
    """The working folder, with the photographs of a page."""
    shutil.copytree(photos, tmp_path / "photos" / "train")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_what_agents_are_told_works_word_by_word(here, capsys):
    run_blocks("agents.md")
    assert "130 20 20" in capsys.readouterr().out
    assert len((here / "predictions.csv").read_text().splitlines()) == 151


@pytest.mark.slow
def test_the_page_about_text_works_word_by_word(here, capsys):
    run_blocks("text.md", "--jobs", "1")
    out = capsys.readouterr().out
    assert float(re.search(r"LSTM: ([\d.]+) right", out)[1]) > 0.9
    before, after = map(float, re.search(r"BERT: loss ([\d.]+) before, ([\d.]+) after", out).groups())
    assert after < before / 2
    assert "cache/reviews: finished in" in out


@pytest.mark.slow
@pytest.mark.thorough
def test_the_quick_start_works_word_by_word(here, capsys):
    run_blocks("quickstart.md")
    out = capsys.readouterr().out
    assert "450 records: the clean one and 2 augmented variants of each" in out
    assert "all sound" in out
    assert "epoch   2 " in out


@pytest.mark.slow
@pytest.mark.thorough
def test_the_example_of_the_kaggle_page_publishes_to_the_stand_in(here, monkeypatch, capsys):
    shown = [words for _, text in blocks(ROOT / "docs/kaggle.md") for words in commands(text)]
    (example,) = [words for words in shown if "kaggle:ann/my-photographs" in words]
    with KaggleServer().running() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        assert main([*example, "--jobs", "1"]) == 0
        files = server.files("ann/my-photographs")
    assert "samples      150" in capsys.readouterr().out
    for name, data in files.items():
        (here / name).write_bytes(data)
    data = tpucache.CachedDataset(here)
    assert len(data) == 150
    assert 'CachedDataset("kaggle:ann/my-photographs"' in files["README.md"].decode()
    assert "Licence: not stated yet" in files["README.md"].decode()
    assert not (here / "build").exists()


def test_no_message_and_no_page_installs_tpucache_from_an_index():
    """It may be on none: what works is a library by its own name, a checkout, or a wheel that is there."""
    texts = [*PAGES, *(ROOT / "tpucache").rglob("*.py")]
    found = {
        path.name: re.findall(r"pip install (?!-)[^`\n]*?(?<![/.\w-])tpucache\b", path.read_text()) for path in texts
    }
    assert {name: lines for name, lines in found.items() if lines} == {}
