"""`python -m scripts.checks NAME …`."""

from pathlib import Path

from scripts.dispatch import dispatch

if __name__ == "__main__":
    dispatch("scripts.checks", Path(__file__).parent)
