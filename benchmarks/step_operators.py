"""Operators of one transformer block in a training step, counted in the graphs that torch.compile
makes of it: products, attention, groups of elementwise operators, copies.

    python benchmarks/step_operators.py [ARCHITECTURE ...]

Nothing is timed and no GPU is needed. Tiny models in bf16 run a forward and a backward with each
block compiled as the trainer compiles it, down to the graph of aten operators that a code generator
gets (decomposed and partitioned as for inductor). Packed attention is one operator, as on a GPU.

- products: matrix products, those of stacked experts and of weights in nf4 included.
- groups: sets of elementwise operators, reductions and copies that are connected and have the same
  number of products and attentions before them. A code generator can fuse at most what is in one,
  so they are about the kernels that are launched beside the products.
- moved: bytes that groups read and write if each is one kernel, per token and hidden feature.
- copies: operators that move values and compute nothing (clones, concatenations, look-ups). A code
  generator may fuse them.

Models are small, with the proportions of Llama 3.1 8B and adapters of rank 64 (a rank of a 64th of
the hidden features), and four times as many tokens as hidden features.

`--budget SHARE`: with torch.compile's memory budget; `kept` is then what a block keeps for backward
beside its input and weights, over what it keeps without.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.unit.models.tiny import CONFIGS, VOCAB, model_config

from drillyard.config.run_model import LoraConfig
from drillyard.data.mapped_sequences import Batch
from drillyard.models import attention as attention_module
from drillyard.models.adapters import init_adapters, inject_adapters
from drillyard.models.architectures import blocks
from drillyard.models.loss import LanguageModelLoss, loss_inputs
from drillyard.models.meta_model import build_model
from drillyard.models.random_init import init_random
from drillyard.parallel.parallelize import compile_block

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "nf4_linear", "nf4_linear_backward"}
ATTENTION = {"counted_attention", "counted_attention_backward"}
COPIES = {"clone", "cat", "copy", "index", "index_select", "gather", "constant_pad_nd", "repeat"}
LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "target_modules": "all-linear"}
HIDDEN, TOKENS = 256, 1024
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 7 * HIDDEN // 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": TOKENS,
}
OWN_SIZES = {"head_dim": HIDDEN // 8, "moe_intermediate_size": 7 * HIDDEN // 2}
"""Of architectures that have such a setting."""
GPT2_SIZES = {"n_embd": HIDDEN, "n_head": 8, "n_positions": TOKENS}


# Attention over packed documents as one operator that runs without a GPU; its values do not matter.
@torch.library.custom_op("benchmark::counted_attention", mutates_args=())
def counted_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, size] of queries to the same of outputs."""
    return torch.zeros_like(q)


