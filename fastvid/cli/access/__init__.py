"""Commands that look up samples and take them out: find, get, export."""
