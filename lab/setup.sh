#!/bin/sh
# Makes .venv with what requirements.txt lists: sh lab/setup.sh [cpu|cuda]
# cpu and cuda are builds of torch for Linux; by default, what the machine can use.
set -eu

fail() {
    echo "make: $1" >&2
    exit 1
}

pip_install() {
    .venv/bin/python -m pip install --disable-pip-version-check "$@"
}

asked=${1:-}
case $asked in
    "" | cpu | cuda) ;;
    *) fail "TORCH=$asked is no build of torch; TORCH=cpu is, and TORCH=cuda" ;;
esac

if grep -qs '^uv =' .venv/pyvenv.cfg; then
    [ -z "$asked" ] || fail ".venv is uv's: instead of TORCH, set UV_NO_SOURCES=1 (cuda) or unset it (cpu)"
    uv sync --inexact
    touch .venv/ready
    exit
fi

for python in python3 python3.13 python3.12 python3.11 none; do
    if $python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi
done
[ "$python" != none ] || fail "there is no Python 3.11 or newer here"

installed=$(cat .venv/ready 2>/dev/null || true)
build=${asked:-$installed}
if [ -z "$build" ]; then
    build=cpu
    if nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; then build=cuda; fi
fi

# PyTorch's own index has the torch without CUDA. Only torch comes from there. If it cannot be
# reached, pip tries twice and then looks where it always does.
from_index=
case "$(uname -s) $build" in
    "Linux cpu")
        from_index="--retries 2 --timeout 15 --index-url https://download.pytorch.org/whl/cpu"
        size="without CUDA: about 240 MB (TORCH=cuda: 2.8 GB)" ;;
    "Linux cuda") size="with CUDA: about 2.8 GB (TORCH=cpu: 240 MB)" ;;
    *) size="about 160 MB" ;;
esac

if [ "$build" = "$installed" ]; then
    echo "bringing .venv up to date with requirements.txt"
else
    echo "setting up .venv with $($python --version), once; pip fetches torch, $size"
    if [ -n "$installed" ]; then rm -r .venv; fi
    $python -m venv .venv
fi
# shellcheck disable=SC2086  # $from_index is several words, or none
pip_install --no-deps $from_index "$(grep '^torch' requirements.txt)" ||
    fail "pip got no torch ($build); TORCH=cpu and TORCH=cuda lie in two indexes"
pip_install -r requirements.txt
echo "$build" > .venv/ready
