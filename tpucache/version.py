"""The version of tpucache."""

__version__ = "0.3.0"
