"""Published models: the counts of their config.json equal what transformers builds, and what their
makers publish."""

from __future__ import annotations

import pytest
from tests.facts import says
from tests.unit.modelspec.building import built_model, named_shapes, shapes_of, transformers_config
from tests.unit.modelspec.public_configs import AS_PUBLISHED, CONFIGS, TOTALS

from drillyard.modelspec import model_spec


@pytest.mark.slow
@pytest.mark.parametrize("repository", CONFIGS)
def test_tensors_equal_those_of_the_model_built_on_the_meta_device(repository):
    config = CONFIGS[repository]
    assert named_shapes(model_spec(config)) == shapes_of(built_model(transformers_config(config)))


@pytest.mark.parametrize("repository", TOTALS)
def test_total_parameters_as_the_hub_shows_them(repository):
    assert model_spec(CONFIGS[repository]).total_parameters == TOTALS[repository]


@pytest.mark.parametrize(
    ("repository", "total", "windowed_layers"),
    [
        ("deepseek-ai/DeepSeek-V3", 671_026_404_352, 0),
        ("openai/gpt-oss-20b", 20_914_757_184, 12),
        ("google/gemma-3-4b-it", 3_880_263_168, 29),
        ("google/gemma-2-27b", 27_227_128_320, 23),
        ("openai-community/gpt2-medium", 354_823_168, 0),
        ("microsoft/Phi-4-mini-instruct", 3_836_021_760, 32),
        ("CohereLabs/c4ai-command-r7b-12-2024", 8_028_033_024, 24),
        ("meta-llama/Llama-4-Scout-17B-16E", 107_769_861_120, 36),
    ],
)
def test_whole_files_are_read_as_published(repository, total, windowed_layers):
    spec = model_spec(AS_PUBLISHED[repository])
    assert spec.total_parameters == total
    assert sum(window is not None for window in spec.windows) == windowed_layers


@pytest.mark.parametrize(
    ("repository", "note"),
    [
        ("deepseek-ai/DeepSeek-V3", "multi-token prediction"),
        ("openai/gpt-oss-20b", "quantised on disk"),
        ("google/gemma-3-4b-it", "gemma3"),
        ("meta-llama/Llama-4-Scout-17B-16E", "llama4"),
    ],
)
def test_what_is_not_counted_is_noted(repository, note):
    assert any(says(line, note) for line in model_spec(AS_PUBLISHED[repository]).notes)


# Active parameters in billions as their makers give them: Mixtral (arXiv 2401.04088), Qwen3
# (2505.09388), Qwen1.5-MoE and Phi-3.5-MoE (model cards), DeepSeek-V2 (2405.04434), DeepSeek-V3
# (2412.19437), OLMoE (2409.02060), Kimi K2 (2507.20534), Llama 4 (model card), gpt-oss
# (2508.10925).
@pytest.mark.parametrize(
    ("repository", "billions"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", 12.9),
        ("mistralai/Mixtral-8x22B-v0.1", 39),
        ("Qwen/Qwen3-30B-A3B", 3.3),
        ("Qwen/Qwen3-235B-A22B", 22),
        ("Qwen/Qwen1.5-MoE-A2.7B", 2.7),
        ("microsoft/Phi-3.5-MoE-instruct", 6.6),
        ("deepseek-ai/DeepSeek-V2", 21),
        ("deepseek-ai/DeepSeek-V3", 37),
        ("allenai/OLMoE-1B-7B-0924", 1.3),
        ("moonshotai/Kimi-K2-Instruct", 32),
        ("meta-llama/Llama-4-Scout-17B-16E", 17),
    ],
)
def test_active_parameters_of_published_mixtures(repository, billions):
    active = model_spec(CONFIGS.get(repository) or AS_PUBLISHED[repository]).active_parameters / 1e9
    digits = len(str(billions).partition(".")[2])
    assert billions in (round(active, digits), int(active * 10**digits) / 10**digits)


@pytest.mark.parametrize(
    ("repository", "billions"), [("openai/gpt-oss-120b", 5.13), ("openai/gpt-oss-20b", 3.61)]
)
def test_active_parameters_where_the_maker_leaves_the_input_embedding_out(repository, billions):
    spec = model_spec(CONFIGS.get(repository) or AS_PUBLISHED[repository])
    assert round((spec.active_parameters - spec.embedding_parameters) / 1e9, 2) == billions


def test_the_text_part_equals_that_of_the_multimodal_model_built():
    config = AS_PUBLISHED["google/gemma-3-4b-it"]
    model = built_model(
        transformers_config({name: config[name] for name in ("model_type", "text_config")})
    )
    text = sum(p.numel() for name, p in model.named_parameters() if "language_model" in name)
    assert model_spec(config).total_parameters == text
