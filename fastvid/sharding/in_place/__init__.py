"""Datasets of videos in place: a list of files and their indexes instead of tars."""
