"""The node side of an acceptance job, whose probes with PyTorch are forks of a process that has
imported it: `python forking_node.py DIRECTORY run ...` is `python DIRECTORY run ...`.

A quick run starts eight such probes on a node of two ranks, each with two seconds of imports. The
server is a child of this process, in its namespaces, and starts with the first probe. Nodes on
Kubernetes, and those of a flipped bit in test_torch_probes.py, start their probes for real.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    from tests.integration.forked_start import PROBES, ForkedStarts

    # As the probes get it: it is read when torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ForkedStarts(PROBES).wanted = True
    del sys.argv[0], sys.path[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
