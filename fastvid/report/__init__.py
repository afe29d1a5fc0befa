"""HTML reports of commands: each is one self-contained file with its charts and pictures.

`markup` escapes text and builds cards and tables, `charts` draws numbers, `page` assembles the file from sections.
"""
