"""From a run and a cluster to the scheduler's artefacts; submit, status, logs, cancel.

    plan = launcher_for(cluster).plan(Request(run, cluster, facts, here))      # pure; `--dry-run` prints it
    handle = launcher_for(cluster).submit(plan)                                # executes the plan's steps

One file per launcher (local, ssh, slurm, vertex), on the same core: `prepared_run.py` makes what every launcher hands
over, one agent per node, and `agent/` is that agent, which keeps the contract with the trainer on every launcher alike.
"""
