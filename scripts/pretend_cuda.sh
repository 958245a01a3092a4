#!/usr/bin/env bash
# The tests of tests/accelerator/cuda/ on a machine without a GPU: torch's CUDA build over a device that computes
# nothing, and counts launches, copies, waits and graphs. Run it before a change of a step counts as done.
#   scripts/pretend_cuda.sh ENVIRONMENT [ARGUMENTS OF PYTEST]
# ENVIRONMENT: folder of a virtual environment. One that is not there is made, with torch's CUDA wheel (3 GB).
# TORCH, PYTHON: the version that is installed then, and for which interpreter. COMMAND: run in place of the tests, for trials.
set -euo pipefail
cd "$(dirname "$0")/.."
here=tests/accelerator/cuda
environment="${1:?give the folder of a virtual environment, which may be new}"
shift
if [ ! -x "$environment/bin/python" ]; then
    "${PYTHON:-python3.12}" -m venv "$environment"
    "$environment/bin/pip" install -q "torch==${TORCH:-2.11.0}" "transformers>=5.17" "lightning>=2.6" pytest psutil tqdm jsonargparse fastapi prometheus-client
fi
packages="$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
include="$packages/nvidia/cu13/include"

library="$environment/pretend"
mkdir -p "$library"
# The driver's functions are those of its header, the others those that torch calls; all that pretend.c lacks return 0.
{
    grep -ohE '\bcu[A-Z][A-Za-z0-9_]+ *\(' "$include/cuda.h" | tr -d ' ('
    nm -D --undefined-only "$packages"/torch/lib/*.so 2>/dev/null | grep -oE '\b(cuda[A-Z]|cublas|cu[A-EG-Z])[A-Za-z0-9_]+'
} | sort -u | grep -vxFf <(grep -oE '\bcu(da|blas)?[A-Z][A-Za-z0-9_]+' "$here/pretend.c" | sort -u) |
    sed 's/.*/int &(void) { return 0; }/' > "$library/stubs.c"
gcc -O1 -shared -fPIC -w -Wl,-soname,libcuda.so.1 -I "$include" -I "$packages/triton/backends/nvidia/include" \
    "$here/pretend.c" "$library/stubs.c" -o "$library/libcuda.so.1" -lpthread
ln -sf libcuda.so.1 "$library/libcuda.so"

export PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 DRAFTER_PRETEND_CUDA=1
export LD_LIBRARY_PATH="$library" TRITON_LIBCUDA_PATH="$library" LD_PRELOAD="$library/libcuda.so.1"
if [ -n "${COMMAND:-}" ]; then
    exec bash -c "$COMMAND" pretend "$environment/bin/python" "$@"
fi
exec "$environment/bin/python" -m pytest "$here" -p no:cacheprovider "$@"
