"""A tiny run that began from a bf16 model on this disk, named by a relative path, for tests of what
comes out of it."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.integration.tiny_run import drillyard, write_config, write_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drillyard.cli import main as cli

STEPS = 2
KEPT_IN_FP32 = "model.norm.weight"
"""The one weight of the base model that its files hold in fp32."""


@dataclass(frozen=True)
class FineTuned:
    """`place` is the directory that the run was started in; its base model is place/base-model."""

    place: Path
    run: Path

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoints" / f"step-{STEPS:08d}"


DOCUMENTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
"""The files of the base model besides its weights."""


def write_base_model(directory: Path) -> None:
    """A Llama of a few KB with a byte-level tokenizer, in the files that transformers 4 writes: all
    weights bf16 but one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({token: number for number, token in enumerate(["<end>", *alphabet])}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=tokenizer, bos_token="<end>", eos_token="<end>").save_pretrained(
        directory
    )
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer.get_vocab()), max_position_embeddings=128, **sizes
    )
    config.bos_token_id = config.eos_token_id = 0
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    weights[KEPT_IN_FP32] = torch.full((16,), 1 + 2.0**-12)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_older_documents(directory)


def write_older_documents(directory: Path) -> None:
    """Turn the documents of a model of transformers 5 into those of transformers 4."""
    path = directory / "config.json"
    content = json.loads(path.read_text())
    for key in ("rope_parameters", "dtype"):
        del content[key]
    scaling = {"rope_type": "linear", "factor": 2.0}
    content |= {"rope_theta": 500000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(content | {"transformers_version": "4.43.0", "use_cache": False}))
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, **ends}
    (directory / "generation_config.json").write_text(json.dumps(sampling))
    special = {"bos_token": "<end>", "eos_token": "<end>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "special_tokens_map.json").write_text(json.dumps(special))


def fine_tune(place: Path) -> FineTuned:
    """Train it on one rank."""
    write_rows(place / "rows.jsonl")
    write_base_model(place / "base-model")
    config = write_config(
        place,
        "tuned",
        output="runs",
        model={"id": "base-model"},
        data__tokenizer=None,
        training__steps=STEPS,
    )
    ended = drillyard("train", config, cwd=place)
    assert ended.returncode == 0, ended.stderr
    return FineTuned(place, place / "runs" / "tuned")


@contextlib.contextmanager
def working_in(directory: Path) -> Iterator[None]:
    """The working directory, for a while."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def called(*arguments: object, cwd: Path) -> tuple[int, str]:
    """A command in this process: its exit code and what it wrote on standard error."""
    errors = io.StringIO()
    quiet_out, quiet_err = (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(errors),
    )
    with working_in(cwd), quiet_out, quiet_err, pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return int(ended.value.code or 0), errors.getvalue()
