"""A run with adapters from the command line: killed and resumed on other ranks, another base
refused, continued.

The base is a directory of a tiny bf16 model. The reference is a run that nobody disturbs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tests.distributed.adapter_case import LORA, write_base
from tests.distributed.test_qlora import in_nf4, is_quantized
from tests.distributed.training_case import LLAMA
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 30


def run_config(directory: Path, name: str, **model: Any) -> Path:
    """run.yaml of a run called `name` in `directory`; `model` changes its section."""
    content = {
        "name": name,
        "output": str(directory / "runs"),
        "model": {"id": str(directory / "base"), "lora": LORA} | model,
        "data": {
            "source": str(directory / "documents.jsonl"),
            "format": "prompt-completion",
            "sequence_length": 64,
            "cache_directory": str(directory / "cache"),
            "held_out": {"fraction": 0.1},
        },
        "training": {
            "steps": STEPS,
            "global_batch_size": 4,
            "optimizer": {"learning_rate": 1e-2},
            "device": "cpu",
            "precision": "fp32",
            "threads_per_rank": 1,
        },
        "checkpoint": {"every_steps": 5, "keep": 9},
        "logging": {"tensorboard": False},
    }
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def command(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "drillyard", *map(str, arguments)]


def drillyard(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=300, check=False
    )


def train_until_killed(config: Path, num_ranks: int, step: int) -> None:
    """Train until the checkpoint of `step` is complete, then kill the whole run at once."""
    run = config.parent / "runs" / config.stem
    process = subprocess.Popen(
        command("train", config, "--nproc-per-node", num_ranks),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    manifest = run / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    end = time.monotonic() + 120
    while not manifest.is_file():
        assert time.monotonic() < end and process.poll() is None, (run / "events.jsonl").read_text()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def losses(run: Path) -> dict[int, float]:
    """The loss of each step, by its last time."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lora")
    write_base(made, LLAMA | {"initializer_range": 0.15}, dtype=torch.bfloat16)
    ended = drillyard("train", run_config(made, "whole"), "--nproc-per-node", 2)
    assert ended.returncode == 0, ended.stderr
    return made


def test_a_run_that_is_killed_goes_on_on_one_rank_and_then_on_two(directory: Path) -> None:
    base = digest(directory / "base" / "model.safetensors")
    config = run_config(directory, "killed")
    train_until_killed(config, 2, 5)
    train_until_killed(config, 1, 15)
    ended = drillyard("train", config, "--nproc-per-node", 2)
    assert ended.returncode == 0, ended.stderr
    whole, killed = directory / "runs" / "whole", directory / "runs" / "killed"
    expected, found = losses(whole), losses(killed)
    assert found.keys() == expected.keys() == set(range(1, STEPS + 1))
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-5
    assert expected[1] - expected[STEPS] > 0.3
    assert digest(directory / "base" / "model.safetensors") == base


def test_a_checkpoint_holds_adapters_and_moments_alone(directory: Path) -> None:
    run = directory / "runs" / "whole"
    adapters = sum(
        t.numel() for t in load_file(run / "final" / "adapter_model.safetensors").values()
    )
    saved = run / "checkpoints" / f"step-{STEPS:08d}"
    assert sum(path.stat().st_size for path in saved.iterdir()) < 12.4 * adapters + 1e6
    assert len(json.loads((saved / "manifest.json").read_text())["metadata"]["base"]) == 32


def test_a_run_records_that_its_ranks_hold_frozen_weights_whole(directory: Path) -> None:
    record = json.loads((directory / "runs" / "whole" / "resolved.json").read_text())
    assert [layout["frozen_whole"] for layout in record["layouts"]] == [True]


