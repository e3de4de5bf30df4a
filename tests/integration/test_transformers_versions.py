"""An export is the same model, tokenizer and chat to the newest transformers 4 as to ours.

`.ci/tools/transformers` installs that version; TRANSFORMERS_VERSIONS names others that it
installed, as "4.57.6 5.17.0". Each reads all exports in one process: a start costs it about five
seconds.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration import transformers_reader as reader
from tests.unit.models.tiny import CONFIGS, NO_DROPOUT, model_config
from transformers import AutoTokenizer, PreTrainedModel

from drillyard.config.model_files import ARCHITECTURES
from drillyard.config.run_data import TrainTokenizer
from drillyard.config.run_model import LoraConfig, ModelConfig
from drillyard.data.tokenizer import TextTokenizer, open_tokenizer, trained_tokenizer
from drillyard.data.tokenizer_files import tokenizer_files
from drillyard.models.adapters import init_adapters, inject_adapters
from drillyard.models.export import export
from drillyard.models.export_documents import base_documents
from drillyard.models.meta_model import build_model
from drillyard.models.pretrained import load_pretrained
from drillyard.models.random_init import init_random

pytestmark = pytest.mark.integration
TOOLS = Path(os.environ.get("DRILLYARD_TOOLS") or "~/.cache/drillyard/tools").expanduser()
VERSIONS = os.environ.get("TRANSFORMERS_VERSIONS", "4.57.6").split()

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LONG = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}

# Settings of each architecture under the names of transformers 4, none of them a default.
OLDER: dict[str, dict[str, Any]] = {
    "cohere": {"rope_theta": 900.0, "rope_scaling": LINEAR},
    "cohere2": {"rope_theta": 800.0},
    "gemma2": {"rope_theta": 700.0},
    "gemma3_text": {"rope_theta": 5000.0, "rope_scaling": LINEAR, "rope_local_base_freq": 300.0},
    "gpt2": {},
    "granite": {"rope_theta": 600.0, "rope_scaling": LINEAR},
    "llama": {"rope_theta": 5000.0, "rope_scaling": LLAMA3},
    "mistral": {"rope_theta": 400.0},
    "mixtral": {"rope_theta": 300.0},
    "olmo2": {"rope_theta": 700.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "olmo3": {"rope_theta": 600.0, "rope_scaling": YARN},
    "phi3": {
        "rope_theta": 500.0,
        "rope_scaling": LONG,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 32,
    },
    "qwen2": {"rope_theta": 3000.0, "rope_scaling": YARN},
    "qwen3": {"rope_theta": 2000.0, "rope_scaling": YARN, "tie_word_embeddings": True},
    "qwen3_moe": {"rope_theta": 1500.0, "rope_scaling": YARN},
    "smollm3": {"rope_theta": 2500.0, "rope_scaling": YARN},
}
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [0, 3]}
TOLERANCE = 3e-5
"""Of the logits' standard deviation: what fp32 rounds where a sum is done in another order."""
WITH_ADAPTERS = ("gpt2", "gemma3_text", "llama", "qwen3_moe")


@dataclass
class Exported:
    """An export, the base that its adapters need, and what this process reads in it."""

    directory: Path
    expected: dict[str, Any]
    base: Path | None = None


@dataclass
class Cases:
    """Exports by name, made in a directory."""

    directory: Path
    tokenizer: TextTokenizer
    exports: dict[str, Exported] = field(default_factory=dict)

    def add(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: TextTokenizer,
        *,
        dtype: torch.dtype | None = None,
        began_from: Path | None = None,
        **options: Any,
    ) -> Path:
        """Write an export as training does, and keep what it must be read as."""
        directory = self.directory / name
        documents = {} if began_from is None else base_documents(began_from)
        export(
            model,
            directory,
            tokenizer=tokenizer_files(tokenizer),
            base=documents,
            dtype=dtype,
            **options,
        )
        rounded = model if dtype is None else copy.deepcopy(model)
        for parameter in rounded.parameters():
            parameter.data = parameter.data.to(dtype).float()
        expected = {
            "logits": reader.logits_of(rounded),
            **reader.readings(tokenizer.pretrained),
        }
        adapters = options.get("adapters") == "alone"
        if began_from is not None and not adapters:
            expected["generation"] = list(SAMPLING.values())[-1:] + list(SAMPLING.values())[:-1]
        self.exports[name] = Exported(directory, expected, began_from if adapters else None)
        return directory


def built(config: ModelConfig, tokenizer: TextTokenizer) -> PreTrainedModel:
    return build_model(
        config,
        vocab_size=tokenizer.vocab_size,
        dtype=torch.float32,
        attention="eager",
        sequence_length=24,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )


def enlarged(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The model with weights so large that positions matter, and no two norms alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * (0.2 if parameter.ndim > 1 else 0.05))
    return model


def as_transformers_4_writes(directory: Path, settings: dict[str, Any]) -> None:
    """Turn the config of an export into what transformers 4 writes, with `settings`."""
    path = directory / "config.json"
    content = json.loads(path.read_text())
    dropped = {"rope_parameters", "dtype", "num_local_experts"}
    if content["model_type"] == "mixtral":
        dropped.remove("num_local_experts")
    content = {key: value for key, value in content.items() if key not in dropped}
    content |= {**settings, "torch_dtype": "float32", "transformers_version": "4.51.3"}
    path.write_text(json.dumps(content, indent=2))
    (directory / "generation_config.json").write_text(json.dumps(SAMPLING))


