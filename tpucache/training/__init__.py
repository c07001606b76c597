"""Batches -> steps: a feeder, a loop that is read from top to bottom, and what says how little it waited."""
