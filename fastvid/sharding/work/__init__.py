"""What a worker does: makes verified samples of one source; and the messages between the job and its workers."""
