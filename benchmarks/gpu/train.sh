#!/usr/bin/env bash
# Train an EAGLE-3 head on one GPU, without network, on texts and a target that came in pieces. See docs/gpu.md.
#
#   benchmarks/gpu/train.sh [--dry-run] [--minutes M] [--output FOLDER] [-- OPTIONS of eyas train eagle3]
#
# Exit status 3: pieces are still missing; those that are here are kept for the next call.
#
#   PYTHON               interpreter that has torch and transformers (.venv/bin/python if there is one, or python3)
#   EYAS_COMMIT          what the report calls this checkout, where it is a copy without its repository
#   EYAS_TRAINING_PIECES where pieces arrive (benchmarks/gpu/training, see pack_training.py)
#   EYAS_GPU_TRAINING    where they are kept and the run has its files (build/gpu-training)
#   EYAS_GPU_WHEELS, EYAS_GPU_SITE   see check.sh
set -euo pipefail

HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
source "$HERE/prepare.sh"

"$PYTHON" "$HERE/train.py" "$@"
