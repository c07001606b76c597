"""The folder of a run: its state, checkpoints, history and report."""
