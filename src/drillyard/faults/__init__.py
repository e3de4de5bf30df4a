"""Fault injection: disturb a run with real faults, and compare it to the bit with the same run undisturbed.

`plan` draws the faults; `injection_points` makes them strike inside the processes of a run; `disturbed_run` starts one
disturbed run and restarts it; `fault_verdicts` decides which faults passed; `campaign` does all of it for
`drillyard chaos` and `make soak`; `campaign_report` prints the result. The trainer has no hooks for any of this: ranks
are started through `injection_points`, which replaces named functions before it calls the normal main.
"""
