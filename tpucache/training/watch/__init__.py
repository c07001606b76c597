"""Shows runs: curves, TensorBoard, Weights & Biases, MLflow, traces."""
