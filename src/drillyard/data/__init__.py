"""Documents to token sequences: sources, prompt formats, the tokenised cache, packing, and the resumable loader.

`prepare(config)` is the entry point: it reads the sources in `run.yaml`, tokenises and packs them once into a cache
that every rank maps, and returns the training mixture and the held-out sequences. Nothing here imports torch.
"""

from drillyard.data.data_report import DataReport
from drillyard.data.held_out_split import evaluation_rows, held_out_names
from drillyard.data.mapped_sequences import Batch, Sequences
from drillyard.data.prepared_data import PreparedData, prepare
from drillyard.data.row_formats import render_prompt
from drillyard.data.sampler import Mixture
from drillyard.data.tokenizer import prompt_tokens

__all__ = [
    "Batch",
    "DataReport",
    "Mixture",
    "PreparedData",
    "Sequences",
    "evaluation_rows",
    "held_out_names",
    "prepare",
    "prompt_tokens",
    "render_prompt",
]
