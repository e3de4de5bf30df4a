"""Lines of any log: files, compression, following, launcher prefixes, time stamps, ranks. Uses no
other subpackage."""
