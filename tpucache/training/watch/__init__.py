"""How a run is shown: curves, TensorBoard, Weights & Biases, MLflow, traces."""
