"""Plans clips before reading them: frames, crops, streams and views."""