def test_another_base_is_refused(directory: Path, tmp_path: Path) -> None:
    """One bit of one weight of the base is another one."""
    config = run_config(directory, "moved")
    train_until_killed(config, 1, 5)
    weights = directory / "base" / "model.safetensors"
    whole = weights.read_bytes()
    try:
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        ended = drillyard("train", config)
        checkpoint = directory / "runs" / "moved" / "checkpoints" / "step-00000005"
        exported = drillyard("export", checkpoint, tmp_path / "out", "--merge")
    finally:
        weights.write_bytes(whole)
    assert ended.returncode == 2 and "other weights" in ended.stderr
    assert exported.returncode == 2 and "other weights" in exported.stderr
    assert len(ended.stderr.strip().splitlines()) <= 2 and not (tmp_path / "out").exists()


def test_final_is_continued_and_measured(directory: Path) -> None:
    """By the flags that the refusal of other data in its own run directory gives."""
    final = directory / "runs" / "whole" / "final"
    more = shutil.copy(directory / "documents.jsonl", directory / "more.jsonl")
    on_other_data = ("train", directory / "whole.yaml", "--set", f"data.source={more}")
    refused = drillyard(*on_other_data)
    assert refused.returncode == 2, refused.stderr
    flags = shlex.split(refused.stderr[refused.stderr.index("--set ") :])
    assert f"model.lora.adapter={final}" in flags
    ended = drillyard(*on_other_data, *flags)
    assert ended.returncode == 0, ended.stderr
    whole, further = directory / "runs" / "whole", directory / "runs" / "whole-further"
    before, after = losses(whole), losses(further)
    assert after[1] < before[1] - 0.3
    measured = drillyard("eval", final)
    merged = directory / "merged"
    exported = drillyard(
        "export",
        directory / "runs" / "whole" / "checkpoints" / f"step-{STEPS:08d}",
        merged,
        "--merge",
    )
    assert exported.returncode == 0 and {
        t.dtype for t in load_file(merged / "model.safetensors").values()
    } == {torch.bfloat16}
    of_merged = drillyard("eval", merged, "--data", directory / "whole.yaml")
    figures = [float(ended.stdout.split("│")[-2 - 3].strip()) for ended in (measured, of_merged)]
    assert abs(figures[0] - figures[1]) < 0.02, (measured.stdout, of_merged.stdout)


