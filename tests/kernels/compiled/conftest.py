import os
import sys
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    raise pytest.UsageError("tests/kernels/compiled compiles kernels: unset TRITON_INTERPRET and run it on its own")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory):
    """Kernels are compiled anew, and none is left in the cache of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield
