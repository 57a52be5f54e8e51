"""Windowed-MTP speculative decoding (arXiv 2607.21535) as a plugin for stock vLLM."""

from pathlib import Path

__version__ = "0.1.0"

_here = Path(__file__).parent
if not (_here / "kv_manager").is_dir():
    # Imported from a checkout, where two of the subpackages stand beside this folder.
    __path__.append(str(_here.parent))
