"""The page about text works from top to bottom: its datasets, commands and training loops."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tpucache.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "text.md"


@pytest.mark.slow
def test_the_page_about_text_works_word_by_word(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        module = re.match(r"# (\w+\.py)\n", text)
        if module:
            (tmp_path / module[1]).write_text(text)
        elif language == "python":
            exec(compile(text, "text.md", "exec"), {"__name__": "__main__"})
        else:
            assert main([*shlex.split(text)[1:], "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert float(re.search(r"LSTM: ([\d.]+) right", out)[1]) > 0.9
    before, after = map(float, re.search(r"BERT: loss ([\d.]+) before, ([\d.]+) after", out).groups())
    assert after < before / 2
    assert "cache/reviews: finished in" in out
