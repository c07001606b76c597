"""The commands `train` and `predict`. The table `COMMANDS` in `plugins.py` names their functions."""
