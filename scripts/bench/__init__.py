"""Benchmarks: `python -m scripts.bench NAME`. Contenders take turns in the same run on the same images."""
