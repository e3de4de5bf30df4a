"""What launchers put before lines: for tests that a log reads the same behind each of them."""

from __future__ import annotations

STAMP = b"2026-01-02T03:04:05.123456789Z"
STAMP_US = 1_767_323_045_123_456

PREFIXES = {
    "srun": b"0: ",
    "srun, padded": b" 0: ",
    "Open MPI": b"[1,0]<stdout>:",
    "Open MPI 5": b"[prterun-host-77@1,0]<stdout>: ",
    "torchrun, rank": b"[rank0]:",
    "torchrun, local rank": b"[default0]:",
    "srun and torchrun": b"0: [rank0]: ",
    "kubectl --prefix": b"[pod/job-0-0/main] ",
    "kubectl --timestamps": STAMP + b" ",
    "kubectl, both": b"[pod/job-0-0/main] " + STAMP + b" ",
    "gcloud logging": b"INFO " + STAMP + b" [resource.labels.containerName: job] ",
    "SkyPilot, cluster": b"(head, rank=0, pid=4112) ",
    "SkyPilot, coloured": b"\x1b[36m(head, rank=0, pid=4112)\x1b[0m ",
    "SkyPilot, one node": b"(pretraining, pid=4112) ",
    "SkyPilot, mpirun and torchrun": b"(head, rank=0, pid=3808) [1,0]<stdout>:[default0]: ",
    "torchx": b"mbs_128gbs/0 ",
}


def prefixed(log: bytes, prefix: bytes) -> bytes:
    """Every line of a log behind a prefix; redraws of a line have none of their own."""
    return b"".join(prefix + line + b"\n" for line in log.split(b"\n")[:-1])
