"""Pages that commands leave behind: one HTML file each, with its plots inside and without a reference to another.

Needs matplotlib (the extra ``report``).
"""
