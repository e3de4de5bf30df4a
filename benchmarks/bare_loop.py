"""The yardstick: the least that an FSDP2 training step can be, with the same loss normalisation,
clipping and optimizer.

No configuration, telemetry, signals, checkpoints or skipping of bad steps: a comparison shows what
all of those cost. It uses the model's own head and torch's own clipping.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class BareLoop:
    """A causal LM under FSDP2 and a step that trains it; `recompute`: blocks recompute all of their
    activations."""

    def __init__(
        self,
        model,
        blocks,
        mesh,
        learning_rate,
        clipping,
        device,
        *,
        param_dtype=torch.float32,
        compiled=False,
        recompute=False,
    ):
        for block in blocks:
            if recompute:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            if compiled:
                block.forward = torch.compile(block.forward)
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        for module in (*blocks, model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        model.to_empty(device=device)
        self.model, self.clipping = model, clipping
        self.optimizer = None
        self.learning_rate = learning_rate

    def step(self, input_ids, position_ids, attention, labels):
        """One step on one micro-batch; labels are shifted already. Returns the global loss as a
        Python number."""
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(), lr=self.learning_rate, fused=True
            )
        valid = (labels != -100).sum()
        dist.all_reduce(valid)
        logits = self.model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **attention
        ).logits
        loss = (
            F.cross_entropy(
                logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
            )
            / valid
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item()
