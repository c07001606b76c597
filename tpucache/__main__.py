"""The entry points of the command line: `python -m tpucache`, and `run` for the installed command `tpucache`."""

import sys

from tpucache import process


def run() -> int:
    """Run the installed command `tpucache`, and return its exit status.

    Like `python -m tpucache`, the command can import modules from the working folder, unless Python was started with a
    safe path (Python's option -P).
    """
    if not sys.flags.safe_path:
        import contextlib
        from pathlib import Path

        with contextlib.suppress(FileNotFoundError):  # the folder may be gone
            sys.path.insert(0, str(Path.cwd()))
    return run_command()


def run_command() -> int:
    """Run the command in `sys.argv`, and return its exit status.

    If memory runs out, or a signal arrives, even during imports, one line is printed instead of a traceback.
    """
    process.handle_signals()
    process.open_standard_files()
    try:
        process.prepare_memory()
        from tpucache.cli import main

        status = main()
    except SystemExit as leaving:  # argparse has printed its message
        status = int(leaving.code or 0)
    except (KeyboardInterrupt, MemoryError, ImportError, OSError) as error:
        if process.is_interrupted():
            status = process.complain(process.INTERRUPTED, process.STOPPED)
        elif text := process.shortage(error):
            status = process.complain(text, 1)
        else:
            raise
    return process.end(status)


if __name__ == "__main__":
    sys.exit(run_command())
