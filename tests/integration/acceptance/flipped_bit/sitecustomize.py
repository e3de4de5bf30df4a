"""A rank whose hardware fails, for test_torch_probes.py: `FLIPPED=SCRIPT:RANK:CALL:BIT`.

Python imports this file at its start where its directory is on PYTHONPATH. In the process of that
script and rank, the result of one product (by call, from 1) has one bit flipped, which nothing
reports.
"""

import os
import sys

script, rank, call, bit = os.environ.get("FLIPPED", "::0:0").split(":")
if script and os.environ.get("RANK") == rank and any(script in word for word in sys.orig_argv):
    import torch

    calls = 0

    def failing(original):
        def compute(left, right, *more):
            global calls
            result = original(left, right, *more)
            if result.dtype == torch.float32 and result.dim() > 1:
                calls += 1
                if calls == int(call):
                    bits = result.detach().view(torch.int32).view(-1)
                    bits[7].bitwise_xor_(1 << int(bit))
            return result

        return compute

    torch.Tensor.__matmul__ = failing(torch.Tensor.__matmul__)
    torch.nn.functional.linear = failing(torch.nn.functional.linear)
