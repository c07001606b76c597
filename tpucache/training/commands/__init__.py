"""The commands `train` and `predict`. The table `COMMANDS` in `wings.py` names their functions."""
