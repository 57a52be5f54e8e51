"""Windowed-MTP speculative decoding (arXiv 2607.21535) as a plugin for stock vLLM."""

__version__ = "0.1.0"
