#!/usr/bin/env bash
# Everything worth measuring on a GPU machine, in one go and under 8 minutes, into one JSON file.
#
#     benchmarks/gpu.sh BUNDLE OUT.json
#
# BUNDLE: an fp16 or fp32 bundle of the fused layout (it holds the split graphs too). Needs xpress-export with the
# `gpu` extra; engines of the bundle are measured too where TensorRT is installed and `compile --max-batch 8` has run.
# With torch for CUDA installed, transformers' own speed and tokens are measured beside ours.
set -euo pipefail
[ $# -eq 2 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
command -v nvidia-smi >/dev/null || { echo "error: no NVIDIA driver here (nvidia-smi is not found)" >&2; exit 1; }
exec timeout --signal=INT 460 "${PYTHON:-python}" "$here/gpu.py" "$1" "$2"
