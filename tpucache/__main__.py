"""`python -m tpucache`, and the `tpucache` command."""

# Signals come first. All else that takes time is imported where they are handled already.
from tpucache import signals

if __name__ == "__main__":
    signals.begin(is_own=True)

import sys


def run() -> int:
    """Run the installed command like `python -m tpucache`: modules of the working folder can be imported.

    As there, not where Python was asked for safe paths.
    """
    signals.begin(is_own=True)
    if not sys.flags.safe_path:
        import contextlib
        from pathlib import Path

        with contextlib.suppress(FileNotFoundError):  # the folder may be gone
            sys.path.insert(0, str(Path.cwd()))
    return run_command()


def run_command() -> int:
    """Run the command that this process was started for, and return its exit status.

    It ends in at most one line of complaint from its first moment on: also before numpy is imported, and where it
    cannot be.
    """
    import atexit

    from tpucache import process

    process.open_standard_files()
    atexit.register(process.end_soon)  # it is called after all that is registered later; no account has its seconds
    try:
        process.end_with_parent()
        process.prepare_memory()
        from tpucache.cli import main

        status = main()
    except SystemExit as leaving:  # argparse has printed what it had to say
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
