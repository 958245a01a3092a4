"""The package on an accelerator that refuses."""

import pytest
from torch.utils import backend_registration

from tests.accelerator.conftest import CASES


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch registers no devices from Python",
)
def test_cases() -> None:
    (process,) = CASES
    text, _ = process.communicate()
    assert process.returncode == 0, text
