"""Building blocks of training: replica, optimizer, schedule, EMA, mixing, freezing, evaluation."""
