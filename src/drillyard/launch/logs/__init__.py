"""Lines of a run's logs: found by time, merged by stamp, chosen by rank."""
