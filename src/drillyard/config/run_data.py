"""Section `data` of run.yaml: sources, format, tokenizer, packing and held-out data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from drillyard.allowed_values import Allowed
from drillyard.config.strict_model import Count, FileMark, NamedFile, StrictModel
from drillyard.deprecation import warn_renamed


class SourceConfig(StrictModel):
    """One source of documents, and its share of the training mixture."""

    path: NamedFile = Field(
        description=(
            "File, directory, Hugging Face data set id, Megatron data (.bin with .idx), or "
            "builtin:text-to-sql / builtin:function-calling / builtin:python-stdlib."
        ),
        examples=["documents.jsonl"],
    )
    weight: PositiveFloat = Field(
        default=1.0,
        description="Share of training sequences drawn from this source, relative to the others.",
    )
    name: str | None = Field(
        default=None, description="Name in metrics; default: the last part of `path`."
    )
    split: str = Field(
        default="train", description="Split of a Hugging Face data set or of Megatron data."
    )
    max_samples: PositiveInt | None = Field(
        default=None,
        description=(
            "At most this many rows, the first ones, before documents are held out; null: all."
        ),
    )
    options: dict[str, Any] = Field(
        default={}, description="Settings of a built-in source, such as {examples: 20000, seed: 0}."
    )


class TrainTokenizer(StrictModel):
    """A tokenizer trained from the training documents."""

    train: Literal["bpe"] = Field(description="Algorithm: byte-level BPE.", examples=["bpe"])
    vocab_size: Annotated[int, Field(ge=260)] = Field(
        description="Entries of the vocabulary, special tokens included.", examples=[8192]
    )


class MegatronConfig(StrictModel):
    """How Megatron data (.bin and .idx) are cut into sequences, split and ordered."""

    isolation: Literal["documents", "none"] = Field(
        default="documents",
        description=(
            "`documents`: attention and positions begin again at each document; `none`: a sequence"
            " is one text, as in Megatron-LM."
        ),
    )
    split: (
        Annotated[
            str,
            Field(pattern=r"^([0-9]+[.]?[0-9]*|[.][0-9]+)(,([0-9]+[.]?[0-9]*|[.][0-9]+)){0,2}$"),
            Allowed("one to three shares with commas between them, such as 969,30,1"),
        ]
        | None
    ) = Field(
        default=None,
        description=(
            "Shares of train, valid and test as in Megatron-LM, 969,30,1: the `split` of a source"
            " then names one of them; null: each source is read whole."
        ),
    )
    samples: PositiveInt | None = Field(
        default=None,
        description=(
            "Train in Megatron-LM's own sample order, as for so many training samples (its"
            " train_iters x global_batch_size, which also decides the order); null: in Drillyard's."
        ),
    )
    seed: Count = Field(default=1234, description="Seed of Megatron-LM's sample order.")

    @field_validator("split")
    @classmethod
    def _require_shares(cls, value: str | None) -> str | None:
        if value is not None and not any(map(float, value.split(","))):
            raise ValueError("its shares are all 0")
        return value


class HeldOutConfig(StrictModel):
    """Documents kept from training, on which evaluation is done."""

    source: Annotated[
        str | SourceConfig | list[str | SourceConfig] | None, FileMark(may_be_name=True)
    ] = Field(
        default=None,
        description=(
            "A source of its own for held-out documents; otherwise they are taken from"
            " `data.source`."
        ),
    )
    fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.0,
        description=(
            "Share of each source's documents that is held out, chosen by a hash of the document."
        ),
    )
    split_by: str | None = Field(
        default=None,
        description=(
            "Column whose values are held out as a whole (such as db_id), so that no value is in"
            " both parts."
        ),
    )


class DataConfig(StrictModel):
    """Data to read, its conversion to tokens, and the packing of tokens into sequences."""

    source: Annotated[str | SourceConfig | list[str | SourceConfig], FileMark(may_be_name=True)] = (
        Field(
            description=(
                "A source, or several with weights: [{path: a.jsonl, weight: 2}, {path: b.jsonl}]."
            ),
            examples=["documents.jsonl"],
        )
    )
    format: Literal["text", "prompt-completion", "chat", "function-calling", "text-to-sql"] = Field(
        default="text",
        description=(
            "How a row becomes a document. `function-calling` is a chat whose calls the model's own"
            " template writes, from rows as Glaive, xLAM, Hermes, the BFCL and OpenAI have them. Of"
            " a chat, a null in messages or tools counts as absent (in Parquet the two are the"
            " same); write a call's arguments as JSON text to train a null."
        ),
    )
    columns: dict[str, str] = Field(
        default={},
        description=(
            "Column names where they differ from the format's own: {prompt: question, completion:"
            " answer}."
        ),
    )
    sequence_length: Annotated[int, Field(ge=8)] = Field(
        description="Tokens per training sequence.", examples=[1024]
    )
    packing: bool = Field(
        default=True,
        description="Pack several documents into one sequence; attention never crosses documents.",
    )
    loss_on: Literal["completion", "all"] | None = Field(
        default=None,
        description=(
            "Tokens that carry loss: `completion` (of a chat the assistant's turns that `train_on`"
            " names) or `all`; default: `all` for text, `completion` for the others."
        ),
    )
    train_on: Literal["all", "last", "each"] = Field(
        default="all",
        description=(
            "Assistant turns of a chat that are learnt: `all`, each as it is rendered when nothing"
            " follows; `last`; or `each` from a document of its own that ends with it."
        ),
    )
    too_long: Literal["truncate", "split", "drop", "error"] | None = Field(
        default=None,
        description=(
            "What is done with a document longer than a sequence; default: `split` for text, "
            "`drop` for the others."
        ),
    )
    tokenizer: Annotated[str | TrainTokenizer | None, FileMark(may_be_name=True)] = Field(
        default=None,
        description=(
            "Tokenizer: null takes the model's, a path or id, or {train: bpe, vocab_size: N}."
        ),
    )
    chat_template: Annotated[str | None, FileMark()] = Field(
        default=None,
        description=(
            "File with the chat template, in Jinja, that a chat is written with and that is saved"
            " with the tokenizer; null: the tokenizer's own."
        ),
    )
    on_error: Literal["skip", "refuse"] = Field(
        default="skip",
        description=(
            "What a row at fault costs: `skip` leaves it out, counts it and names the first;"
            " `refuse` ends with it. Data of which every row is at fault are always refused."
        ),
    )
    megatron: MegatronConfig | None = Field(
        default=None,
        description=(
            "Settings of Megatron data; null: its defaults. Only with a source of that kind."
        ),
    )
    held_out: HeldOutConfig = Field(
        default=HeldOutConfig(), description="Documents kept for evaluation."
    )
    cache_directory: str | None = Field(
        default=None,
        description=(
            "Where tokenised data is kept, relative to the working directory; default:"
            " $DRILLYARD_CACHE or ~/.cache/drillyard."
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _rename_last(cls, values: Any) -> Any:
        if (
            isinstance(values, dict)
            and values.get("loss_on") == "last"
            and "train_on" not in values
        ):
            warn_renamed("data.loss_on: last", "data.train_on: last")
            return {**values, "loss_on": None, "train_on": "last"}
        return values
