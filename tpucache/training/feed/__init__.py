"""Sends batches to the device ahead of the steps, and measures how long the loop waits for them."""
