"""The checks, one subject per file: what is measured, how, and what its evidence means."""
