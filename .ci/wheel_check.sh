#!/usr/bin/env bash
# wheel_check.sh WHEEL: install WHEEL alone in an environment of its own and import everything it should contain.
#
# The dependencies come from .venv through a path file. Python does not read the .pth files of a folder added that way,
# so the editable install in .venv stays inactive and cannot stand in for the wheel.
set -euo pipefail

wheel=$(realpath "$1")
root=$(cd "$(dirname "$0")/.." && pwd)
environment=$root/build/wheel-check
site_packages='import sysconfig; print(sysconfig.get_path("purelib"))'

rm -rf "$environment"
"$root/.venv/bin/python" -m venv --without-pip "$environment"
"$root/.venv/bin/python" -m pip --python "$environment/bin/python" install --no-deps --no-index "$wheel"
"$root/.venv/bin/python" -c "$site_packages" >"$("$environment/bin/python" -c "$site_packages")/dependencies.pth"

cd "$environment"
bin/python -I "$root/.ci/wheel_check.py" "$root"
