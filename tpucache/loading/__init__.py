"""Shards -> batches: a dataset, the order of an epoch, pooled buffers, a loader. numpy and torch, nothing else."""
