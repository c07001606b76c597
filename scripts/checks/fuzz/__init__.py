"""Feeds files and answers that nobody's program wrote to what reads them: errors of tpucache's, and nothing else."""
