"""`python -m tpucache`, and the `tpucache` command."""

import contextlib
import sys
from pathlib import Path

from tpucache.cli import main


def run() -> int:
    """Run the installed command like `python -m tpucache`: modules of the working folder can be imported.

    As there, not where Python was asked for safe paths.
    """
    if not getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        with contextlib.suppress(FileNotFoundError):  # the folder may be gone
            sys.path.insert(0, str(Path.cwd()))
    return main()


if __name__ == "__main__":
    sys.exit(main())
