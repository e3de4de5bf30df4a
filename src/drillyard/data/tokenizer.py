"""The tokenizer of a run: the model's, one from a path, or one trained from the training documents.

A `TextTokenizer` has the parts that tokenising needs (the `tokenizer.json`, the ids of special
tokens, the chat template), so that workers load only the `tokenizers` library; the transformers
object is created on first use.

A trained tokenizer is byte-level BPE: every text can be encoded, and decode(encode(x)) == x
including leading spaces. Its <|endoftext|> begins and ends documents, its <|pad|> fills sequences.
For chats it has a chat template in the manner of ChatML (`trained_chat.jinja`), and <|im_end|> ends
a turn. The training is deterministic; the result is cached under the content of its documents, with
checksums, and trained again if damaged. At most `TRAINING_BYTES` of text are read, in equal shares
from the sources, because the trainer keeps every distinct word in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from itertools import chain, islice
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any

import xxhash

from drillyard.config.environment import OPENING
from drillyard.config.fetch_limits import is_withheld, withheld_error
from drillyard.config.model_files import REMOTE_CODE_REFUSED, requires_remote_code
from drillyard.config.problems import refused_address
from drillyard.config.run import RunConfig
from drillyard.config.run_data import TrainTokenizer
from drillyard.data.chat_rendering import CLOCK, require_valid_template
from drillyard.data.raw_batches import json_digest
from drillyard.errors import UserError
from drillyard.guarded_files import (
    LARGEST_MODEL_DOCUMENT_BYTES,
    read_bytes,
    read_json,
    require_usual_files,
)
from drillyard.hub_access import denied_access, require_cached_only
from drillyard.safe_files import describe_os_error, publish_directory, write_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
TURN_TOKENS = ("<|im_start|>", "<|im_end|>")
"""The tokens around a turn of a trained tokenizer's chat template."""
TRAINING_BYTES = 512 << 20
_VERSION = 2
_CHECKSUMS = "checksums.json"


@dataclass(frozen=True)
class TextTokenizer:
    """A fast tokenizer as data. `origin` is the id or directory that it was loaded from.

    chat_template: a text, or several by name (`default`, `tool_use`). template_file: the file that
    it is from, if it is not the tokenizer's own. date: the day that a chat template with a clock
    sees; None for other templates.
    """

    json: str
    vocab_size: int
    start_ids: tuple[int, ...]
    eos_id: int | None
    pad_id: int
    chat_template: str | dict[str, str] | None
    special_tokens: dict[str, str]
    origin: str
    template_file: str | None = None
    date: str | None = None

    @cached_property
    def key(self) -> str:
        """Changes when any token of any document changes."""
        start = start_ids_key(self.start_ids)
        parts = [self.json, start, self.eos_id, self.pad_id, self.chat_template]
        return json_digest(
            [*parts, self.special_tokens, *([] if self.date is None else [self.date])]
        )

    def on(self, date: str) -> TextTokenizer:
        """The tokenizer with the day `date`, as 2026-01-31, if its chat template has a clock; else
        the same."""
        templates = self.chat_template
        texts = templates.values() if isinstance(templates, dict) else [templates or ""]
        if not any(CLOCK in text for text in texts):
            return self
        changed = replace(self, date=date)
        if "pretrained" in self.__dict__:
            changed.__dict__["pretrained"] = self.pretrained
        return changed

    @cached_property
    def pretrained(self) -> PreTrainedTokenizerFast:
        """The same tokenizer as an object of transformers."""
        tokenizer: PreTrainedTokenizerFast = _load_pretrained(self.origin)
        return tokenizer


def today() -> str:
    """The day, here, as 2026-01-31: what transformers shows a template with a clock."""
    return time.strftime("%Y-%m-%d")


