"""Whatever the lengths, layouts and contents are: the op is dense attention, and a bad row is NaN and no other."""

import hypothesis
import numpy as np
import pytest
from battery import Config
from hypothesis import strategies as st
from support import assert_close, junk_entries

BATCH = 4

# Few shapes, each compiled once; everything else is drawn. (config, q_len)
SHAPES = [
    (Config(heads=(4, 2), dtype="float32"), None),
    (Config(heads=(7, 1), page_size=1, longest=60, splits=7), None),
    (Config(heads=(6, 3), page_size=24, splits="fixed_size", split_size=32, dtype="float32"), 3),
    (Config(heads=(3, 3), page_size=5, window=37, sinks=True, dtype="float32"), None),
    (Config(heads=(10, 2), head_dim=96, dtype="float16", softcap=15.0), None),
    (Config(heads=(5, 1), head_dim=128, head_dim_v=72, splits=16, window=100), 2),
    (Config(heads=(2, 1), page_size=64, splits="fixed_size", sinks=True, softcap=4.0, dtype="float32"), None),
    (Config(heads=(12, 4), page_size=3, splits=1, q_dtype="float32"), 5),
]


FAULTS = st.sampled_from([None] * 4) | st.sampled_from(
    ["-1", "least", "most", "one too many", "first page", "last page"]
)


def faulty(paged, row, fault, filler):
    """A call one row of which cannot be served."""
    lens, tables = paged.seq_lens.copy(), paged.block_tables.copy()
    page_size, num_pages = paged.k_pages.shape[1], len(paged.k_pages)
    if fault in ("first page", "last page"):
        last = max(int(lens[row]) - 1, 0) // page_size
        # A filler in the pool is another row's page, or nobody's: no fault of a page id.
        tables[row, 0 if fault == "first page" else last] = num_pages if filler == 0 else filler
    else:
        # Past the table for every query of the row, 5 at most.
        lens[row] = {"-1": -1, "least": -(2**31), "most": 2**31 - 1}.get(fault, tables.shape[1] * page_size + 5)
    return paged.replace(seq_lens=lens, block_tables=tables)


@hypothesis.settings(derandomize=True, database=None, deadline=None, max_examples=60)
@hypothesis.given(
    shape=st.sampled_from(SHAPES),
    lengths=st.lists(st.integers(0, 256) | st.floats(0, 1), min_size=BATCH, max_size=BATCH),
    faults=st.lists(FAULTS, min_size=BATCH, max_size=BATCH),
    dead=st.sampled_from([np.nan, np.inf, -np.inf, 0.0, 6e4]),
    filler=st.sampled_from([0, *junk_entries(10**6)]),
    spread=st.sampled_from([1, 6]),  # of the logits: 6 puts nearly all the weight on a few tokens
    sm_scale=st.sampled_from([None, 0.01, 0.07]),
    seed=st.integers(0, 2**32 - 1),
)
def test_is_dense_attention(shape, lengths, faults, dead, filler, spread, sm_scale, seed):
    config, q_len = shape
    rng = np.random.default_rng(seed)
    # A whole number is a length, a fraction chooses an edge.
    lengths = [
        min(n, config.longest) if isinstance(n, int) else config.edges[round(n * (len(config.edges) - 1))]
        for n in lengths
    ]
    paged = config.paged([config.sequence(n, rng) for n in lengths], dead=dead, dead_entry=filler, seed=seed)
    shape = paged.q.shape if q_len is None else (BATCH, q_len, *paged.q.shape[1:])
    paged = paged.replace(q=(spread * rng.standard_normal(shape)).astype(paged.q.dtype))
    for row, fault in enumerate(faults):
        if fault is not None:
            paged = faulty(paged, row, fault, filler)
    options = config.options | {"sm_scale": sm_scale}
    assert_close(paged.decode(config.plan, **options), paged.dense(**options))


@pytest.mark.parametrize("config", [config for config, _ in SHAPES], ids=str)
def test_the_shapes_split(config):
    expected = 1 if config.splits == 1 else 2
    assert config.active_splits(config.longest) >= expected
