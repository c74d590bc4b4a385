"""What pictures draw: the counts that the tree has, at every length."""

import numpy as np
import pytest

import splitk_jax as sk
from splitk_jax.pictures import series

SHAPE = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        ("h200", {}),
        ("h200", {"splits": "fixed_size", "split_size": 192}),
        ("h200", {"splits": "adaptive"}),
        ("gb10", {"splits": "legacy"}),
        ("cpu", {"splits": 11, "min_kv_per_split": 48}),
    ],
)
def test_between_its_points_too(target, settings):
    policy = sk.load_policy(target, environ={}, **{"backend": "reference"} | settings)
    plan = policy.plan(**SHAPE, max_decode_seqs=65, max_seq_len=8192)
    found = series(plan, 3001)
    assert [*found] == [1, 4, 16, 64, 65]
    lengths = np.arange(1, 3002)
    for batch, each in found.items():
        own = policy.plan(**SHAPE, max_decode_seqs=65, num_seqs=batch, max_seq_len=8192)
        # Drawn as steps: from each point up to the next.
        drawn = each.splits[np.searchsorted(each.tokens, lengths, side="right") - 1]
        for n in (*range(1, 3002, 7), 3001):
            assert drawn[n - 1] == sum(high > low for low, high in own.split_bounds(n)), (batch, n)
        np.testing.assert_array_equal(each.ctas, batch * plan.ctas * each.splits)
