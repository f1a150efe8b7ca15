"""Where the figures of a run go beside its metrics file: TensorBoard, Weights & Biases, MLflow."""
