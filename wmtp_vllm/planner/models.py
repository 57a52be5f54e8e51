"""Whose plan: a preset, a local model, its config.json, or a model of the hub."""

import json
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from wmtp_vllm.config import METHOD

BITS = {"fp8": 8, "fbgemm_fp8": 8, "modelopt": 8, "modelopt_fp4": 4.5, "mxfp4": 4.25}
"""Bits a weight of quantization methods that have one width, scales included."""


@dataclass(frozen=True)
class Model:
    """A model to plan for.

    Args:
        name: as the user gave it.
        config: its config.json.
        source: where a preset's figures are from.
        method: of the draft, windowed.
        draft: config.json of the draft, where that is not the model's own head.

    """

    name: str
    config: dict[str, Any]
    source: str = ""
    method: str = METHOD
    draft: dict[str, Any] | None = None

    def with_draft(self, method: str | None, draft: str | None) -> "Model":
        """The model with another draft, where one is named.

        Raises:
            ValueError: there is no such draft, or it goes with no such method.

        """
        if method is None and draft is None:
            return self
        if (method or METHOD) != METHOD and draft is None:
            raise ValueError(f"{method} drafts with a model of its own. Give --draft-model.")
        if draft is not None and (method or METHOD) == METHOD:
            raise ValueError(
                "--draft-model is for a draft of its own. Give its --method, such as windowed_eagle3."
            )
        config = None if draft is None else find(draft).config
        return replace(self, method=method or METHOD, draft=config)

    @property
    def weight_bits(self) -> float:
        """Bits a weight, as far as the config says.

        Raises:
            ValueError: its quantization is not known.

        """
        quantization = quantization_of(self.config)
        if not quantization:
            return 16
        method = str(quantization.get("quant_method", "")).lower()
        if "nvfp4" in json.dumps(quantization).lower():
            return 4.5
        width = quantization.get("bits") or quantization.get("w_bit") or BITS.get(method)
        if not width:
            raise ValueError(
                f"the config's quantization_config has quant_method {method!r}, whose bits a weight "
                "are not known here. Give --weight-bits."
            )
        return float(width)


def presets() -> list[str]:
    """Names of the presets."""
    folder = files(__package__).joinpath("presets")
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name != "__pycache__")


def find(name: str) -> Model:
    """The model that `name` means.

    Raises:
        ValueError: there is none.

    """
    if name in presets():
        text = files(__package__).joinpath("presets", f"{name}.json").read_text()
        preset = json.loads(text)
        return Model(name, **preset)
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if name.count("/") != 1:
            raise ValueError(f"{name!r} is {_nothing_local()} nor a name on the hub")
        file = _from_hub(name)
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    return Model(name, config)


def quantization_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """The `quantization_config` of a config.json, which may be that of its text model."""
    text_config = config.get("text_config") or {}
    return config.get("quantization_config") or text_config.get("quantization_config")


def _nothing_local() -> str:
    return f"no folder with a config.json, no file, and none of the presets {', '.join(presets())};"


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:
        raise ValueError(f"{name!r} is {_nothing_local()} and not on the hub: {error}") from error
