"""For every test: implicit promotion is an error, and the caller's environment is not read."""

import os

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="session")
def _no_settings_from_outside():
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("SPLITK_JAX_") or name == "ATLAS_ATTN_DECODE_SPLITK":
                patch.delenv(name)
        yield
