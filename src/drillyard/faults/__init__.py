"""Fault injection: a run is disturbed on purpose, for real, and compared to the bit with the same run undisturbed.

`plan` draws the faults, `entry` and `places` make them happen inside the processes of a run, `case` runs one disturbed
run, `judge` says what became of each fault, `campaign` does all of it for `drillyard chaos` and `make soak`, `table`
shows it. Nothing of this is in the trainer's path: ranks are started through `entry`, which replaces named functions
before it calls the normal main.
"""
