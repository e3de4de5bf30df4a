"""The report of a run as one HTML file. Nothing is computed here: figures come from `measurement`."""
