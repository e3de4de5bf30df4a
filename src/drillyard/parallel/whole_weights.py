"""Weights of a model that one rank holds whole: no FSDP2, no gathers, no reductions.

A gather among one rank is a copy, and so is a reduction. Where the weights fit twice, in master and
in compute precision, a forward uses copies in compute precision that are kept from step to step and
written once a step, on GPUs by the optimizer as it updates the masters. Weights that already have
the compute precision (frozen ones, all of fp32 and fp64 runs) are used as they are.

A gradient that is a sum arrives in master precision: of several micro-batches, of chunks of the
loss, of tied weights; as with FSDP2 from torch 2.15 on. With one micro-batch all others stay as
autograd made them: a wider one would have the same value.

Bytes moved per trained parameter and step under bf16: 6 to write the copy (4 read, 2 written; 2
where the optimizer does it); with several micro-batches 6 to widen the first gradient (2 read, 4
written) and 18 for each further one (widen, then add). FSDP2 among one rank moves 10 per gather and
14 per reduction.

Between steps the modules hold the masters, so that loading, saving and exporting see what they see
of any other model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn


class WholeWeights:
    """The copies of a module's weights in compute precision, and whether they are in use."""

    def __init__(self, root: nn.Module, compute_dtype: torch.dtype) -> None:
        self.compute_dtype = compute_dtype
        self._root = root
        self._in_use = False
        self._copies: dict[nn.Parameter, nn.Parameter] | None = None
        self._summed: set[nn.Parameter] | None = None
        """Masters whose gradients are sums; None: all."""
        self._written: dict[nn.Parameter, int] = {}
        """Versions of the masters whose copies the optimizer has written."""
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        """(parameters of a module, name, master) of each weight that has a copy."""
        root.register_forward_pre_hook(lambda *_: self.use())

    def expect_one_micro_batch(self, summed: Collection[nn.Parameter]) -> None:
        """Say, before the first forward, that each step has a single backward, which sums the
        gradients of `summed` from parts, and those of tied weights."""
        assert self._copies is None
        uses = Counter(each for _, each in self._root.named_parameters(remove_duplicate=False))
        self._summed = {*summed, *(each for each, count in uses.items() if count > 1)}

    def use(self) -> None:
        """Put up-to-date copies in the place of the masters; nothing happens where they are."""
        if self._in_use:
            return
        if self._copies is None:
            self._copies = self._make_copies()
        stale = {m: c for m, c in self._copies.items() if self._written.get(m) != m._version}
        if stale:
            with torch.no_grad():
                torch._foreach_copy_(list(stale.values()), list(stale))
        for parameters, name, master in self._places:
            parameters[name] = self._copies[master]
        self._in_use = True

    @property
    def copies(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """The copies by their masters; none before the first forward."""
        return self._copies or {}

    def copies_are_written(self) -> None:
        """Say that trained masters and their copies have the same values now: `use` copies those
        alone that change by something else."""
        self._written = {each: each._version for each in self.copies if each.requires_grad}

    def give_back(self) -> None:
        """Put the masters back, with the gradients that their copies have received."""
        if not self._in_use:
            return
        assert self._copies is not None
        for parameters, name, master in self._places:
            parameters[name] = master
        for master, copy in self._copies.items():
            if copy.grad is not None:
                master.grad, copy.grad = copy.grad, None
        self._in_use = False

    def _make_copies(self) -> dict[nn.Parameter, nn.Parameter]:
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for module in self._root.modules():
            for name, master in module._parameters.items():
                if (
                    master is None
                    or not master.is_floating_point()
                    or master.dtype == self.compute_dtype
                ):
                    continue
                if master not in copies:
                    copy = torch.empty_like(master, dtype=self.compute_dtype)
                    copies[master] = nn.Parameter(copy, requires_grad=master.requires_grad)
                    is_sum = self._summed is None or master in self._summed
                    # None: as it comes.
                    copies[master].grad_dtype = master.dtype if is_sum else None
                    master.grad_dtype = None
                self._places.append((module._parameters, name, master))
        return copies
