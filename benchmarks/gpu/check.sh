#!/usr/bin/env bash
# Check Eyas on one GPU, without network, in under eight minutes: tests on the device, then timings. See docs/gpu.md.
#
#   benchmarks/gpu/check.sh [--dry-run] [--only STEP ...] [--output FOLDER]
#
#   PYTHON             interpreter that has torch, triton and transformers (.venv/bin/python if there is one, or python3)
#   EYAS_COMMIT        what the report calls this checkout, where it is a copy without its repository
#   EYAS_GPU_WHEELS    pieces of wheels to install first (benchmarks/gpu/wheels, see fetch_wheels.sh)
#   EYAS_GPU_SITE      where they are installed (build/gpu-site)
set -euo pipefail

HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
source "$HERE/prepare.sh"

"$PYTHON" "$HERE/check.py" "$@"
