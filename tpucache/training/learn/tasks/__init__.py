"""What a model is trained for, one task a file."""
