"""Documents to token sequences: sources, prompt formats, the tokenised cache, packing, and the
resumable sampler.

`prepared_data.prepare` reads the sources in `run.yaml`, tokenises and packs them once into a cache
that every rank maps, and returns the training mixture and the held-out sequences. Nothing here
imports torch.
"""

DATA_RECORD = "data.json"
"""The record of a run's data in its directory (`data_changes.py`)."""
