"""Shows a run while it trains: curves, TensorBoard, traces."""
