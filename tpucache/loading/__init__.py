"""Reads shards into batches: a dataset, the order of an epoch, pooled buffers, a loader. Needs numpy and torch only."""
