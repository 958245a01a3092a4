"""The native step's products: numbers against dense references, and bits over rows, tails, threads."""

import ctypes
import multiprocessing
import platform
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from drafter.decoding.sampling import argmax
from drafter.kernels import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step was not built")

# Where the float16 numbers of a block stand.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0]}  # fmt: skip
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    yield
    native.set_num_threads(1)


def stored_rows(name: str, outputs: int, inputs: int, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    """Rows as a file stores them, bytes [outputs, X], and their weights, float32 [outputs, inputs]."""
    generator = np.random.default_rng(seed)
    weight = generator.standard_normal((outputs, inputs)).astype(np.float32) * 0.1
    if name in FLOATS:
        tensor = torch.from_numpy(weight).to(FLOATS[name])
        return tensor.view(torch.uint8).numpy().reshape(outputs, -1), tensor.float()
    kind = Kind[name]
    try:
        rows = gguf.quants.quantize(weight, kind)
    except NotImplementedError:  # any bytes are integers; scales are small halves
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows = generator.integers(0, 256, (outputs, inputs // block, size), dtype=np.uint8)
        for place in SCALES[name]:
            scale = generator.uniform(0.001, 0.01, (outputs, inputs // block, 1)).astype(np.float16).view(np.uint8)
            rows[:, :, place : place + 2] = scale
        rows = rows.reshape(outputs, -1)
    return rows, torch.from_numpy(gguf.quants.dequantize(rows, kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [6144, 6151, 61])
def test_argmax_is_the_lowest_index_among_equals(instructions: str, dtype: torch.dtype, size: int) -> None:
    # Few different values, so that every row holds its largest one many times.
    values = torch.randint(5, (3, 7, size), generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(argmax(values), (values == 4).int().argmax(-1))
    values = torch.full((2, size), -torch.inf)
    values[1, 7] = torch.nan
    assert argmax(values).tolist() == [0, 7]


def packed(name: str, rows: np.ndarray, inputs: int, *, is_rounded: bool = False, bias: torch.Tensor | None = None):
    rows = np.ascontiguousarray(rows)
    number, blocks = native.pack(name, [rows[i].ctypes.data for i in range(len(rows))], inputs)
    address = None if bias is None else bias.data_ptr()
    return native.Matrix(number, len(rows), inputs, is_rounded, blocks.data_ptr(), address).keep(blocks, bias)


def assert_product(found_NO: torch.Tensor, x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor) -> None:
    """Errors are roundings of a sum: a share of the sum of sizes."""
    x_NI, weight_OI = x_NI.double(), weight_OI.double()
    size_NO = x_NI.abs() @ weight_OI.abs().T + bias_O.abs()
    assert ((found_NO - x_NI @ weight_OI.T - bias_O).abs() <= 1e-6 * size_NO).all()


@pytest.mark.parametrize("name", native.FORMATS)
def test_products_are_the_dense_products_and_have_the_same_bits_for_any_rows_and_threads(
    name: str, instructions: str
) -> None:
    outputs, inputs = (83, 512) if name not in FLOATS else (83, 70)  # tails of outputs and inputs
    rows, weight_OI = stored_rows(name, outputs, inputs)
    bias_O, x_NI = torch.randn(outputs), torch.randn(29, inputs)
    matrix = packed(name, rows, inputs, bias=bias_O)
    assert native.unpack_rows(matrix, torch.arange(outputs)).equal(weight_OI)
    assert_product(native.multiply(matrix, x_NI), x_NI, weight_OI, bias_O)
    for is_rounded in (False, True):
        matrix = packed(name, rows, inputs, is_rounded=is_rounded, bias=bias_O)
        native.set_num_threads(1)
        one_by_one = torch.cat([native.multiply(matrix, x_NI[n : n + 1]) for n in range(29)])
        for num_rows in (2, 3, 5, 7, 8, 11, 29):
            native.set_num_threads(1 + num_rows % 3)
            assert native.multiply(matrix, x_NI[:num_rows]).equal(one_by_one[:num_rows])


@pytest.mark.parametrize("name", [name for name in native.FORMATS if name not in FLOATS])
def test_rounded_activations_give_the_product_of_the_integers(name: str, instructions: str) -> None:
    rows, weight_OI = stored_rows(name, 48, 256)
    x_NI = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))  # no number stands a rounding from a half
    x_NGI = x_NI.view(5, 8, 32)
    most_NG1 = x_NGI.abs().amax(2, keepdim=True)
    # The step's own operations: another order of them rounds a number near a half to the other integer.
    rounded_NI = ((x_NGI * (127 / most_NG1)).round() * (most_NG1 / 127)).view(5, 256)
    found = native.multiply(packed(name, rows, 256, is_rounded=True), x_NI)
    assert_product(found, rounded_NI, weight_OI, torch.zeros(48))


@pytest.mark.parametrize("name", native.FORMATS)
def test_blocks_are_hardly_larger_than_the_file(name: str) -> None:
    rows, _ = stored_rows(name, 32, 512)
    assert native.library().matrix_bytes(native.FORMATS.index(name), 32, 512) <= 1.03 * rows.nbytes  # type: ignore[union-attr]


def test_float_weights_of_one_value_have_the_same_bits_in_every_format(instructions: str) -> None:
    weight_OI, x_NI = torch.randn(40, 64).bfloat16(), torch.randn(3, 64)
    rows = weight_OI.float().half().bfloat16().float()  # numbers of all three formats
    products = []
    for name, dtype in FLOATS.items():
        stored = rows.to(dtype).view(torch.uint8).numpy().reshape(40, -1)
        products.append(native.multiply(packed(name, stored, 64), x_NI))
    assert products[0].equal(products[1]) and products[0].equal(products[2])


def test_loading_the_library_runs_no_code_of_an_instruction_set() -> None:
    names = Path(str(native.library()._name)).read_bytes()  # type: ignore[union-attr]
    assert b"_ZN5plain" in names, "the library has its names"
    assert b"_GLOBAL__sub_I_step_" not in names, "a constructor that the processor may not know"


@pytest.mark.skipif(not shutil.which("objdump") or platform.machine() != "x86_64", reason="reads code of x86")
def test_code_of_an_instruction_set_stands_in_its_namespace() -> None:
    """A linker keeps one copy of a template that several files have, perhaps one that the processor may not know."""
    command = ["objdump", "-dC", "--no-show-raw-insn", str(native.library()._name)]  # type: ignore[union-attr]
    others, name = set(), ""
    for line in subprocess.check_output(command, text=True).splitlines():
        if found := re.match(r"[0-9a-f]+ <(.*)>:", line):
            name = found[1]
        elif re.match(r"\s+[0-9a-f]+:\s+v", line) and not re.search(r"\bavx(2|512|_vnni)::", name):
            others.add(name)
    assert not others


def test_structures_are_those_of_the_library() -> None:
    """Sizes by C's rules: a field that one side lacks moves all behind."""
    assert ctypes.sizeof(native.Matrix) == 32 and ctypes.sizeof(native.Norm) == 32
    assert ctypes.sizeof(native.Layer) == 7 * 32 + 6 * 32 + 8


def test_a_rounded_matrix_takes_any_number_of_inputs(instructions: str) -> None:
    weight_OI, bias_O, x_XI = torch.randn(21, 45), torch.randn(21), torch.randn(2, 3, 45)
    matrix = native.round_matrix(weight_OI, bias_O)
    rounded_OI = native.unpack_rows(matrix, torch.arange(21))
    loss_OI, most = (rounded_OI - weight_OI).abs(), weight_OI.abs().max()
    assert loss_OI.max() < 1.01 * most / 8 and loss_OI.median() < most / 24  # a whole step where 8 is cut off
    torch.testing.assert_close(native.multiply(matrix, x_XI), x_XI @ rounded_OI.T + bias_O, rtol=0.05, atol=0.3)
    big = native.multiply(native.round_matrix(torch.full((16, 45), torch.inf)), x_XI)
    assert bool((big == 0).all()), "what is no number counts as 0"


def test_an_index_of_another_layout_lives_as_long_as_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads allocate while the call runs."""
    rows, weight_OI = stored_rows("F32", 64, 32)
    matrix, index_X = packed("F32", rows, 32), torch.arange(1, 64).repeat_interleave(2)[::2]
    unpack = native._library().unpack_rows

    def late(*given: object) -> None:
        others = [torch.zeros(63, dtype=torch.int64) for _ in range(200)]
        unpack(*given)
        assert len(others) == 200

    monkeypatch.setattr(native, "_library", lambda: SimpleNamespace(unpack_rows=late))
    assert native.unpack_rows(matrix, index_X).equal(weight_OI[index_X])


def test_rows_that_are_not_there_and_numbers_that_are_none_are_refused(instructions: str) -> None:
    rows, weight_OI = stored_rows("Q8_0", 40, 64)
    matrix = packed("Q8_0", rows, 64, is_rounded=True)
    for index in (-1, 40, 1 << 40):
        with pytest.raises(ValueError, match="a token id is none of the model's 40"):
            native.unpack_rows(matrix, torch.tensor([0, index]))
    for value in (float("nan"), float("inf"), float("-inf")):
        for place in (0, 33, 63):
            x_NI = torch.randn(3, 64)
            x_NI[1, place] = value
            with pytest.raises(ValueError, match="numbers that are not finite"):
                native.multiply(matrix, x_NI)
    assert native.multiply(matrix, torch.ones(3, 64)).isfinite().all()


def test_a_forked_child_has_threads_of_its_own_and_memory_that_runs_out_is_an_error() -> None:
    """The parent is within a call when the child begins."""
    native.set_num_threads(3)
    matrix, x_NI = packed("F32", stored_rows("F32", 16, 4096)[0], 4096), torch.randn(20000, 4096)
    wanted, is_over = native.multiply(matrix, x_NI[:5]), threading.Event()

    def call() -> None:
        while not is_over.is_set():
            native.multiply(matrix, x_NI[:2000])

    def work() -> None:
        assert native.multiply(matrix, x_NI[:5]).equal(wanted)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        with pytest.raises(MemoryError):
            native.multiply(matrix, x_NI)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert native.multiply(matrix, x_NI)[:5].equal(wanted)
        native.give_back()
        assert native.multiply(matrix, x_NI[:5]).equal(wanted)

    caller = threading.Thread(target=call)
    caller.start()
    children = [multiprocessing.get_context("fork").Process(target=work) for _ in range(2)]
    for child in children:
        child.start()
        child.join(120)
    is_over.set()
    caller.join()
    assert [child.exitcode for child in children] == [0, 0]
