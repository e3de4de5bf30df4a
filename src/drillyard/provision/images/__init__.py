"""Container images: built from a commit, pushed, and named by their digest."""
