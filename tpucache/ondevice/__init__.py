"""What an accelerator does to whole batches, in plain torch operators: no torch_xla, and no files."""
