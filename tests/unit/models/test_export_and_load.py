"""What is exported, transformers reads back to the bit; what transformers saves, is loaded to the
bit."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.facts import says
from tests.unit.models.tiny import CONFIGS, meta_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from drillyard.errors import UserError
from drillyard.export_directory import locked
from drillyard.models.export import export
from drillyard.models.pretrained import load_pretrained, require_matching_weights, stored_dtypes
from drillyard.models.random_init import init_random
from drillyard.models.weight_layout import named_tensors


def made(architecture: str, **options: Any) -> PreTrainedModel:
    model = meta_model(architecture, **options).to_empty(device="cpu")
    init_random(model, 3)
    return model


def blank(architecture: str, **options: Any) -> PreTrainedModel:
    model = meta_model(architecture, **options).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(math.nan)
    return model


def assert_equal(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Every parameter and buffer equal to the bit, under the same names."""
    for found, wanted in (
        (model.state_dict(), expected.state_dict()),
        (buffers(model), buffers(expected)),
    ):
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert tensor.dtype == wanted[name].dtype, name
            assert torch.equal(tensor, wanted[name]), name


def buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers())


def stored(directory: Path) -> dict[str, list[int]]:
    shapes = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(str(path), "pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return shapes


@pytest.mark.slow
@pytest.mark.parametrize("architecture", CONFIGS)
def test_transformers_reads_an_export_to_the_bit_and_would_write_the_same_layout(
    architecture: str, tmp_path: Path
) -> None:
    model = made(architecture)
    export(model, tmp_path / "ours", max_file_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 2
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert_equal(read, model)
    read.save_pretrained(tmp_path / "theirs")
    assert stored(tmp_path / "ours") == stored(tmp_path / "theirs")
    configs = [
        json.loads((tmp_path / side / "config.json").read_text()) for side in ("ours", "theirs")
    ]
    older = ("torch_dtype", "rope_theta", "rope_scaling", "rope_local_base_freq")
    for config, key in itertools.product(configs, (*older, "partial_rotary_factor", "num_experts")):
        config.pop(key, None)
    assert configs[0] == configs[1]
    assert configs[0]["use_cache"] is True and configs[0]["architectures"] == [type(read).__name__]


@pytest.mark.parametrize("architecture", sorted(CONFIGS.keys() - {"gpt2"}))
def test_a_new_model_says_dtype_positions_and_experts_as_transformers_4_does_too(
    architecture: str, tmp_path: Path
) -> None:
    experts = {"qwen3_moe": {"num_experts": 4}}.get(architecture, {})
    export(made(architecture, rope_theta=777.0), tmp_path, dtype=torch.bfloat16)
    content = json.loads((tmp_path / "config.json").read_text())
    older = {"torch_dtype": "bfloat16", "rope_theta": 777.0, "rope_scaling": None, **experts}
    assert {key: content.get(key, "missing") for key in older} == older
    tables = content["rope_parameters"]
    table = tables.get("full_attention", tables)
    assert (content["dtype"], table["rope_theta"]) == ("bfloat16", 777.0)


@pytest.mark.slow
@pytest.mark.parametrize("max_shard_size", ["20KB", "1GB"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_model_saved_by_transformers_is_loaded_as_from_pretrained_does(
    architecture: str, max_shard_size: str, tmp_path: Path
) -> None:
    made(architecture).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    model = blank(architecture)
    require_matching_weights(meta_model(architecture), str(tmp_path))
    load_pretrained(model, tmp_path)
    assert_equal(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_frozen_weights_are_those_of_the_files_and_stay_in_them(
    architecture: str, tmp_path: Path
) -> None:
    made(architecture).save_pretrained(tmp_path)
    model = blank(architecture)
    model.requires_grad_(False)
    load_pretrained(model, tmp_path)
    assert_equal(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    maps = [
        line.split()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(tmp_path) in line
    ]
    places = [[int(end, 16) for end in words[0].split("-")] for words in maps]
    mapped = {
        name
        for name, tensor in model.named_parameters()
        if any(a <= tensor.data_ptr() < b for a, b in places)
    }
    # Files hold each expert apart, so stacked ones are read.
    assert mapped == {name for name, _ in model.named_parameters() if "experts" not in name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_half_precision_files_are_widened_to_the_master_precision(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    made("mixtral").to(torch.bfloat16).save_pretrained(tmp_path)
    model = blank("mixtral", dtype=dtype)
    load_pretrained(model, tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert all(
        torch.equal(tensor, expected.state_dict()[name])
        for name, tensor in model.state_dict().items()
    )


def test_an_export_in_half_precision_is_rounded_once(tmp_path: Path) -> None:
    model = made("qwen3_moe")
    export(model, tmp_path / "half", dtype=torch.bfloat16)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert read.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor.to(torch.bfloat16)), name


def test_base_model_names_without_their_prefix_are_understood(tmp_path: Path) -> None:
    """The files of GPT-2 on the hub name `h.0...`, not `transformer.h.0...`, and hold old mask
    buffers."""
    model = made("gpt2")
    export(model, tmp_path / "new")
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(old, tmp_path / "new" / "model.safetensors", metadata={"format": "pt"})
    loaded = blank("gpt2")
    load_pretrained(loaded, tmp_path / "new")
    assert_equal(loaded, model)


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weights_are_read_from_whichever_name_the_files_have(
    kept: str, tmp_path: Path
) -> None:
    model = made("llama", tie_word_embeddings=True)
    export(model, tmp_path / "tied")
    path = tmp_path / "tied" / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    tensors[kept] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    loaded = blank("llama", tie_word_embeddings=True)
    load_pretrained(loaded, tmp_path / "tied")
    assert_equal(loaded, model)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_tied_weights_that_differ_in_the_files_are_refused(tmp_path: Path) -> None:
    export(made("llama"), tmp_path / "untied")
    with pytest.raises(UserError, match="config ties them"):
        load_pretrained(blank("llama", tie_word_embeddings=True), tmp_path / "untied")


def edit(directory: Path, change: Any) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("llama", lambda t: t.pop("model.norm.weight"), r"lacks model\.norm\.weight"),
        ("llama", lambda t: t.update(extra=torch.ones(2)), "extra"),
        (
            "llama",
            lambda t: t.update({"model.norm.weight": torch.ones(5)}),
            r"shape \[5\] .*\[32\]",
        ),
        (
            "mixtral",
            lambda t: t.pop("model.layers.0.block_sparse_moe.experts.3.w2.weight"),
            r"3 of its parts",
        ),
    ],
)
def test_files_of_another_model_are_refused_by_name(
    architecture: str, change: Any, message: str, tmp_path: Path
) -> None:
    export(made(architecture), tmp_path / "model")
    edit(tmp_path / "model", change)
    with pytest.raises(UserError, match=message) as caught:
        load_pretrained(blank(architecture), tmp_path / "model")
    assert len(str(caught.value).splitlines()) <= 2
    with pytest.raises(UserError, match=message):
        require_matching_weights(meta_model(architecture), str(tmp_path / "model"))


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        load_pretrained(blank("llama"), tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"it has pytorch_model\.bin"):
        load_pretrained(blank("llama"), tmp_path)
    export(made("llama"), tmp_path / "model", max_file_bytes=20_000)
    victim = tmp_path / "model" / "model-00001-of-00004.safetensors"
    content = victim.read_bytes()
    victim.write_bytes(content[:200])
    with pytest.raises(UserError, match="cannot be read"):
        load_pretrained(blank("llama"), tmp_path / "model")
    victim.unlink()
    with pytest.raises(UserError, match="1 of 4 weight files"):
        load_pretrained(blank("llama"), tmp_path / "model")


def test_the_tokenizer_and_generation_settings_travel_along(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    files = {path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()}
    model = made("llama")
    # Settings that transformers warns of and models on the hub have: sampling's, without sampling.
    model.generation_config.temperature = 0.6
    export(model, tmp_path / "model", tokenizer=files)
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("b")["input_ids"] == [1]
    settings = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert (settings["eos_token_id"], settings["temperature"]) == (1, 0.6)


def test_each_parameter_is_written_in_a_dtype_of_its_own(tmp_path: Path) -> None:
    model = made("qwen3_moe")
    export(
        model,
        tmp_path / "mixed",
        dtype={"model.norm.weight": torch.float16, "lm_head.weight": torch.bfloat16},
    )
    read = load_file(tmp_path / "mixed" / "model.safetensors")
    assert (
        read["model.norm.weight"].dtype == torch.float16
        and read["lm_head.weight"].dtype == torch.bfloat16
    )
    assert read["model.embed_tokens.weight"].dtype == torch.float32
    assert json.loads((tmp_path / "mixed" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_the_dtypes_of_stored_weights_are_found_under_the_names_of_parameters(
    architecture: str, tmp_path: Path
) -> None:
    made(architecture).to(torch.bfloat16).save_pretrained(tmp_path)
    model = meta_model(architecture)
    assert stored_dtypes(model, tmp_path) == dict.fromkeys(named_tensors(model), torch.bfloat16)


def test_an_export_replaces_an_older_one_and_nothing_else(tmp_path: Path) -> None:
    first, second = made("llama"), made("gpt2")
    target = tmp_path / "final"
    export(first, target, max_file_bytes=20_000)
    with pytest.raises(UserError, match="earlier export"):
        export(second, target)
    export(second, target, overwrite=True)
    assert_equal(AutoModelForCausalLM.from_pretrained(target), second)
    assert not list(target.glob("model-*")), "files of the older model are gone"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"other: has thesis\.tex"):
        export(second, tmp_path / "other", overwrite=True)
    assert (tmp_path / "other" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("looks", [0, 1])
def test_an_export_that_may_no_longer_write_leaves_the_older_one(
    tmp_path: Path, looks: int
) -> None:
    """`before_write` ends the process: before the first file, and before files are replaced."""
    target, seen = tmp_path / "final", []
    export(made("llama"), target)
    before = {path.name: path.read_bytes() for path in target.glob("*.safetensors")}

    def ends() -> None:
        seen.append(1)
        if len(seen) > looks:
            raise SystemExit(1)

    with pytest.raises(SystemExit):
        export(made("gpt2"), target, overwrite=True, before_write=ends)
    assert len(seen) == looks + 1
    assert {path.name: path.read_bytes() for path in target.glob("*.safetensors")} == before
    assert AutoModelForCausalLM.from_pretrained(target).config.model_type == "llama"


def test_a_failed_export_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made("llama")
    target = tmp_path / "final"
    export(model, target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    for number in range(1, 6):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full_disk_at(number))
            with pytest.raises(UserError, match=r"final: .*No space left"):
                export(made("gpt2"), target, overwrite=True)
        assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_directory_below_a_file_is_refused_with_one_path_and_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as refused:
        export(made("llama"), tmp_path / "file" / "model")
    assert str(refused.value).count(str(tmp_path)) == 1
    assert says(
        str(refused.value),
        f"{tmp_path}/file/model: Not a directory: ... is a file; choose another path",
    )


def full_disk_at(number: int) -> Callable[[int], None]:
    """An fsync whose call of this number, from 1, finds the disk full."""
    calls = itertools.count(1)

    def fsync(descriptor: int) -> None:
        if next(calls) == number:
            raise OSError(28, "No space left on device")

    return fsync


class Killed(BaseException):
    """What ends a process at once."""


def killed_after(
    moments: int, calls: Iterator[int], function: Callable[..., Any]
) -> Callable[..., Any]:
    """`function`, until it and its like have been called so often."""

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) >= moments:
            raise Killed
        return function(*arguments, **options)

    return call


@pytest.mark.slow
def test_an_export_that_is_killed_anywhere_is_done_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its first rename or deletion, its second, and so on: never both models gone,
    never a mixture."""
    old, new = made("llama"), made("gpt2")
    whole = tmp_path / "whole"
    export(new, whole)
    expected = {path.name: path.read_bytes() for path in whole.iterdir()}
    target = tmp_path / "final"
    moments = 0
    while True:
        export(old, target, max_file_bytes=20_000, overwrite=True)
        calls = itertools.count()
        with monkeypatch.context() as patch:
            for name in ("replace", "unlink"):
                patch.setattr(Path, name, killed_after(moments, calls, getattr(Path, name)))
            try:
                export(new, target, overwrite=True)
                break
            except Killed:
                moments += 1
        if (target / "config.json").exists():
            loaded = AutoModelForCausalLM.from_pretrained(target)
            assert_equal(loaded, old if type(loaded) is type(old) else new)
        export(new, target, overwrite=True)
        assert {path.name: path.read_bytes() for path in target.iterdir()} == expected
    assert moments > 10


def test_an_export_that_is_going_on_keeps_others_out(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with locked(tmp_path / "model"), pytest.raises(UserError, match="another export"):
        export(made("llama"), tmp_path / "model")
    assert not list((tmp_path / "model").iterdir())
