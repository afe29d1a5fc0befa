"""GPU benchmark: one script that measures and proves everything that needs a GPU."""
