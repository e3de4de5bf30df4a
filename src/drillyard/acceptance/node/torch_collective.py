"""One collective over a list of message sizes, on all ranks of a group: time, algorithm and bus
bandwidth as nccl-tests define them."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Measure and print one JSON object."""
    asked = json.loads(sys.stdin.read() or "{}")
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    world = dist.get_world_size()
    rows = []
    for size in asked.get("sizes", [1 << 20]):
        tensor = torch.ones(size // 4, device="cuda" if cuda else "cpu")
        dist.all_reduce(tensor)
        seconds = []
        for _ in range(asked.get("repeats", 5)):
            began = time.perf_counter()
            dist.all_reduce(tensor)
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        rows.append({"bytes": size, "seconds": seconds})
    best = rows[-1]["bytes"] / min(rows[-1]["seconds"]) / 1e9
    print(
        json.dumps(
            {"rows": rows, "bus_gb_per_s": best * 2 * (world - 1) / world if world > 1 else 0.0}
        ),
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
