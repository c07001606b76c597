"""The commands of the wing `training`. The table `COMMANDS` in `wings.py` names them."""
