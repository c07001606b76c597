"""Shows a run while it trains: curves, TensorBoard, Weights & Biases, MLflow, traces."""
