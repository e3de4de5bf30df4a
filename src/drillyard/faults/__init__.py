"""Fault injection into a run, judged against the same run without faults, to the bit."""
