"""Training benchmarks: overhead of the trainer, accuracy of models."""
