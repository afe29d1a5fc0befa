"""What each clip shows, decided before a byte of it is read: frames, crops, streams, views."""
