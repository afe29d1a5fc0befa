"""What FFmpeg and containers say of one video file: probe, remux, play, prove, limits and reasons."""