def tokenizer_of_transformers_4(tokenizer: TextTokenizer, directory: Path) -> TextTokenizer:
    """The tokenizer in the files that transformers 4 writes, with the chat template inline."""
    directory.mkdir()
    (directory / "tokenizer.json").write_text(tokenizer.json)
    special = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "bos_token": "<|endoftext|>"}
    more = {"additional_special_tokens": ["<|im_start|>"], **special}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, **more}
    config["chat_template"] = tokenizer.chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "special_tokens_map.json").write_text(json.dumps(more))
    return open_tokenizer(str(directory))


def tokenizer_of_transformers_5(tokenizer: TextTokenizer, directory: Path) -> TextTokenizer:
    """The tokenizer as ours saves it, with more special tokens."""
    made = AutoTokenizer.from_pretrained(tokenizer.origin)
    made.add_special_tokens({"extra_special_tokens": ["<|im_start|>"]})
    made.save_pretrained(directory)
    return open_tokenizer(str(directory))


def with_adapters(config: ModelConfig, base: Path, tokenizer: TextTokenizer) -> PreTrainedModel:
    model = built(config, tokenizer)
    targets: Any = ["q_proj", "v_proj"] if ARCHITECTURES[model.config.model_type].mixture else None
    lora = LoraConfig(rank=2, alpha=8.0, target_modules=targets or "all-linear")
    inject_adapters(model, lora, str(base), (torch.float32, torch.float32))
    model.to_empty(device="cpu")
    load_pretrained(model, base)
    init_adapters(model, 1)
    return enlarged(model, 5)


def add_exports(cases: Cases, architecture: str, tokenizers: dict[str, TextTokenizer]) -> None:
    """From scratch; from a base of transformers 4, in bf16; from one of transformers 5, in fp32;
    with adapters beside it, alone and merged."""
    dropout = NO_DROPOUT if architecture == "gpt2" else {}
    inline = model_config(architecture, **dropout, **OLDER[architecture])
    scratch = built(inline, cases.tokenizer).to_empty(device="cpu")
    init_random(scratch, 3)
    cases.add(f"{architecture}-scratch", enlarged(scratch, 1), cases.tokenizer)

    for form in (4, 5):
        base = cases.directory / f"{architecture}-base-{form}"
        if form == 4:
            export(scratch, base)
            as_transformers_4_writes(base, OLDER[architecture])
        else:
            scratch.save_pretrained(base)
            (base / "generation_config.json").write_text(json.dumps(SAMPLING))
        tokenizer = tokenizers[f"of-{form}"]
        model = built(ModelConfig(id=str(base)), tokenizer).to_empty(device="cpu")
        load_pretrained(model, base)
        dtype = torch.bfloat16 if form == 4 else None
        cases.add(
            f"{architecture}-from-{form}",
            enlarged(model, 2),
            tokenizer,
            dtype=dtype,
            began_from=base,
        )
    if architecture in WITH_ADAPTERS:
        base = cases.directory / f"{architecture}-base-4"
        adapted = with_adapters(ModelConfig(id=str(base)), base, tokenizers["of-4"])
        for adapters in ("alone", "merged"):
            cases.add(
                f"{architecture}-adapters-{adapters}",
                adapted,
                tokenizers["of-4"],
                began_from=base,
                adapters=adapters,
            )


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cases]:
    directory = tmp_path_factory.mktemp("exports")
    setting = TrainTokenizer(train="bpe", vocab_size=300)
    texts = iter(["some text to learn the merges of", "and some more text"] * 20)
    tokenizer = trained_tokenizer(setting, "key", texts, directory, for_chats=True)
    tokenizers = {
        "of-4": tokenizer_of_transformers_4(tokenizer, directory / "tokenizer-4"),
        "of-5": tokenizer_of_transformers_5(tokenizer, directory / "tokenizer-5"),
    }
    made = Cases(directory, tokenizer)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for architecture in CONFIGS:
        add_exports(made, architecture, tokenizers)
    torch.set_num_threads(threads)
    yield made


def read_by(version: str, cases: Cases) -> dict[str, dict[str, Any]]:
    """What the version makes of each export."""
    packages = TOOLS / f"transformers-{version}"
    assert packages.is_dir(), f"run: sh .ci/tools/transformers (there is no {packages})"
    lines = [
        json.dumps(
            {
                "directory": str(each.directory),
                "base": None if each.base is None else str(each.base),
            }
        )
        for each in cases.exports.values()
    ]
    ended = subprocess.run(
        [sys.executable, reader.__file__],
        input="\n".join(lines),
        env={**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert ended.returncode == 0, ended.stderr
    first, *found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert first == version
    return dict(zip(cases.exports, found, strict=True))


@pytest.mark.parametrize("version", VERSIONS)
def test_another_transformers_reads_the_same_logits_tokens_and_chats(
    version: str, cases: Cases
) -> None:
    assert set(CONFIGS) == set(ARCHITECTURES) == set(OLDER)
    problems = []
    for name, found in read_by(version, cases).items():
        expected = cases.exports[name].expected
        if "error" in found:
            problems.append(f"{name}: {found['error']}")
            continue
        difference = torch.tensor(found["logits"]) - torch.tensor(expected["logits"])
        scale = torch.tensor(expected["logits"]).std().item()
        if not difference.abs().max() < TOLERANCE * scale:
            problems.append(f"{name}: logits differ by {difference.abs().max()} of {scale}")
        problems += [
            f"{name}: {key} {found[key]!r}, here {value!r}"
            for key, value in expected.items()
            if key != "logits" and found[key] != value
        ]
    assert not problems, "\n".join(problems)
