"""Builds the native step: one library with kernels for several instruction sets. All else stands in pyproject.toml.

The compiler is $CXX, c++, g++, clang++, or the package `ziglang` where the build sees that. Without any, the package is
installed without the native step, and says so when it runs.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = "drafter/kernels/csrc/"
FLAGS = {
    "step_avx2": "-mavx2 -mfma -mf16c",
    "step_avx_vnni": "-mavx2 -mfma -mf16c -mavxvnni",
    # GCC 12 warns of its own headers.
    "step_avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -Wno-uninitialized "
    "-Wno-maybe-uninitialized",
}
FILES = ["library", "pool", "step_plain", *(FLAGS if platform.machine() in ("x86_64", "AMD64") else ())]
# No -ffast-math and no contraction: a sum has one order, whatever stands beside.
COMMON = "-O3 -std=c++17 -fPIC -ffp-contract=off -fno-math-errno -pthread -Wall -Wextra"


def source_of(name: str) -> str:
    """The file of a part of the library; kernels have one file for all instruction sets."""
    return f"{SOURCES}{'step' if name.startswith('step_') else name}.cpp"


def digest_of_sources() -> str:
    """What drafter/kernels/native.py compares with the sources beside the library, which a `git pull` may change."""
    files = sorted((*Path(SOURCES).glob("*.h"), *Path(SOURCES).glob("*.cpp")))
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=8).hexdigest()


def compiler() -> list[str]:
    """The command of a C++ compiler for any processor of this machine's kind."""
    if given := os.environ.get("CXX"):
        return given.split()
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline"]
    raise CompileError("no C++ compiler: install g++ or the package ziglang for the native step")


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """A running command; CompileError where there is no such program, so that the installation goes on."""
    try:
        return subprocess.Popen(command)
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be run: {error.strerror}") from error


class BuildKernels(build_ext):
    """Each file of kernels has the flags of its instruction set."""

    def build_extension(self, extension: Extension) -> None:
        """Compile the files side by side, then link."""
        scratch, out = Path(self.build_temp), Path(self.get_ext_fullpath(extension.name))
        scratch.mkdir(parents=True, exist_ok=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        command, own = compiler(), os.environ.get("CXXFLAGS", "").split()
        running = {}
        for name in FILES:
            how = [*COMMON.split(), *FLAGS.get(name, "").split(), f"-DSTEP={name.removeprefix('step_')}", *own]
            how += [f'-DSOURCES="{digest_of_sources()}"'] if name == "library" else []
            running[name] = start([*command, *how, "-c", source_of(name), "-o", str(scratch / f"{name}.o")])
        # An older compiler does not know every instruction set: the library goes without.
        made = [name for name, process in running.items() if process.wait() == 0]
        link = [*command, *own, "-shared", "-pthread", *(str(scratch / f"{name}.o") for name in made), "-o", str(out)]
        if not {"library", "pool", "step_plain"} <= set(made) or start(link).wait():
            raise CompileError("the native step does not compile here")


setup(
    ext_modules=[
        Extension(
            "drafter.kernels._native",
            sorted({source_of(name) for name in FILES}),
            depends=sorted(map(str, Path(SOURCES).glob("*.h"))),  # a source distribution has them, too
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
