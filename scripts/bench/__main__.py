"""`python -m scripts.bench NAME …`."""

from pathlib import Path

from scripts.dispatch import dispatch

if __name__ == "__main__":
    dispatch("scripts.bench", Path(__file__).parent)
