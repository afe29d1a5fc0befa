"""What the bytes of a video packet say: sizes, references, boundaries."""
