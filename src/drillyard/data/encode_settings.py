"""What a run's tokenizer must have for its model, its sources and its format, and how rows are then
encoded."""

from __future__ import annotations

from drillyard.config.kernel_rules import resolve_too_long
from drillyard.config.model_files import configured_vocab_size, require_vocabulary
from drillyard.config.run import RunConfig
from drillyard.config.run_data import DataConfig
from drillyard.data.encoder import EncodeSettings
from drillyard.data.held_out_parts import split_of
from drillyard.data.row_formats import row_format
from drillyard.data.sources import DataSource
from drillyard.data.tokenizer import TextTokenizer
from drillyard.errors import UserError


def sources_with_text(training: list[DataSource]) -> list[DataSource]:
    """The sources from which a tokenizer can be trained. UserError where there are none."""
    readable = [source for source in training if not source.is_megatron]
    if not readable:
        raise UserError(
            "data.tokenizer: no tokenizer can be trained from Megatron data, which are tokens"
            " already. Set a path or id of the one they were made with."
        )
    return readable


def require_fitting_tokenizer(config: RunConfig, tokenizer: TextTokenizer) -> int:
    """The size of the model's vocabulary. UserError where it lacks some of the tokenizer's."""
    configured = configured_vocab_size(config.model)
    vocab_size = len(tokenizer.pretrained) if configured is None else configured
    require_vocabulary(config.model, vocab_size, len(tokenizer.pretrained))
    return vocab_size


def encode_settings(data: DataConfig, tokenizer: TextTokenizer) -> EncodeSettings:
    """How rows are encoded with `tokenizer`. UserError where it does not fit `data.format`."""
    form = row_format(data)
    if form.is_chat and tokenizer.chat_template is None:
        raise UserError(
            f"data.format: {data.format} needs a tokenizer with a chat template, and"
            f" {tokenizer.origin} has none. Set data.tokenizer to one that has (an instruct"
            " model's), name a file by data.chat_template, or use prompt-completion."
        )
    if not form.is_chat and data.format != "text" and tokenizer.eos_id is None:
        raise UserError(
            f"the tokenizer {tokenizer.origin} has no end-of-sequence token, so a completion"
            " would never end. Set data.tokenizer to one that has."
        )
    return EncodeSettings(
        format=form,
        sequence_length=data.sequence_length,
        too_long=resolve_too_long(data),
        split=split_of(data),
        tokenizer_json=tokenizer.json,
        wide=tokenizer.vocab_size > 1 << 16,
        start_ids=tokenizer.start_ids,
        eos_id=tokenizer.eos_id,
        chat_template=tokenizer.chat_template if form.is_chat else None,
        special_tokens=tokenizer.special_tokens,
        template_origin=tokenizer.template_file or "the chat template",
        on_error=data.on_error,
        date=tokenizer.date,
    )
