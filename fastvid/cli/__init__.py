"""The command line: one file a command. stdout is data, stderr is the log, and failure is an exit code."""
