"""The threads and processes that fetch and decode clips, what they skip and where time goes."""
