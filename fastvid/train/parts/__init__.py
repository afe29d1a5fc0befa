"""What a step is made of: replica, optimiser, schedule, averages, mixing, evaluation."""
