# Sourced by the other scripts: makes .venv with the package in it and puts it first on the PATH.
#   use_venv        the package alone
#   use_venv dev    with the tools that the tests need
# A second call costs nothing: a stamp in .venv remembers what pyproject.toml and constraints.txt said.
#   use_end newest|oldest   .venv-newest or .venv-oldest instead, with the newest or the oldest versions that
#                           pyproject.toml admits on the day of the call, and the tools that the tests need

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "drafter needs Python 3.11 or newer with its venv module; set PYTHON=/path/to/python" >&2
    return 1
}

use_venv() {
    local extra="${1:-}" python stamp
    if ! .venv/bin/python -c '' 2>/dev/null; then
        python="$(find_python)"
        "$python" -m venv --clear .venv
    fi
    export PATH="$PWD/.venv/bin:$PATH"
    stamp=".venv/installed-$(cat pyproject.toml constraints.txt setup.py drafter/kernels/csrc/* | cksum | tr ' ' '-')"
    if [ ! -e "$stamp${extra:+-$extra}" ] && { [ -n "$extra" ] || [ ! -e "$stamp-dev" ]; }; then
        if [ -z "${CXX:-}" ] && ! command -v c++ >/dev/null && ! command -v clang++ >/dev/null; then
            # A fresh machine often has no C++ compiler: this package is one. It takes 0.4 GB of .venv.
            if python -m pip install --disable-pip-version-check --quiet ziglang; then
                export CXX="$PWD/.venv/bin/python -m ziglang c++ -mcpu=baseline"
            fi
        fi
        python -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt --editable ".${extra:+[$extra]}"
        # On all cores, where pip compiles on one; packages hold files for other versions of Python.
        python -m compileall -qq -j 0 .venv/lib >/dev/null 2>&1 || true
        touch "$stamp${extra:+-$extra}"
    fi
}

use_end() {
    local venv="$PWD/.venv-$1" resolution=highest
    if [ "$1" = oldest ]; then
        resolution=lowest-direct
    fi
    if ! "$venv/bin/python" -m uv --version >/dev/null 2>&1; then
        "$(find_python)" -m venv --clear "$venv"
        "$venv/bin/python" -m pip install --disable-pip-version-check --quiet uv
    fi
    "$venv/bin/python" -m uv pip install --python "$venv/bin/python" --resolution "$resolution" --upgrade --editable ".[dev]"
    export PATH="$venv/bin:$PATH"
}
