"""Pages that commands write: one HTML file each, with its charts and pictures inside and no reference to the outside.

`markup` escapes text and builds cards and tables, `charts` draws numbers, `page` puts sections into the file.
"""
