"""HTML reports of commands: each is one self-contained file with its charts and pictures.

`page` escapes text, builds cards and tables and assembles the file from sections; `charts` draws numbers; `results`
shows evaluations and predictions.
"""
