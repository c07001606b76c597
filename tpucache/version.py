"""The version of tpucache."""

__version__ = "0.1.0"
