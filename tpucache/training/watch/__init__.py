"""How a run is shown: curves, TensorBoard, traces."""
