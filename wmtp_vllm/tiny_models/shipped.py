"""The trained model: the one whose weights come with the package, in `trained/`.

`training.py` made it; `trained/provenance.json` says from what.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from wmtp_vllm.tiny_models.checkpoint import Checkpoint

FOLDER = Path(__file__).parent / "trained"


@dataclass(frozen=True)
class TrainedOptions:
    """The trained model has no options."""


def trained(options: TrainedOptions) -> Checkpoint:
    """The trained model, bfloat16 in the file and float32 in its config."""
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    return Checkpoint(config, load_file(FOLDER / "model.safetensors"))
