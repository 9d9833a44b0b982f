#!/bin/sh
# Prepare .venv from uv.lock. Needs python3 >= 3.11 and, if uv is not installed, python3-venv or pip.
# Everything it downloads is cached outside the repository by uv; the bootstrap copy of uv lives in
# ${XDG_CACHE_HOME:-$HOME/.cache}/hami/uv.
set -eu
cd "$(dirname "$0")/.."

cache="${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/hami"
uv_version=">=0.5,<1"

fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

python="${PYTHON:-python3}"
command -v "$python" >/dev/null 2>&1 || fail "python3 is missing: install Python 3.11 or newer"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is $("$python" -V 2>&1): Python 3.11 or newer is needed (set PYTHON=/path/to/python3.11)"

bootstrap_uv() {
    rm -rf "$cache/uv"
    mkdir -p "$cache"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv "$cache/uv" && "$cache/uv/bin/pip" install --quiet "uv$uv_version"
    elif "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m pip install --quiet --target "$cache/uv" "uv$uv_version"
    elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "setup: installing python3-venv (apt-get)"
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv ca-certificates; } >/dev/null
        "$python" -m venv "$cache/uv" && "$cache/uv/bin/pip" install --quiet "uv$uv_version"
    else
        fail "needs one of uv, pip or python3-venv; on Debian: apt-get install python3-venv (once, as root)"
    fi
}

if command -v uv >/dev/null 2>&1; then
    uv=uv
else
    uv="$cache/uv/bin/uv"
    [ -x "$uv" ] || { echo "setup: fetching uv"; bootstrap_uv; }
    [ -x "$uv" ] || fail "uv could not be installed into $cache/uv"
fi

UV_PYTHON_DOWNLOADS=never
export UV_PYTHON_DOWNLOADS
[ -x .venv/bin/python ] || echo "setup: creating .venv (about a minute on first use)"
"$uv" sync --frozen --quiet --python "$python"
touch .venv/.synced