def prompt_tokens(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """Token ids of a prompt exactly as in training: the tokenizer's start tokens, then the text.

    Text that looks like a special token is encoded as plain text, as in training.
    """
    backend = tokenizer.backend_tokenizer
    before = backend.encode_special_tokens
    backend.encode_special_tokens = True
    try:
        with refusing_panics(tokenizer.name_or_path):
            ids = backend.encode(prompt, add_special_tokens=False).ids
    finally:
        backend.encode_special_tokens = before
    return [*start_ids(tokenizer), *ids]


def chat_prompt_tokens(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """Token ids of a chat template's text, in which special tokens are tokens, as in training."""
    with refusing_panics(tokenizer.name_or_path):
        ids: list[int] = tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=False).ids
    return ids


def start_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The tokens that the tokenizer adds before a text: BOS, several tokens, or none, as with
    GPT-2's and Qwen's.

    A `bos_token` alone does not decide: GPT-2's tokenizer names one and never adds it.
    """
    # A vocabulary (of nucleotides, say) may have no token for "a": then try the texts of its own
    # tokens.
    texts = chain("a", (tokenizer.decode([token]) for token in range(len(tokenizer))))
    for encoding in (tokenizer(text, return_special_tokens_mask=True) for text in texts):
        if 0 in encoding["special_tokens_mask"]:
            return tuple(encoding["input_ids"][: encoding["special_tokens_mask"].index(0)])
    return ()


def start_ids_key(start: tuple[int, ...]) -> int | list[int] | None:
    """The start tokens as a part of cache keys: a single token is a number, as in old keys."""
    return None if not start else start[0] if len(start) == 1 else list(start)


def is_byte_level(tokenizer_json: str) -> bool:
    """Whether each character of the vocabulary is one byte of text."""
    decoder = json.loads(tokenizer_json).get("decoder") or {}
    return any(step.get("type") == "ByteLevel" for step in [decoder, *decoder.get("decoders", [])])


def open_tokenizer(path: str) -> TextTokenizer:
    """The fast tokenizer of a model id or of a directory. UserError if there is none."""
    if refused := refused_address(path):
        raise UserError(f"data.tokenizer: {refused}")
    with refusing_panics(path):
        return _opened(path)


@contextlib.contextmanager
def refusing_panics(tokenizer: str) -> Iterator[None]:
    """Raise UserError where the tokenizers library panics, on a pattern that takes too long for
    instance.

    The exception is no `Exception`, so nothing else would catch it.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"{tokenizer}: the tokenizers library fails with this tokenizer ({error!s:.200}). Set"
            " data.tokenizer to another one, or fetch this one again."
        ) from None


def _opened(path: str) -> TextTokenizer:
    tokenizer = _load_pretrained(path)
    template = tokenizer.chat_template
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    loaded = TextTokenizer(
        json=backend.to_str(),
        vocab_size=max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0)),
        start_ids=start_ids(tokenizer),
        eos_id=tokenizer.eos_token_id,
        pad_id=int(pad) if pad is not None else 0,
        chat_template=template if isinstance(template, str | dict) and template else None,
        special_tokens={
            key: str(value)
            for key, value in tokenizer.special_tokens_map.items()
            if isinstance(value, str)
        },
        origin=path,
    )
    loaded.__dict__["pretrained"] = tokenizer
    if loaded.vocab_size > _LARGEST_VOCABULARY:
        raise UserError(
            f"{path}: the tokenizer has the token id {loaded.vocab_size - 1}, and a vocabulary has"
            f" at most {_LARGEST_VOCABULARY:,} entries. Set data.tokenizer to another one, or fetch"
            " this one again."
        )
    used = [*loaded.start_ids, loaded.pad_id, *([] if loaded.eos_id is None else [loaded.eos_id])]
    if odd := [token for token in used if not 0 <= token < loaded.vocab_size]:
        raise UserError(
            f"{path}: the tokenizer uses the token id {odd[0]}, which its vocabulary of"
            f" {loaded.vocab_size} entries lacks. Set data.tokenizer to another one, or fetch this"
            " one again."
        )
    return loaded


def open_saved_tokenizer(directory: Path) -> TextTokenizer:
    """The tokenizer saved in a directory. UserError if there is none: its path is no hub id."""
    if not directory.is_dir():
        raise UserError(
            f"{directory}: no such directory: the tokenizer of the run is missing. Copy it from the"
            " run again."
        )
    return open_tokenizer(str(directory))


def configured_tokenizer(config: RunConfig, directory: Path | None) -> TextTokenizer:
    """The tokenizer that a run config names; `directory` (a saved one, such as a checkpoint's)
    overrides it."""
    setting = config.data.tokenizer
    if directory is not None:
        return open_saved_tokenizer(directory)
    assert not isinstance(setting, TrainTokenizer)
    path = setting or config.model.id
    if path is None:
        raise UserError(
            "data.tokenizer is missing: a model given by `config` has none. "
            "Set a path, an id, or {train: bpe, vocab_size: N}."
        )
    tokenizer = open_tokenizer(path)
    named = config.data.chat_template
    return tokenizer if named is None else _with_template_file(tokenizer, named)


def _with_template_file(tokenizer: TextTokenizer, named: str) -> TextTokenizer:
    """The tokenizer with the chat template of a file, which is saved with it. UserError if the
    file cannot be read or compiled."""
    if OPENING in named and is_withheld(named):
        raise withheld_error(f"data.chat_template: {named}")
    if refused := refused_address(named):
        raise UserError(f"data.chat_template: {refused}")
    path = Path(named).expanduser()
    try:
        template = read_bytes(path).decode("utf-8")
    except OSError as error:
        raise UserError(
            f"data.chat_template: {path} cannot be read ({error.strerror}). Name a file with a"
            " chat template in Jinja."
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.chat_template: {path} is not UTF-8 text ({error.reason} at byte {error.start})."
            " Name a file with a chat template in Jinja."
        ) from None
    require_valid_template(template, str(path))
    changed = replace(tokenizer, chat_template=template, template_file=str(path))
    changed.__dict__["pretrained"] = tokenizer.pretrained
    tokenizer.pretrained.chat_template = template
    return changed


