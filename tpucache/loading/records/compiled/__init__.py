"""Loops in compiled code, which run without the interpreter's lock. llvmlite compiles them where it is installed."""
