"""What ffmpeg makes of a source: profiles, transcoding, sound, optical flow, and its check."""
