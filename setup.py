"""Builds the native step: one library with kernels for several instruction sets. All else stands in pyproject.toml."""

import platform

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = "drafter/kernels/csrc/"
FLAGS = {
    "step_avx2": "-mavx2 -mfma -mf16c",
    "step_avx_vnni": "-mavx2 -mfma -mf16c -mavxvnni",
    "step_avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni",
}
FILES = ["library", "pool", "step_plain", *(FLAGS if platform.machine() in ("x86_64", "AMD64") else ())]


class BuildKernels(build_ext):
    """Each file of kernels has the flags of its instruction set."""

    def build_extension(self, extension: Extension) -> None:
        """Compile each file by itself, then link."""
        compiler, scratch = self.compiler, self.build_temp
        objects: list[str] = []
        # No -ffast-math and no contraction: a sum has one order, whatever stands beside.
        flags = ["-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-w", "-g0"]
        for source in extension.sources:
            own = next((FLAGS[name] for name in FLAGS if source.endswith(f"{name}.cpp")), "")
            objects += compiler.compile([source], output_dir=scratch, extra_postargs=[*flags, *own.split()])
        compiler.link_shared_object(
            objects, self.get_ext_fullpath(extension.name), extra_postargs=["-pthread"], target_lang="c++"
        )


setup(
    ext_modules=[Extension("drafter.kernels._native", [f"{SOURCES}{name}.cpp" for name in FILES], optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
