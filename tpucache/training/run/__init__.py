"""The folder of a run: state, checkpoints, history, report."""
