"""Reads shards into batches: a dataset, the order of an epoch, pooled buffers, a loader.

It needs only numpy. If torch is installed, batches are tensors.
"""