def adapter_of_peft(directory: Path, name: str, merged: bool = False, **settings: Any) -> Path:
    """An adapter that peft alone has made, as it leaves it: without a tokenizer. `merged`: the
    model in which it is."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(directory / "base", dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    for key, parameter in adapted.named_parameters():
        if "lora_B" in key:
            parameter.data.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(key)))
    path = directory / f"{name}-merged" if merged else directory / name
    if merged:
        adapted.merge_and_unload().save_pretrained(path)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(directory / "base" / file, path / file)
    else:
        adapted.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (
            "by-pattern",
            {"r": 8, "lora_alpha": 32, "use_rslora": True, "target_modules": r".*\.(q|v)_proj"},
        ),
        ("everywhere", {"r": 2, "lora_alpha": 3, "use_dora": True, "target_modules": "all-linear"}),
    ],
)
def test_an_adapter_that_peft_made_is_measured_as_it_is(
    directory: Path, name: str, settings: dict[str, Any]
) -> None:
    adapter, merged = (
        adapter_of_peft(directory, name, merged, **settings) for merged in (False, True)
    )
    # The config is of a run with other adapters.
    measured, expected = (
        drillyard("eval", path, "--data", directory / "whole.yaml") for path in (adapter, merged)
    )
    assert measured.returncode == expected.returncode == 0, measured.stderr + expected.stderr
    figures = [float(ended.stdout.split("│")[-2 - 3].strip()) for ended in (measured, expected)]
    assert abs(figures[0] - figures[1]) < 2e-4, (measured.stdout, expected.stdout)


def test_an_adapter_that_cannot_be_measured_as_it_is_is_refused(directory: Path) -> None:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    for name, change, named in (
        ("patterns", {"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ("some-layers", {"layers_to_transform": [0]}, "lacks"),
        ("without-base", {}, "base_model_name_or_path"),
    ):
        adapter = adapter_of_peft(directory, name, **settings, **change)
        if name == "without-base":
            config = json.loads((adapter / "adapter_config.json").read_text())
            (adapter / "adapter_config.json").write_text(
                json.dumps(config | {"base_model_name_or_path": None})
            )
        ended = drillyard("eval", adapter, "--data", directory / "whole.yaml")
        assert ended.returncode == 2 and named in ended.stderr, ended.stderr
        assert len(ended.stderr.strip().splitlines()) <= 2, ended.stderr


def other_shape(directory: Path) -> dict[str, Any]:
    adapter = directory / "other-shape"
    adapter.mkdir(exist_ok=True)
    final = directory / "runs" / "whole" / "final"
    (adapter / "adapter_config.json").write_text((final / "adapter_config.json").read_text())
    tensors = {name: torch.zeros(4, 7) for name in load_file(final / "adapter_model.safetensors")}
    save_file(tensors, adapter / "adapter_model.safetensors")
    return {"adapter": str(adapter)}


def other_base(directory: Path) -> dict[str, Any]:
    adapter = directory / "other-base"
    adapter.mkdir(exist_ok=True)
    config = json.loads(
        (directory / "runs" / "whole" / "final" / "adapter_config.json").read_text()
    )
    (adapter / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "other/Model-1B"})
    )
    return {"adapter": str(adapter)}


def without_alpha(directory: Path) -> dict[str, Any]:
    """peft takes 8 then."""
    adapter = directory / "without-alpha"
    adapter.mkdir(exist_ok=True)
    final = directory / "runs" / "whole" / "final"
    config = json.loads((final / "adapter_config.json").read_text())
    config.pop("lora_alpha")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").write_bytes(
        (final / "adapter_model.safetensors").read_bytes()
    )
    return {"adapter": str(adapter)}


@pytest.mark.parametrize(
    ("lora", "named"),
    [
        ({"target_modules": ["q_proj", "query"]}, ["query", "v_proj"]),
        ({"target_modules": []}, ["target_modules", "all-linear"]),
        ({"rank": 17}, ["17", "k_proj", "16 outputs"]),
        ({"adapter": "nowhere"}, ["nowhere", "adapter_config.json"]),
        (other_shape, ["other sizes", "lora_A"]),
        (other_base, ["other/Model-1B", "base_model_name_or_path"]),
        (without_alpha, ["lora_alpha 8", "model.lora.alpha"]),
        ({"adapter": "runs/whole/final", "rank": 8}, ["has r 4", "model.lora.rank"]),
        (
            {"adapter": "runs/whole/final", "variant": "rslora"},
            ["use_rslora", "model.lora.variant"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_read(
    directory: Path, lora: Any, named: list[str]
) -> None:
    changes = lora(directory) if callable(lora) else dict(lora)
    if "adapter" in changes:
        changes["adapter"] = str(directory / changes["adapter"])
    ended = drillyard("train", run_config(directory, "refused", lora=LORA | changes))
    assert ended.returncode == 2, ended.stderr
    assert all(text in ended.stderr for text in named), ended.stderr
    assert len(ended.stderr.strip().splitlines()) <= 2, ended.stderr
    assert not (directory / "runs" / "refused" / "metrics.jsonl").exists()


def test_merging_needs_adapters(directory: Path) -> None:
    config = run_config(directory, "without-adapters", lora=None)
    train_until_killed(config, 1, 5)
    checkpoint = directory / "runs" / "without-adapters" / "checkpoints" / "step-00000005"
    exported = drillyard("export", checkpoint, directory / "never", "--merge")
    assert (
        exported.returncode == 2
        and "--merge" in exported.stderr
        and not (directory / "never").exists()
    )


@pytest.fixture(scope="module")
def wide_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose layers nf4 can hold, and a run beside it that nobody disturbs."""
    made = tmp_path_factory.mktemp("qlora")
    wide = LLAMA | {"hidden_size": 64, "head_dim": 16, "initializer_range": 0.15}
    write_base(made, wide, dtype=torch.bfloat16)
    ended = drillyard("train", run_config(made, "whole", quantization="nf4"), "--nproc-per-node", 2)
    assert ended.returncode == 0, ended.stderr
    return made


