"""Runs the training tests with another Python and another release of PyTorch/XLA, in an environment of its own.

    python scripts/check_release.py --python python3.12 --torch 2.8.0

is what Kaggle's TPU image has. Ends with the tests' own status.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter to make the environment with")
    parser.add_argument("--torch", default="2.8.0", help="the release of torch and of torch_xla")
    parser.add_argument("--work", type=Path, default=Path("release-env"), help="where the environment is made and kept")
    parser.add_argument("tests", nargs="*", default=["tests/training"], help="what to run")
    options = parser.parse_args()
    python = options.work.resolve() / "bin" / "python"
    if not python.exists():
        run(options.python, "-m", "venv", options.work)
    install = (python, "-m", "pip", "install", "--quiet")
    run(*install, f"torch=={options.torch}", f"torch_xla=={options.torch}")
    run(*install, "--editable", f"{ROOT}[dev]", f"torch=={options.torch}")
    versions = "import sys, torch, torch_xla; print(sys.version.split()[0], torch.__version__, torch_xla.__version__)"
    run(python, "-c", versions)
    return subprocess.run([python, "-m", "pytest", *options.tests], cwd=ROOT, check=False).returncode


def run(*command: str | Path) -> None:
    """Run a command that has to succeed."""
    subprocess.run([str(word) for word in command], check=True)


if __name__ == "__main__":
    sys.exit(main())
