"""Commands that look up samples and take copies: find, get, copy, export."""
