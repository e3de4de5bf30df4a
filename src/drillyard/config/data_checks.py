"""Contradictions in section `data` of a run config, and the rules of its sources and formats."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.config.problems import Path, Problem, problem, refused_address, remote_scheme
from drillyard.config.run import RunConfig
from drillyard.config.run_data import SourceConfig, TrainTokenizer

BUILTIN = "builtin:"
BUILTIN_FORMATS = {
    "builtin:text-to-sql": "text-to-sql",
    "builtin:function-calling": "function-calling",
    "builtin:python-stdlib": "text",
}
CHAT_FORMATS = ("chat", "function-calling")

# A path with one of these is a file or directory, not the id of a Hugging Face data set.
FILE_ENDINGS = (".json", ".jsonl", ".parquet", ".csv", ".txt", ".gz", ".zst", ".bin", ".idx")
DIRECTORY_BEGINNINGS = ("/", "./", "../", "~")

# The columns that a format reads; `columns` may rename these only.
ROLES = {
    "text": ("text",),
    "prompt-completion": ("prompt", "completion"),
    "chat": ("messages", "tools", "system"),
    "function-calling": ("messages", "tools", "system"),
    "text-to-sql": ("schema", "question", "sql"),
}


def normalized_sources(source: str | SourceConfig | list[str | SourceConfig]) -> list[SourceConfig]:
    """A source setting as a list of SourceConfig."""
    each = source if isinstance(source, list) else [source]
    # Not validated: that would resolve references to the environment.
    return [
        SourceConfig.model_construct(path=item) if isinstance(item, str) else item for item in each
    ]


def has_held_out(config: RunConfig) -> bool:
    """Whether there will be held-out data: configured, or part of a built-in source."""
    held_out = config.data.held_out
    built_in = any(
        source.path.startswith(BUILTIN) for source in normalized_sources(config.data.source)
    )
    return held_out.source is not None or held_out.fraction > 0 or built_in


def source_problems(config: RunConfig) -> Iterator[Problem]:
    """Of `data.source` and `data.held_out`."""
    held_out = config.data.held_out
    yield from _source_list(config, ("data", "source"), normalized_sources(config.data.source))
    if held_out.source is not None:
        yield from _source_list(
            config, ("data", "held_out", "source"), normalized_sources(held_out.source)
        )
        if held_out.fraction > 0 or held_out.split_by is not None:
            yield problem(
                "data.held_out",
                "held-out documents come from `source` or from `fraction`, not from both;"
                " remove one",
            )
    elif held_out.split_by is not None and held_out.fraction == 0:
        yield problem(
            "data.held_out.fraction",
            "missing: split_by needs the fraction to hold out, such as 0.1",
        )


def _source_list(config: RunConfig, path: Path, sources: list[SourceConfig]) -> Iterator[Problem]:
    if not sources:
        yield Problem(path, "is an empty list; name at least one source")
    names: dict[str, int] = {}
    for index, source in enumerate(sources):
        at = (*path, index) if len(sources) > 1 else path
        name = source.name or source.path.rstrip("/").rpartition("/")[2]
        if name in names:
            yield Problem(
                at,
                f"has the name '{name}' of entry {names[name]}; give each a `name`, for the"
                " metrics",
            )
        names.setdefault(name, index)
        if source.path.startswith(BUILTIN):
            needed = BUILTIN_FORMATS.get(source.path)
            if needed is None:
                yield Problem(
                    at, f"there is no '{source.path}'; built in are {' and '.join(BUILTIN_FORMATS)}"
                )
            elif needed != config.data.format:
                yield problem(
                    "data.format",
                    f"found '{config.data.format}'; {source.path} needs format: {needed}",
                )
        elif remote_scheme(source.path) is None and (refused := refused_address(source.path)):
            yield Problem(at, refused)
        elif source.options and (
            source.path.endswith(FILE_ENDINGS) or source.path.startswith(DIRECTORY_BEGINNINGS)
        ):
            message = (
                f"only built-in sources and Hugging Face data sets have options; '{source.path}' is"
                " neither"
            )
            yield Problem((*at, "options"), message)


def format_problems(config: RunConfig) -> Iterator[Problem]:
    """Of `data.format` and what depends on it: columns, loss, chat template."""
    data = config.data
    roles = ROLES[data.format]
    for role in data.columns:
        if role not in roles:
            message = f"format {data.format} has no such column; its columns are {', '.join(roles)}"
            yield Problem(("data", "columns", role), message)
    if data.format == "text" and data.loss_on == "completion":
        yield problem(
            "data.loss_on",
            "format text has no completions; write loss_on: all, or choose another format",
        )
    if data.chat_template is not None and data.format not in CHAT_FORMATS:
        yield problem(
            "data.chat_template",
            f"a template writes chats, and the format is {data.format}; remove it, or write"
            f" format: {CHAT_FORMATS[0]}",
        )
    elif data.chat_template is not None and isinstance(data.tokenizer, TrainTokenizer):
        yield problem(
            "data.chat_template",
            "a tokenizer that is trained has a template of its own, for the tokens that it has;"
            " remove it, or name a tokenizer",
        )
    if data.train_on != "all" and data.format not in CHAT_FORMATS:
        message = (
            f"{data.train_on} is for the turns of a chat, and the format is {data.format};"
            " remove it"
        )
        yield problem("data.train_on", message)
    elif data.train_on != "all" and data.loss_on == "all":
        yield problem(
            "data.train_on",
            f"{data.train_on} chooses among turns, and loss_on: all learns every token; remove one",
        )
