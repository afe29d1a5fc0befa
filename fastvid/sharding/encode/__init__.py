"""Encode a source with ffmpeg: profiles, transcoding, audio, optical flow, and checks."""
