"""Turns one sample into its records. Opens no file; only this folder imports image libraries."""
