"""The command line: one file per command that parses, calls a room and prints. No logic lives here."""
