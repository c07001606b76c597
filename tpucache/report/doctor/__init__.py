"""What this machine has for tpucache: its facts, and the advice that follows from them."""
