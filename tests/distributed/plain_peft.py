"""The training of adapters in plain peft, transformers and torch: a program that knows nothing of
Drillyard.

    python plain_peft.py SETTINGS.json

Reads the base, the documents of each step, and the values with which the adapters begin; writes the
loss of each step and the adapter. Each document goes alone through the model; a step is the mean
over the tokens with a label.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(99)
    torch.set_num_threads(1)
    base = AutoModelForCausalLM.from_pretrained(
        settings["base"], dtype=torch.float32, attn_implementation="sdpa"
    )
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings["lora"]))
    result = peft.set_peft_model_state_dict(model, load_file(settings["start"]))
    assert not result.unexpected_keys and not [
        name for name in result.missing_keys if "lora_" in name
    ], result
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings["peak"], betas=(0.9, 0.95), eps=1e-8)
    steps, warmup = json.loads(Path(settings["steps"]).read_text()), settings["warmup"]
    losses = []
    for step, documents in enumerate(steps):
        share = (step - warmup) / (len(steps) - warmup)
        rate = (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = settings["peak"] * rate
        total = torch.zeros(())
        for tokens, labels in documents:
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
            total = total + F.cross_entropy(
                logits, torch.tensor(labels), ignore_index=-100, reduction="sum"
            )
        loss = total / sum(label != -100 for _, labels in documents for label in labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, settings["clipping"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(settings["output"])
    assert "drillyard" not in sys.modules
    Path(settings["output"], "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
