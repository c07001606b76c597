"""Batches on their way to the device, and how long the loop waited for them."""
