"""GPU benchmark."""
