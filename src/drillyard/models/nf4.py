"""Frozen weights in 4 bits (NF4 of QLoRA, arXiv 2305.14314): they rest packed, and are made whole
inside each product.

A weight [O, I] is cut into blocks of 64 along its rows. Of each block the largest magnitude is kept
in fp32, and of each number the nearest of 16 levels of a normal distribution (the paper's appendix
E), as a share of that magnitude: 4.5 bits a number. All of a row lies together, codes before
magnitudes, in 9 I / 16 bytes. So FSDP2 cuts it between blocks.

The bytes are the parameter seen as numbers of the compute precision. FSDP2 neither casts nor
computes with those, and the magnitudes arrive as they are; of bytes it could make no parameter
before torch 2.15.

The magnitudes are not quantized a second time, which would save 0.37 bits a number.

Backward makes the weight whole again instead of keeping it. Layers that are no `nn.Linear` stay as
they are: the head, embeddings, norms, and experts that transformers stacks into one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from drillyard.config.kernel_rules import NF4_BLOCK as BLOCK
from drillyard.errors import UserError
from drillyard.models.kernels import builds_kernels
from drillyard.models.sharding import is_adapter_name, plain_name

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
)
BLOCK_BYTES = BLOCK // 2 + 4
LARGEST_PART_ELEMENTS = 2**20
"""Numbers of which intermediate results exist at once, where no kernel avoids them."""


def pack(values: torch.Tensor) -> torch.Tensor:
    """The bytes [R, 9 I / 16] of rows [R, I] in any floating-point precision; I is a multiple of
    BLOCK.

    A number half way between two levels takes the lower one.
    """
    shape = (values.shape[0], packed_bytes(values.shape[1]))
    packed = torch.empty(shape, dtype=torch.uint8, device=values.device)
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=values.device)
    between = (levels[1:] + levels[:-1]) / 2
    for rows in _parts(values.shape):
        blocks = values[rows].float().view(-1, values.shape[1] // BLOCK, BLOCK)
        largest = blocks.abs().amax(-1, keepdim=True)
        # In a block of zeros any share will do.
        shares = blocks / largest.where(largest > 0, 1.0)
        codes = torch.bucketize(shares, between, out_int32=True).to(torch.uint8).flatten(1)
        of_codes, of_largest = _halves(packed[rows])
        of_codes.copy_(codes[:, ::2] << 4 | codes[:, 1::2])
        of_largest.copy_(largest[..., 0])
    return packed


def pack_into(storage: torch.Tensor, values: torch.Tensor) -> None:
    """Fill packed rows, in whatever precision they are seen, from the numbers [R, I]."""
    storage.view(torch.uint8)[:, : packed_bytes(values.shape[1])] = pack(values)


def unpack(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [R, I] of packed rows: each level times its block's magnitude in fp32, rounded to
    `dtype`."""
    whole = packed.new_empty(_unpacked_shape(packed), dtype=dtype)
    packed = packed.view(torch.uint8)
    if packed.device.type == "cuda" and builds_kernels(packed.device):
        # Imported here: triton comes only with builds of torch for GPUs.
        from drillyard.models.nf4_kernel import unpack_into

        unpack_into(whole, packed, LEVELS, BLOCK)
        return whole
    pairs = _pairs(packed.device)
    for part in _parts(whole.shape):
        codes, largest = _halves(packed[part])
        shares = pairs[codes.int()].view(codes.shape[0], -1, BLOCK)
        whole[part] = (shares * largest[..., None]).view(whole[part].shape)
    return whole


def _pairs(device: torch.device) -> torch.Tensor:
    """The two levels of each byte, fp32 [256, 2]."""
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=device)
    codes = torch.arange(256, device=device)
    return torch.stack((levels[codes >> 4], levels[codes & 15]), 1)


