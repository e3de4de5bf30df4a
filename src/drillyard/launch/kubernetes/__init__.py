"""Runs as JobSets of a Kubernetes cluster: the Helm chart `drillyard-run` describes a run, JobSet
restarts it."""
