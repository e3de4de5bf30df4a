"""Checkpoints: saved while training goes on, verified when read, complete only when the manifest is
there.

`manifest`, `inventory` and `verification` describe what is on disk and need no torch.
`index_reader` and `archive_check` read pickles without running them. `dcp_storage` and
`dcp_planners` make torch.distributed.checkpoint take checksums while it writes and verify them when
it reads. `loading` reads, and the trainer uses `checkpointer`.
"""