def _halves(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of rows of bytes: codes, uint8 [R, I / 2], and magnitudes, fp32 [R, I / 64]."""
    blocks = packed.shape[1] // BLOCK_BYTES
    codes = blocks * BLOCK // 2
    return packed[:, :codes], packed[:, codes : blocks * BLOCK_BYTES].view(torch.float32)


def _parts(shape: Iterable[int]) -> Iterator[slice]:
    """Rows of a matrix of `shape`, LARGEST_PART_ELEMENTS at a time."""
    rows, columns = shape
    step = max(1, LARGEST_PART_ELEMENTS // max(1, columns))
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))


def packed_bytes(columns: int) -> int:
    """Bytes of a row of so many numbers."""
    return columns // BLOCK * BLOCK_BYTES


def _unpacked_shape(packed: torch.Tensor) -> tuple[int, int]:
    """The shape [R, I] of the numbers in packed rows, which may end with less than a block of
    padding."""
    return packed.shape[0], packed.shape[1] * packed.itemsize // BLOCK_BYTES * BLOCK


# Operators, and no autograd.Function: compiled with torch 2.11, full checkpointing keeps the
# results of what is in one. The whole weight lives inside of them, so that nothing can keep it from
# forward to backward.
@torch.library.custom_op("drillyard::nf4_linear", mutates_args=())
def nf4_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., I] times a packed weight [O, I], plus a frozen bias [O]."""
    return F.linear(x, unpack(packed, x.dtype), bias)


@nf4_linear.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


@torch.library.custom_op("drillyard::nf4_linear_backward", mutates_args=())
def nf4_linear_backward(gradient: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """The gradient of x from that of the result."""
    return gradient @ unpack(packed, gradient.dtype)


@nf4_linear_backward.register_fake
def _(gradient: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return gradient.new_empty((*gradient.shape[:-1], _unpacked_shape(packed)[1]))


def _keep_packed(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    (packed,) = ctx.saved_tensors
    return nf4_linear_backward(gradient.contiguous(), packed), None, None


nf4_linear.register_autograd(_backward, setup_context=_keep_packed)


@torch.library.custom_op("drillyard::unpack_nf4", mutates_args=())
def unpack_nf4(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`unpack` as one operator."""
    return unpack(packed, dtype)


@unpack_nf4.register_fake
def _(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty(_unpacked_shape(packed), dtype=dtype)


class Nf4Linear(nn.Linear):
    """A frozen linear layer whose `weight` holds the bytes of `pack`, seen as numbers of the
    layer's precision."""

    W_q = None
    """peft asks a layer that has this name for `dequantize()` where it needs the weight itself
    (DoRA)."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight_dtype = layer.weight.dtype
        columns = -(-packed_bytes(self.in_features) // self.weight_dtype.itemsize)
        packed = layer.weight.new_empty((self.out_features, columns))
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = nf4_linear(input, self.weight, self.bias)
        return result

    def dequantize(self) -> torch.Tensor:
        """The weight [O, I] in the precision of the layers that are not quantized."""
        whole: torch.Tensor = unpack_nf4(self.weight, self.weight_dtype)
        return whole


def packed_layers(model: nn.Module) -> dict[int, Nf4Linear]:
    """The layers of `model` with packed weights, by the identity of these."""
    return {
        id(module.weight): module for module in model.modules() if isinstance(module, Nf4Linear)
    }


def count_parameters(model: nn.Module) -> int:
    """Numbers in all parameters, packed ones included."""
    packed = packed_layers(model)
    unpacked = {key: layer.out_features * layer.in_features for key, layer in packed.items()}
    return sum(unpacked.get(id(each), each.numel()) for each in model.parameters())


def quantize_linears(model: Any) -> None:
    """Put an `Nf4Linear` in the place of each linear layer but the head, on the meta device; in
    place.

    Raises UserError where there is none, and for a layer whose inputs are no multiple of BLOCK.
    """
    head = model.get_output_embeddings()
    found = False
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or module is head or is_adapter_name(name):
            continue
        if module.in_features % BLOCK:
            raise UserError(
                f"model.quantization: {plain_name(f'{name}.weight')} has {module.in_features}"
                f" inputs, and nf4 needs a multiple of {BLOCK}\nleave model.quantization out"
            )
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, Nf4Linear(module))
        found = True
    if not found:
        raise UserError(
            f"model.quantization: {model.config.model_type} has no linear layer that can be kept in"
            " nf4\nleave model.quantization out"
        )


def dequantize_linears(model: nn.Module) -> None:
    """Make each packed weight a whole one again, sharded as it was; the model computes no forward
    after it."""
    for layer in packed_layers(model).values():
        packed: Any = layer.weight
        local = packed.to_local() if isinstance(packed, DTensor) else packed
        whole = unpack(local, layer.weight_dtype)
        if isinstance(packed, DTensor):
            shape = torch.Size((layer.out_features, layer.in_features))
            whole = DTensor.from_local(
                whole,
                packed.device_mesh,
                packed.placements,
                run_check=False,
                shape=shape,
                stride=(shape[1], 1),
            )
        layer.weight = nn.Parameter(whole, requires_grad=False)
        layer.__class__ = nn.Linear  # type: ignore[assignment]
