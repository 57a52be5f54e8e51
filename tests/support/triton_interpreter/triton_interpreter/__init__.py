"""Triton on a machine without a GPU, so that vLLM's Model Runner V2 runs in Triton's interpreter.

Put the folder above this package on PYTHONPATH and set TRITON_INTERPRET=1; nothing is installed. Its
two entry points are a stand-in Triton backend named "cpu", which vLLM looks for before it uses
Triton at all, and `fixes`, which vLLM calls in every process.
"""
