"""The command line, one file per command: data on stdout, log on stderr, failures as exit codes."""