@counted_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("benchmark::counted_attention_backward", mutates_args=())
def counted_attention_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values."""
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


@counted_attention_backward.register_fake
def _(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


counted_attention.register_autograd(
    lambda ctx, gradient: counted_attention_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@dataclass(frozen=True)
class Counts:
    """Operators of a graph, and bytes per token and hidden feature; see the module."""

    products: int
    attention: int
    groups: int
    copies: int
    moved: float


@dataclass
class BlockGraphs:
    """Counts of each graph that was compiled, in the order of compilation: the forward and backward
    of a kind of layer, and its forward without gradients."""

    forward: list[Counts] = field(default_factory=list)
    backward: list[Counts] = field(default_factory=list)
    inference: list[Counts] = field(default_factory=list)
    kept_bytes: list[int] = field(default_factory=list)
    """Of activations that each forward keeps for its backward, without its inputs."""


def count_operators(graph: torch.fx.Graph) -> Counts:
    """Count the operators of a graph of aten operators."""
    found: Counter[str] = Counter()
    depth: dict[torch.fx.Node, int] = {}
    group_of: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        depth[node] = max((depth[each] for each in node.all_input_nodes), default=0)
        name = _operator_name(node)
        if name in PRODUCTS or name in ATTENTION:
            found["products" if name in PRODUCTS else "attention"] += 1
            depth[node] += 1
        elif name:
            found["copies"] += name in COPIES
            group_of[node] = [node]
            for source in _sources(node):
                other = group_of.get(source, group_of[node])
                if other is not group_of[node] and depth[source] == depth[node]:
                    other += group_of[node]
                    group_of |= dict.fromkeys(group_of[node], other)
    groups = {id(group): group for group in group_of.values()}
    moved = sum(_moved_bytes(set(group)) for group in groups.values()) / (TOKENS * HIDDEN)
    return Counts(
        found["products"], found["attention"], len(groups), found["copies"], round(moved, 1)
    )


def _moved_bytes(group: set[torch.fx.Node]) -> int:
    """What one kernel for a group reads of others and writes for others."""
    read = {source for node in group for source in _sources(node)} - group
    written = {node for node in group if not _readers(node) <= group}
    values = [node.meta.get("val") for node in read | written]
    return sum(v.numel() * v.itemsize for v in values if isinstance(v, torch.Tensor))


def _readers(node: torch.fx.Node) -> set[torch.fx.Node]:
    """The nodes that read what a node made, through views."""
    readers = set()
    for each in node.users:
        is_view = each.op == "call_function" and not _operator_name(each)
        readers |= _readers(each) if is_view else {each}
    return readers


def _operator_name(node: torch.fx.Node) -> str:
    """The name of the operator of a node that computes or moves something; empty for any other."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return ""
    if target.is_view or torch.Tag.inplace_view in target.tags:
        return ""
    name = target.name().partition("::")[2].partition(".")[0]
    is_free = name in ("sym_size", "_unsafe_view", "empty", "lift_fresh_copy", "detach", "full")
    return "" if is_free else name


def _sources(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The nodes that made what a node reads, through views."""
    for each in node.all_input_nodes:
        is_operator = each.op == "call_function" and _operator_name(each)
        if is_operator or each.op != "call_function":
            yield each
        else:
            yield from _sources(each)


def block_graphs(
    architecture: str, lora: dict[str, Any] | None = None, **changes: Any
) -> BlockGraphs:
    """The graphs of all blocks of a tiny model, in training and in evaluation. `changes` to its
    config."""
    graphs = BlockGraphs()

    def collector(kept: list[Counts]) -> Any:
        def compiler(module: torch.fx.GraphModule, inputs: Any) -> Any:
            kept.append(count_operators(module.graph))
            return make_boxed_func(module.forward)

        return compiler

    def partition(joint: torch.fx.GraphModule, *inputs: Any, **options: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(joint, *inputs, **options)
        outputs: Any = next(node for node in forward.graph.nodes if node.op == "output").args[0]
        values = [
            node.meta["val"]
            for node in outputs[options["num_fwd_outputs"] :]
            if node.op != "placeholder"
        ]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        graphs.kept_bytes.append(sum(each.numel() * each.element_size() for each in tensors))
        return forward, backward

    backend = aot_autograd(
        fw_compiler=collector(graphs.forward),
        bw_compiler=collector(graphs.backward),
        inference_compiler=collector(graphs.inference),
        decompositions=select_decomp_table(),
        partition_fn=partition,
    )
    run_blocks(backend, architecture, lora, **changes)
    return graphs


def run_blocks(
    backend: Any,
    architecture: str,
    lora: dict[str, Any] | None = None,
    batches: int = 1,
    tokens: int = TOKENS,
    **changes: Any,
) -> int:
    """Train and evaluate a tiny model whose blocks `backend` compiles, on micro-batches of so many
    `tokens` with ever more documents; returns the number of graphs that torch has made."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with (
        mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)),
        mock.patch.object(attention_module.varlen, "varlen_attn", _one_operator),
        mock.patch.object(attention_module, "KERNEL_GROUPS_HEADS", True),
        mock.patch.object(attention_module, "SMALLEST_OFFSETS", 2),
    ):
        root = _compiled_model(architecture, lora, changes)
        for documents in range(1, batches + 1):
            inputs = _inputs(root, documents, tokens)
            root(**inputs).backward()
            with torch.no_grad():
                root(**inputs)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _one_operator(q: Any, k: Any, v: Any, *unused: Any, **options: Any) -> Any:
    return counted_attention(q, k, v)