def trained_tokenizer(
    setting: TrainTokenizer,
    documents_key: str,
    documents: Iterator[str],
    cache: Path,
    *,
    for_chats: bool = False,
) -> TextTokenizer:
    """The byte-level BPE trained from `documents`, cached if possible. `for_chats`: with a chat
    template."""
    if for_chats:
        documents_key = f"{documents_key}/{xxhash.xxh3_128_hexdigest(chat_template().encode())}"
    key = xxhash.xxh3_128_hexdigest(
        f"{_VERSION}/{setting.train}/{setting.vocab_size}/{TRAINING_BYTES}/{documents_key}".encode()
    )
    directory = cache / "tokenizers" / key
    if not _is_intact(directory):
        temporary = directory.with_name(f"{key}.building-{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        trained = _as_pretrained(_train(setting.vocab_size, documents, for_chats=for_chats))
        if for_chats:
            trained.eos_token, trained.chat_template = TURN_TOKENS[1], chat_template()
        try:
            write_tokenizer(trained, temporary)
            (temporary / _CHECKSUMS).write_text(json.dumps(_checksums(temporary)), encoding="utf-8")
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(
                f"{cache}: the trained tokenizer cannot be written ({describe_os_error(error)}), or"
                " set data.cache_directory to another disk"
            ) from None
        if not _is_intact(directory):
            shutil.rmtree(directory, ignore_errors=True)
        try:
            publish_directory(temporary, directory, last="tokenizer.json")
        except OSError:
            shutil.rmtree(temporary)  # another run trained the same tokenizer first
    return open_tokenizer(str(directory))


def _is_intact(directory: Path) -> bool:
    """Whether a trained tokenizer exists and its files match their checksums."""
    try:
        written = read_json(directory / _CHECKSUMS)
    except (OSError, ValueError, RecursionError):
        return False
    return bool(written == _checksums(directory))


def _checksums(directory: Path) -> dict[str, str]:
    return {
        path.name: xxhash.xxh3_128_hexdigest(read_bytes(path, LARGEST_MODEL_DOCUMENT_BYTES))
        for path in sorted(directory.iterdir())
        if path.name != _CHECKSUMS
    }


def chat_template() -> str:
    """The chat template of trained tokenizers: tools as JSON lines in the system message, calls in
    <tool_call> tags."""
    return files("drillyard.data").joinpath("trained_chat.jinja").read_text(encoding="utf-8")


def _train(vocab_size: int, documents: Iterator[str], *, for_chats: bool = False) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD, *(TURN_TOKENS if for_chats else ())],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    _in_this_thread(
        documents, lambda handed_over: tokenizer.train_from_iterator(handed_over, trainer)
    )
    if for_chats:
        return tokenizer  # a conversation has no tokens but its template's
    # Plain transformers must add the same token before a prompt as training does.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )
    return tokenizer


def _in_this_thread(items: Iterator[str], consume: Callable[[Iterator[list[str]]], None]) -> None:
    """Run `consume` in another thread on lists of `items`, which are drawn in this thread.

    The trainer draws from a thread of its pool, and a source may be bound to the thread that opened
    it (sqlite is).
    """
    handed_over: Queue[list[str] | None] = Queue(maxsize=4)

    def consume_all() -> None:
        drawn = iter(handed_over.get, None)
        try:
            consume(drawn)
        finally:
            deque(drawn, maxlen=0)  # after a failure: let the producer finish

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(consume_all)
        try:
            while some := list(islice(items, 1024)):
                handed_over.put(some)
        finally:
            handed_over.put(None)
        done.result()


def _as_pretrained(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast  # its constructor has no annotations
    return make(  # type: ignore[no-any-return]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


_LARGEST_VOCABULARY = 10_000_000
"""The largest known have 260,000 entries."""


def _load_pretrained(path: str) -> Any:
    require_usual_files(Path(path))
    from transformers import AutoTokenizer

    is_directory = Path(path).is_dir()
    cached_only = not is_directory and require_cached_only(path, "data.tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=is_directory or cached_only
        )
    except Exception as error:  # the library raises many types when there is no tokenizer
        if requires_remote_code(error):
            raise UserError(
                f"the tokenizer of {path} {REMOTE_CODE_REFUSED} in its tokenizer_config.json. Set"
                " data.tokenizer to one that needs none: a class of transformers, with a"
                " tokenizer.json."
            ) from error
        if cached_only:
            raise withheld_error(f"data.tokenizer: {path}") from None
        if denied := denied_access(path, error):
            raise UserError(f"the tokenizer of {denied}") from None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"no tokenizer can be loaded from {path}: {reason} "
            "Set data.tokenizer to a path, an id, or {train: bpe, vocab_size: N}."
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"the tokenizer of {path} has no fast version (tokenizer.json). Set data.tokenizer to"
            " one that has."
        )
    return tokenizer
