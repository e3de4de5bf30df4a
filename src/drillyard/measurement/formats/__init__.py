"""One file per log format: how its step lines look, and what else it says about a run."""
