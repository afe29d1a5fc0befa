"""Host memory that batches are written into, and how a clip lies in it."""
