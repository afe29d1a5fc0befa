"""Scripts that run other samplers and packers in an environment of their own; they import nothing of fastvid."""
