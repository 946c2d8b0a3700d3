# Sourced by the scripts of this folder: finds an interpreter ($PYTHON), installs wheels that were brought along, and
# makes Eyas importable where it is not installed. Expects HERE and ROOT.
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x "$ROOT/.venv/bin/python" ]; then PYTHON=$ROOT/.venv/bin/python; fi
fi
WHEELS=${EYAS_GPU_WHEELS:-$HERE/wheels}
SITE=${EYAS_GPU_SITE:-$ROOT/build/gpu-site}

# A folder on the path, not a virtual environment: made from within one, that would not see the packages of the first.
if compgen -G "$WHEELS/*.part*" >/dev/null; then
    if ! cmp -s "$WHEELS/SHA256SUMS" "$SITE/SHA256SUMS"; then
        echo "installing the wheels of $WHEELS"
        rm -rf "$SITE"
        mkdir -p "$SITE"
        joined=$(mktemp -d)
        trap 'rm -rf "$joined"' EXIT
        for first in "$WHEELS"/*.part00; do
            cat "${first%.part00}".part* >"$joined/$(basename "${first%.part00}")"
        done
        (cd "$joined" && sha256sum --check --quiet "$WHEELS/SHA256SUMS")
        "$PYTHON" -m pip install --disable-pip-version-check --quiet --no-index --no-deps --no-compile --target "$SITE" \
            "$joined"/*.whl
        cp "$WHEELS/SHA256SUMS" "$SITE"
    fi
fi
if [ -d "$SITE" ]; then export PYTHONPATH="$SITE${PYTHONPATH:+:$PYTHONPATH}"; fi

# Where Eyas is not installed, its folders are reached through links.
if ! "$PYTHON" -c 'import eyas.kernels.tree' 2>/dev/null; then
    "$PYTHON" "$ROOT/.ci/link_types.py"
    export PYTHONPATH="$ROOT/build/types${PYTHONPATH:+:$PYTHONPATH}"
fi
