"""The entry points of the command line: `python -m tpucache`, and `run` for the installed command `tpucache`."""

# Signals are handled first: all imports that take time come later.
from tpucache import signals

if __name__ == "__main__":
    signals.begin(is_own=True)

import sys


def run() -> int:
    """Run the installed command `tpucache`, and return its exit status.

    Like `python -m tpucache`, the command can import modules from the working folder, unless Python was started with a
    safe path (Python's option -P).
    """
    signals.begin(is_own=True)
    if not sys.flags.safe_path:
        import contextlib
        from pathlib import Path

        with contextlib.suppress(FileNotFoundError):  # the folder may be gone
            sys.path.insert(0, str(Path.cwd()))
    return run_command()


def run_command() -> int:
    """Run the command in `sys.argv`, and return its exit status.

    If memory runs out, even during imports, one line is printed instead of a traceback.
    """
    import atexit

    from tpucache import process

    process.open_standard_files()
    atexit.register(process.end_soon)  # called after all functions that are registered later
    try:
        process.end_with_parent()
        process.prepare_memory()
        from tpucache.cli import main

        status = main()
    except SystemExit as leaving:  # argparse has printed its message
        status = int(leaving.code or 0)
    except (MemoryError, ImportError, OSError) as error:
        text = process.shortage(error)
        if text is None:
            raise
        status = process.complain(text, 1)
    signals.finish(status, process.flush_files)
    return status


if __name__ == "__main__":
    sys.exit(run_command())
