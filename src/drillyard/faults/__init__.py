"""Fault injection into a run, judged against the same run without faults, to the bit.

`plan` draws the faults, `injection_points` makes them strike inside a run's processes,
`disturbed_run` starts and restarts one run, `fault_verdicts` judges it, `campaign` does all of it
for `drillyard chaos` and `make soak`.
"""
