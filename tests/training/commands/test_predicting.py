"""predict: what it prints, and the status it ends with."""

from __future__ import annotations

import json

import pytest

from tpucache.cli import main

pytestmark = pytest.mark.usefixtures("short_runs")


@pytest.fixture(scope="module")
def run(cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    arguments = ["train", cache, "--run", folder, "--backend", "eager", "--model", "cnn", "--epochs", 1]
    assert main([*map(str, arguments), "--batch-size", "50"]) == 0
    return folder


def predict(*arguments):
    return main(["predict", *map(str, arguments), "--backend", "eager"])


@pytest.mark.slow
def test_predict_tells_what_it_did(cache, run, tmp_path, capsys):
    output = tmp_path / "new" / "out.csv"
    assert predict(run, run, cache, "-o", output, "--variants", "0,2", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["runs"], report["variants"], report["output"]) == (150, 2, [0, 2], str(output))
    assert 0 <= report["metrics"]["accuracy"] <= 1
    assert output.read_text().startswith("sample,path,label,prediction,ant,bee,cat,dog\n")
    assert predict(run, cache, "-o", output) == 0
    assert str(output) in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "status", "message"),
    [(["--variants", "9"], 2, "variants"), (["--cores", "8"], 2, "1 core"), (["--batch-size", "7"], 0, "")],
)
def test_options_that_do_not_fit_end_in_one_line(cache, run, tmp_path, capsys, options, status, message):
    assert predict(run, cache, "-o", tmp_path / "out.csv", *options) == status
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_a_folder_that_is_no_run_ends_with_status_one(cache, tmp_path, capsys):
    assert predict(tmp_path, cache, "-o", tmp_path / "out.csv") == 1
    assert "holds no run" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        predict(tmp_path, cache, "-o", tmp_path / "out.csv", "--variants", "none")
    assert stop.value.code == 2
