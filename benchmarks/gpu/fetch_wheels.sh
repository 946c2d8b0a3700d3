#!/usr/bin/env bash
# Fetch what a GPU machine without network may lack, for check.sh to install there.
#
#   benchmarks/gpu/fetch_wheels.sh          on a machine with network; needs pip
#   PIECE_MIB=24 benchmarks/gpu/fetch_wheels.sh
#   benchmarks/gpu/fetch_wheels.sh msgspec  only these; msgspec is all that train.sh needs
#
# Wheels land in benchmarks/gpu/wheels (not under version control), cut into pieces of at most PIECE_MIB MiB: <wheel>.part00,
# .part01, ... with SHA256SUMS of the whole wheels. For Python 3.12 on x86-64 Linux; torch, triton, transformers, numpy,
# pytest and matplotlib are expected to be there. Ray is not needed.
set -euo pipefail
cd "$(dirname "$0")"

PYTHON=${PYTHON:-python3}
PIECE_MIB=${PIECE_MIB:-60}
PACKAGES=(
    flashinfer-python==0.7.2
    apache-tvm-ffi==0.1.15.post2 # flashinfer's bindings
    nvidia-ml-py==13.615.71      # flashinfer asks it for the device
    requests==2.34.2             # flashinfer imports it
    msgspec==0.23.0
    pyzmq==27.3.0
)
if [ $# -gt 0 ]; then
    for index in "${!PACKAGES[@]}"; do
        [[ " $* " == *" ${PACKAGES[index]%%==*} "* ]] || unset "PACKAGES[index]"
    done
fi
PLATFORMS=(manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64)

rm -rf wheels
mkdir wheels
"$PYTHON" -m pip download --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp "${PLATFORMS[@]/#/--platform=}" --dest wheels "${PACKAGES[@]}"
cd wheels
sha256sum ./*.whl >SHA256SUMS
for wheel in *.whl; do
    split --bytes="${PIECE_MIB}M" --numeric-suffixes "$wheel" "$wheel.part"
    rm "$wheel"
done
ls -l
