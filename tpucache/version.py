"""The version of tpucache."""

__version__ = "0.2.0"
