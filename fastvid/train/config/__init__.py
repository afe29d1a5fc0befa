"""The configuration of a run: dataclasses, key=value overrides, recipes."""
