"""`python -m tpucache`."""

import sys

from tpucache.cli import main

if __name__ == "__main__":
    sys.exit(main())
