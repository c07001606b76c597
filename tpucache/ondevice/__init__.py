"""What an accelerator does to whole batches, in plain torch operators: no torch_xla, and no files."""

from tpucache.ondevice.finish import decoder

__all__ = ["decoder"]
