"""Sends batches to the device, and measures how long the loop waits for them."""
