"""Those that benchmarks compare, a module each, run by the interpreter of its own environment.

A module imports its library in the functions that use it, as not every role of it runs where all of them are.
"""
