"""Predicting: a model's KV memory by vLLM's own planning, and its step cost by a roofline."""
