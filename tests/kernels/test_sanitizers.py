"""The native step under the sanitizers of addresses and undefined behaviour."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("drafter", "tests", "scripts", "setup.py", "pyproject.toml", "README.md", "LICENSE")
CHECKS = "address,bounds,alignment,integer-divide-by-zero,signed-integer-overflow"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("g++"), reason="needs g++ and its sanitizers")]


def test_threads_that_change_the_number_of_threads_race_with_no_call(tmp_path: Path) -> None:
    source = ROOT / "drafter" / "kernels" / "csrc"
    files = [Path(__file__).with_name("race.cpp"), *(source / f"{name}.cpp" for name in ("step", "library", "pool"))]
    flags = ["-std=c++17", "-DSTEP=plain", "-DSOURCES=0", "-g", "-O1", "-fsanitize=thread", "-w", f"-I{source}"]
    subprocess.run(["g++", *flags, *map(str, files), "-o", str(tmp_path / "race")], check=True)
    done = subprocess.run([tmp_path / "race"], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_tests_of_the_native_step_are_clean_under_sanitizers(tmp_path: Path) -> None:
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    for built in tmp_path.glob("drafter/kernels/_native*"):
        built.unlink()
    flags = f"-O1 -fsanitize={CHECKS} -fno-sanitize-recover=all"
    environment = {**os.environ, "CXX": "g++", "CXXFLAGS": flags, "PYTHONPATH": str(tmp_path)}
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=tmp_path, env=environment, check=True)
    asked = (["g++", f"-print-file-name=lib{name}.so"] for name in ("asan", "ubsan"))
    environment["LD_PRELOAD"] = " ".join(subprocess.check_output(words, text=True).strip() for words in asked)
    environment["ASAN_OPTIONS"] = "detect_leaks=0:allocator_may_return_null=1"
    tests = ["tests/kernels/test_native.py", "tests/runtimes/native"]
    tests += ["tests/proposers/test_beam_reference.py", "tests/decoding"]
    run = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(run, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
