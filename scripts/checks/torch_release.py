"""Runs the training tests with another Python and another release of PyTorch/XLA, in an environment of its own.

    python -m scripts.checks torch_release --python python3.12 --torch 2.8.0

is what Kaggle's TPU image has. Ends with the tests' own status.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from scripts.commands import ROOT, CommandError
from scripts.environments import Environment, Environments


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter to make the environment with")
    parser.add_argument("--torch", default="2.8.0", help="the release of torch and of torch_xla")
    parser.add_argument("--work", type=Path, default=Path("build/torch_release"), help="where environments are kept")
    parser.add_argument("tests", nargs="*", default=["tests/training"], help="what to run")
    options = parser.parse_args()
    releases = (f"torch=={options.torch}", f"torch_xla=={options.torch}")
    environment = Environment(
        f"{Path(options.python).name}-torch-{options.torch}",
        (releases, ("--editable", f"{ROOT}[dev]", releases[0])),
        python=options.python,
        depends_on=(ROOT / "pyproject.toml",),
    )
    try:
        python = Environments(options.work).prepare(environment)
    except CommandError as error:
        sys.exit(f"torch_release: {error}")
    versions = "import sys, torch, torch_xla; print(sys.version.split()[0], torch.__version__, torch_xla.__version__)"
    subprocess.run([python, "-c", versions], check=True)
    return subprocess.run([python, "-m", "pytest", *options.tests], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
