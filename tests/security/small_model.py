"""Write a GPT-2 of one layer and its tokenizer to DIRECTORY/model: `python small_model.py
DIRECTORY`, so that the test's own process does not import torch."""

import json
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from drillyard.config.run_data import TrainTokenizer
from drillyard.data.tokenizer import trained_tokenizer

place = Path(sys.argv[1])
texts = [json.loads(line)["text"] for line in (place / "rows.jsonl").read_text().splitlines()]
setting = TrainTokenizer(train="bpe", vocab_size=300)
made = trained_tokenizer(setting, "key", iter(texts), place / "cache")
torch.manual_seed(0)
config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=300)
GPT2LMHeadModel(config).save_pretrained(place / "model")
made.pretrained.save_pretrained(place / "model")
(place / "model" / "chat_template.jinja").write_text(
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