def _compiled_model(
    architecture: str, lora: dict[str, Any] | None, changes: dict[str, Any]
) -> LanguageModelLoss:
    sizes = GPT2_SIZES if architecture == "gpt2" else SIZES
    own = {key: size for key, size in OWN_SIZES.items() if key in CONFIGS[architecture]}
    changes = {**sizes, **own, **changes}
    if architecture == "gemma2":
        # Its soft cap is a part of FlexAttention, which is one operator, too.
        changes = {"attn_logit_softcapping": None, **changes}
    model = build_model(
        model_config(architecture, **changes),
        vocab_size=VOCAB,
        dtype=torch.bfloat16,
        attention="varlen",
        sequence_length=TOKENS,
    )
    if lora is not None:
        dtypes = (torch.bfloat16, torch.bfloat16)
        inject_adapters(model, LoraConfig(**lora), None, dtypes)
    model.to_empty(device="cpu")
    init_random(model, seed=0)
    if lora is not None:
        init_adapters(model, seed=0)
    for block in blocks(model):
        compile_block(block)
    return LanguageModelLoss(model)


def _inputs(root: LanguageModelLoss, documents: int, tokens: int) -> dict[str, Any]:
    length = tokens // 2
    document_ids = np.minimum(np.arange(length) // 8, documents - 1).astype(np.int32)
    ids = np.tile(np.arange(length, dtype=np.int64) % VOCAB, (2, 1))
    batch = Batch(ids, ids, np.tile(np.arange(length), (2, 1)), np.tile(document_ids, (2, 1)))
    return vars(loss_inputs(batch, root.causal_lm, "varlen", torch.device("cpu"), None))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE")
    parser.add_argument("--budget", type=float, default=1.0, metavar="SHARE")
    arguments = parser.parse_args()
    chosen = arguments.architectures or list(CONFIGS)
    if arguments.budget != 1:
        _print_budget(chosen, arguments.budget)
        return
    print("| architecture | mode | products | groups | moved | copies |\n|---|---|---|---|---|---|")
    for architecture in chosen:
        for mode, lora in (("full", None), ("LoRA", LORA)):
            graphs = block_graphs(architecture, lora)
            ways = zip(graphs.forward, graphs.backward, strict=True)
            kinds = [
                (
                    f"{forward.products} + {backward.products}",
                    f"{forward.groups} + {backward.groups}",
                    f"{forward.moved} + {backward.moved}",
                    f"{forward.copies} + {backward.copies}",
                )
                for forward, backward in ways
            ]
            columns = (", ".join(dict.fromkeys(column)) for column in zip(*kinds, strict=True))
            print(f"| {architecture} | {mode} | {' | '.join(columns)} |", flush=True)


def _print_budget(architectures: list[str], budget: float) -> None:
    print("| architecture | mode | kept | products and attentions again |\n|---|---|---|---|")
    for architecture in architectures:
        for mode, lora in (("full", None), ("LoRA", LORA)):
            without = block_graphs(architecture, lora)
            with functorch_config.patch(activation_memory_budget=budget):
                limited = block_graphs(architecture, lora)
            again = sum(
                (own.products - other.products) + (own.attention - other.attention)
                for own, other in zip(limited.backward, without.backward, strict=True)
            )
            kept = sum(limited.kept_bytes) / sum(without.kept_bytes)
            print(f"| {architecture} | {mode} | {kept:.2f} | {again} |", flush=True)


if __name__ == "__main__":
    main()