def test_a_run_beside_nf4_is_killed_and_goes_on_alike(wide_directory: Path) -> None:
    config = run_config(wide_directory, "killed", quantization="nf4")
    train_until_killed(config, 2, 5)
    content = config.read_text()
    config.write_text(content.replace("quantization: nf4", "quantization: null"))
    refused = drillyard("train", config)
    assert refused.returncode == 2 and 'model.quantization: "nf4" -> null' in refused.stderr
    config.write_text(content)
    ended = drillyard("train", config)
    assert ended.returncode == 0, ended.stderr
    expected, found = (losses(wide_directory / "runs" / name) for name in ("whole", "killed"))
    assert max(abs(found[step] - expected[step]) for step in range(1, STEPS + 1)) < 1e-5
    assert expected[1] - expected[STEPS] > 0.3


def test_a_run_beside_nf4_is_measured_and_merged(wide_directory: Path) -> None:
    run, merged = wide_directory / "runs" / "whole", wide_directory / "merged"
    measured = drillyard("eval", run / "final")
    exported = drillyard("export", run / "checkpoints" / f"step-{STEPS:08d}", merged, "--merge")
    assert measured.returncode == exported.returncode == 0, measured.stderr + exported.stderr
    weights = load_file(merged / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert weights["model.layers.0.mlp.up_proj.weight"].shape == (64, 64)
    of_merged = drillyard("eval", merged, "--data", wide_directory / "whole.yaml")
    # With the config of another run, for its data: the adapters are measured beside what they were
    # trained beside.
    elsewhere = drillyard(
        "eval", run / "final", "--data", run_config(wide_directory, "plain", lora=None)
    )
    figures = [
        float(ended.stdout.split("│")[-2 - 3].strip()) for ended in (measured, of_merged, elsewhere)
    ]
    assert abs(figures[0] - figures[1]) < 0.02, (measured.stdout, of_merged.stdout)
    assert figures[2] == figures[0], (measured.stdout, elsewhere.stdout)


def test_answers_beside_nf4_are_those_of_the_weights_unpacked(wide_directory: Path) -> None:
    """transformers has the weights as nf4 has them, and peft the adapter of the run."""
    final = wide_directory / "runs" / "whole" / "final"
    model = AutoModelForCausalLM.from_pretrained(wide_directory / "base")
    for name, parameter in model.named_parameters():
        if is_quantized(name):
            parameter.data = in_nf4(parameter.data).to(parameter.dtype)
    adapted = peft.PeftModel.from_pretrained(model, final)
    tokenizer = AutoTokenizer.from_pretrained(final)
    prompt = tokenizer("The first words", return_tensors="pt")
    output = adapted.generate(**prompt, do_sample=False, max_new_tokens=12)
    expected = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    asked = ["--prompt", "The first words", "--max-new-tokens", 12, "--json"]
    found = drillyard("generate", wide_directory / "runs" / "whole", *asked)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["answer"] == expected.removesuffix(tokenizer.eos_token)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"quantization": "nf4", "lora": None}, ["model.quantization", "model.lora"]),
        ({"quantization": "int8"}, ["model.quantization", "nf4"]),
        (
            {"quantization": "nf4", "id": "narrow"},
            ["model.quantization", "32 inputs", "multiple of 64"],
        ),
    ],
)
def test_weights_that_nf4_cannot_hold_are_refused(
    directory: Path, model: dict[str, Any], named: list[str]
) -> None:
    changes = model | ({"id": str(directory / "base")} if model.get("id") == "narrow" else {})
    ended = drillyard("train", run_config(directory, "refused", **changes))
    assert ended.returncode == 2 and len(ended.stderr.strip().splitlines()) <= 2, ended.stderr
    assert all(text in ended.stderr for text in named), ended.stderr
