"""Plans as values, and the split tree over every length."""

import dataclasses
import inspect
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

import splitk_jax as sk
from splitk_jax.decision import most_active
from splitk_jax.plan import MAX_TOKENS, split_edges

SHAPE = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "max_decode_seqs": 64}

# (num_splits, min_kv_per_split, block_kv)
COUNT_TREES = [
    (1, 256, 64),
    (2, 256, 64),
    (3, 64, 64),
    (7, 16, 16),
    (8, 128, 128),
    (11, 256, 64),
    (16, 64, 16),
    (33, 256, 64),
    (33, 256, 128),
    (64, 256, 64),
    (128, 512, 64),
    (200, 1, 1),
]
LENGTHS = np.arange(131073)


def tree(num_splits, min_kv, block, *, window=None, split_size=None, seq_len=LENGTHS, xp=np):
    return split_edges(
        seq_len,
        num_splits=num_splits,
        min_kv_per_split=min_kv,
        block_kv=block,
        split_size=split_size,
        window=window,
        xp=xp,
    )


def bounds(edges, seq_len, num_splits):
    """[low, high) of every split of every length, empty ones as low == high."""
    s = np.arange(num_splits)[:, None]
    low = np.maximum(edges.start, edges.origin + s * edges.span)
    high = np.minimum(edges.origin + (s + 1) * edges.span, seq_len)
    live = (s >= edges.first) & (s < edges.stop)
    return np.where(live, low, 0), np.where(live, high, 0), live


class TestTheTreeOverEveryLength:
    @pytest.mark.parametrize(("num_splits", "min_kv", "block"), COUNT_TREES)
    def test_count_rule(self, num_splits, min_kv, block):
        edges = tree(num_splits, min_kv, block)
        assert edges.stop.max() <= num_splits
        assert (edges.first == 0).all()
        assert (edges.span % block == 0).all()
        # Contiguous spans from 0, the last one cut at seq_len: [0, seq_len) is covered once.
        assert (edges.stop * edges.span >= LENGTHS).all()
        assert (((edges.stop - 1) * edges.span < LENGTHS) | (LENGTHS == 0)).all(), "no active split is empty"
        assert edges.stop[0] == 0
        # design.md section 3, word by word.
        active = np.clip(np.ceil(LENGTHS / min_kv), 1, num_splits)
        span = np.maximum(np.ceil(np.ceil(LENGTHS / active) / block), 1) * block
        assert (edges.span == span).all()
        if min_kv % block == 0:
            # Below the cap a split holds at most min_kv tokens, and the next is not begun before it must be.
            below = num_splits * min_kv >= LENGTHS
            assert (edges.span[below] <= min_kv).all()

    @pytest.mark.parametrize("split_size", [64, 512, 2048])
    def test_fixed_size_rule(self, split_size):
        edges = tree(4096, 256, 64, split_size=split_size)
        assert (edges.span == split_size).all()
        assert (edges.stop == -(-LENGTHS // split_size)).all()

    @pytest.mark.parametrize("window", [1, 63, 64, 1000, 200_000])
    @pytest.mark.parametrize("split_size", [None, 512])
    def test_window_covers_the_attended_tokens_once(self, window, split_size):
        lengths = np.arange(0, 5000)
        num_splits = 16 if split_size is None else -(-5000 // split_size)
        edges = tree(num_splits, 64, 64, window=window, split_size=split_size, seq_len=lengths)
        low, high, live = bounds(edges, lengths, num_splits)
        assert (np.where(live, high - low, 1) > 0).all(), "no active split is empty"
        assert ((high - low).sum(axis=0) == np.minimum(lengths, window)).all()
        start = np.maximum(lengths - window, 0)
        first = np.where(live, low, MAX_TOKENS).min(axis=0)
        assert ((first == start) | (lengths == 0)).all()
        if split_size is not None:
            assert (np.where(live & (low != start), low % split_size, 0) == 0).all(), "edges at absolute multiples"

    @pytest.mark.parametrize(("num_splits", "min_kv", "block"), [(1, 256, 64), (33, 256, 64), (200, 1, 1)])
    @pytest.mark.parametrize("window", [None, 700])
    @pytest.mark.parametrize("split_size", [None, 512])
    def test_device_arithmetic_is_the_hosts(self, num_splits, min_kv, block, window, split_size):
        lengths = np.concatenate([LENGTHS, [MAX_TOKENS - 1, MAX_TOKENS]]).astype(np.int32)
        host = tree(num_splits, min_kv, block, window=window, split_size=split_size, seq_len=lengths.astype(np.int64))
        device = tree(
            num_splits, min_kv, block, window=window, split_size=split_size, seq_len=jnp.asarray(lengths), xp=jnp
        )
        for ours, theirs in zip(host, device, strict=True):
            assert theirs.dtype == jnp.int32
            assert (np.asarray(theirs) == ours).all()

    def test_reads_the_row_length_and_configuration_only(self):
        assert set(inspect.signature(split_edges).parameters) == {
            "seq_len",
            "num_splits",
            "min_kv_per_split",
            "block_kv",
            "split_size",
            "window",
            "xp",
        }

    def test_split_bounds_are_the_tree(self):
        plan = sk.load_policy("cpu", environ={}, splits=4, min_kv_per_split=16).plan(**SHAPE)
        assert plan.split_bounds(0) == [(0, 0)] * 4
        assert plan.split_bounds(1) == [(0, 1), (0, 0), (0, 0), (0, 0)]
        assert plan.split_bounds(33) == [(0, 16), (16, 32), (32, 33), (0, 0)]
        assert plan.split_bounds(100) == [(0, 32), (32, 64), (64, 96), (96, 100)]
        assert plan.split_bounds(100, window=10) == [(90, 100), (0, 0), (0, 0), (0, 0)]
        with pytest.raises(ValueError, match="seq_len=-1 is out of range"):
            plan.split_bounds(-1)
        with pytest.raises(ValueError, match="window=0 is out of range"):
            plan.split_bounds(100, window=0)
        with pytest.raises(TypeError, match=r"window=3.0 must be a static whole number"):
            plan.split_bounds(100, window=3.0)

    def test_fixed_size_edges_stay_as_a_sequence_grows(self):
        policy = sk.load_policy("cpu", environ={}, splits="fixed_size", split_size=64)
        plan = policy.plan(**SHAPE, max_seq_len=256)
        assert plan.split_bounds(130) == [(0, 64), (64, 128), (128, 130), (0, 0)]
        assert plan.split_bounds(131)[:2] == plan.split_bounds(130)[:2]
        assert plan.split_bounds(200, window=100) == [(0, 0), (100, 128), (128, 192), (192, 200)]
        with pytest.raises(ValueError, match="seq_len=257 is out of range: accepted is a whole number from 0 to 256"):
            plan.split_bounds(257)


class TestPlanIsAValue:
    def test_equal_whatever_policy_it_came_from(self):
        by_rule = sk.load_policy("h200", environ={}).plan(**SHAPE)
        pinned = sk.load_policy("h100", environ={}, splits=by_rule.num_splits).plan(**SHAPE)
        assert by_rule == pinned
        assert hash(by_rule) == hash(pinned)

    @pytest.mark.parametrize(
        "change", [{"page_size": 32}, {"head_dim_v": 64}, {"kv_dtype": "float32"}, {"max_decode_seqs": 8}]
    )
    def test_differs_with_the_shape(self, change):
        policy = sk.load_policy("h200", environ={}, backend="reference")
        assert policy.plan(**SHAPE) != policy.plan(**SHAPE | change)

    def test_frozen_ints_and_strings(self):
        plan = sk.load_policy("h200", environ={}).plan(**SHAPE)
        with pytest.raises(dataclasses.FrozenInstanceError):
            plan.num_splits = 3
        for field in dataclasses.fields(plan):
            if field.compare:
                assert type(getattr(plan, field.name)) in (int, str, type(None)), field.name

    @pytest.mark.parametrize(
        ("field", "value", "error", "match"),
        [
            ("num_splits", 0, ValueError, "num_splits=0 is out of range"),
            ("num_splits", True, TypeError, "num_splits=True must be a static whole number"),
            ("num_q_heads", 33, ValueError, "num_q_heads=33 must be a multiple of num_kv_heads=8"),
            ("kv_heads_per_cta", 3, ValueError, "kv_heads_per_cta=3 must divide num_kv_heads=8"),
            ("warpgroups", 3, ValueError, "warpgroups=3 must be one or two for each of kv_heads_per_cta=2"),
            ("step_kv", 100, ValueError, "step_kv=100 must be a multiple of block_kv="),
            ("split_size", 100, ValueError, "split_size=100 must be a multiple of block_kv="),
            ("kv_dtype", "uint8", NotImplementedError, "kv_dtype=uint8: KV quantised so"),
            ("backend", "cuda", ValueError, "backend='cuda' is not known: accepted are mosaic, reference"),
        ],
    )
    def test_is_checked_however_it_is_made(self, field, value, error, match):
        plan = sk.load_policy("h200", environ={}).plan(**SHAPE)
        with pytest.raises(error, match=match):
            dataclasses.replace(plan, **{field: value})

    @pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"), np.dtype("bfloat16")])
    def test_dtypes_by_name_or_value(self, dtype):
        assert sk.load_policy("h200", environ={}).plan(**SHAPE, kv_dtype=dtype).kv_dtype == "bfloat16"

    def test_ctas_and_capacity_by_rule(self):
        shape = SHAPE | {"num_q_heads": 128, "num_kv_heads": 1}
        assert sk.load_policy("h200", environ={}).plan(**shape).ctas == 2
        assert sk.load_policy("gb10", environ={}).plan(**shape).ctas == 8
        adaptive = sk.load_policy("h200", environ={}, splits="adaptive")
        assert adaptive.plan(**SHAPE, num_seqs=4, max_seq_len=8192).row_capacity == 4
        assert adaptive.plan(**SHAPE, max_seq_len=8192).row_capacity == 64
        legacy = sk.load_policy("h200", environ={}, splits="legacy")
        assert legacy.plan(**SHAPE, num_seqs=100).row_capacity == 100
        with pytest.raises(ValueError, match="num_seqs=65 must be at most max_decode_seqs=64"):
            adaptive.plan(**SHAPE, num_seqs=65, max_seq_len=8192)

    @pytest.mark.parametrize(
        ("splits", "num_seqs", "expected"),
        [
            ("auto", None, True),
            ("balanced", None, True),
            (7, None, True),
            ("fixed_size", None, True),
            ("legacy", 64, True),
            ("legacy", 65, False),
            ("adaptive", 64, False),
        ],
    )
    def test_says_whether_it_is_batch_invariant(self, splits, num_seqs, expected):
        plan = sk.load_policy("h200", environ={}, splits=splits).plan(**SHAPE, num_seqs=num_seqs, max_seq_len=8192)
        assert plan.batch_invariant is expected
        assert plan.report()["batch_invariant"] is expected
        assert ("batch-invariant  yes" in plan.explain()) is expected

    def test_workspace(self):
        plan = sk.load_policy("h200", environ={}, backend="reference", splits=33).plan(**SHAPE, head_dim_v=64)
        assert plan.workspace_bytes == 33 * 32 * 64 * (64 + 2) * 4
        assert sk.load_policy("a100", environ={}, splits="off").plan(**SHAPE).workspace_bytes == 0

    def test_partials_of_16_bits(self):
        policy = sk.load_policy("h200", environ={}, backend="reference", splits=33)
        plan, wide = (policy.plan(**SHAPE, partial_dtype=dtype) for dtype in ("bfloat16", "float32"))
        assert plan.workspace_bytes == 33 * 32 * 64 * (128 * 2 + 8)
        assert wide == policy.plan(**SHAPE) != plan
        assert wide.fingerprint() != plan.fingerprint()
        assert "of bfloat16 partials" in plan.explain()
        assert plan.report()["partial_dtype"] == "bfloat16"
        with pytest.raises(NotImplementedError, match="partial_dtype=bfloat16: the mosaic backend serves float32"):
            sk.load_policy("h200", environ={}).plan(**SHAPE, partial_dtype="bfloat16")
        for dtype in ("float16", "int8"):
            with pytest.raises(
                ValueError, match=f"partial_dtype='{dtype}' is not served: accepted are float32, bfloat16"
            ):
                policy.plan(**SHAPE, partial_dtype=dtype)


class TestFingerprint:
    def plan(self, target="h200", shape=SHAPE, **overrides):
        return sk.load_policy(target, environ={}, **overrides).plan(**shape)

    def test_is_stable_and_short(self):
        assert self.plan().fingerprint() == self.plan().fingerprint()
        assert re.fullmatch("[0-9a-f]{16}", self.plan().fingerprint())

    def test_moves_with_whatever_moves_bits(self):
        prints = [
            self.plan().fingerprint(),
            self.plan("h100").fingerprint(),  # same tree, another part
            self.plan("a100").fingerprint(),
            self.plan(splits=11).fingerprint(),
            self.plan(min_kv_per_split=512).fingerprint(),
            self.plan(shape=SHAPE | {"page_size": 32}).fingerprint(),
        ]
        assert len(set(prints)) == len(prints)

    def test_does_not_move_with_how_the_count_was_asked_for(self):
        assert self.plan(splits=self.plan().num_splits).fingerprint() == self.plan().fingerprint()

    def test_moves_with_the_sm_count_alone(self):
        slices = [sk.Policy(sm_count=n, splits=8).plan(**SHAPE) for n in (132, 60)]
        assert dataclasses.replace(slices[1], launch_ctas=132) == slices[0]
        assert slices[0].fingerprint() != slices[1].fingerprint()

    def test_does_not_move_with_how_many_ctas_are_launched(self):
        plan = self.plan()
        assert plan.launch_ctas == 132
        fewer = dataclasses.replace(plan, launch_ctas=66)
        assert fewer != plan, "another launch is another program"
        assert fewer.fingerprint() == plan.fingerprint()

    def test_moves_with_versions(self, monkeypatch):
        before = self.plan().fingerprint()
        monkeypatch.setattr("splitk_jax.plan.metadata.version", lambda name: "0")
        assert self.plan().fingerprint() != before


class TestExplain:
    def test_shows_the_decision(self):
        settings = {"splits": "auto", "min_kv_per_split": 256, "backend": "reference"}
        text = sk.load_policy("h200", environ={}, **settings).plan(**SHAPE).explain()
        for line in (
            "h200: NVIDIA H200, sm_90, 132 SMs",
            "num_splits       33 = clamp(ceil(1 waves * 132 SMs / 4 CTAs), 1, max_splits 132)",
            "CTAs a sequence  4 = 8 KV heads / 2 a CTA * ceil(group 4 / 64 heads a CTA), at one split",
            "workspace        35.14 MB of float32 partials",
            "     1       33            132     1.0         4            0.03",
            "  16384              32              512   67.11 MB    14.42       461.37",
            "splits             auto        argument splits",
            "max_splits         132         configs/h200.toml [policy] max_splits",
        ):
            assert line in text

    @pytest.mark.parametrize(
        ("splits", "formula"),
        [
            ("balanced", "clamp(2 waves * max(132 SMs // 4 CTAs, 1), 1, max_splits 132)"),
            ("legacy", "min(132 SMs // (32 query heads * max(4 sequences, 64 rows)) or 1, max_splits 132)"),
            ("adaptive", "clamp(ceil(132 CTAs / (4 sequences * 4 CTAs)), 1, min(max_splits 132, 8192 tokens // 128))"),
            ("fixed_size", "ceil(8192 tokens / 512 a split)"),
            (11, "clamp(11 pinned, 1, max_splits 132)"),
        ],
    )
    def test_formula_of_each_rule(self, splits, formula):
        policy = sk.load_policy("h200", environ={}, splits=splits, target_waves=2, min_kv_per_split=128)
        plan = policy.plan(**SHAPE, num_seqs=4, max_seq_len=8192)
        assert f"num_splits       {plan.num_splits} = {formula}" in plan.explain()

    def test_formula_of_more_ctas_than_sms(self):
        policy = sk.load_policy("h200", environ={}, target_waves=3)
        plan = policy.plan(**SHAPE | {"num_q_heads": 264, "num_kv_heads": 264})
        assert "num_splits       3 = clamp(3 waves * max(132 SMs // 132 CTAs, 1), 1, max_splits 132)" in plan.explain()

    def test_report_is_json_and_counts_as_the_tree_does(self):
        plan = sk.load_policy("h200", environ={}).plan(**SHAPE)
        facts = json.loads(json.dumps(plan.report()))
        assert facts["plan"]["num_splits"] == plan.num_splits
        for row in facts["contexts"]:
            live = [b for b in plan.split_bounds(row["tokens"]) if b != (0, 0)]
            assert row["active_splits"] == len(live)
            assert row["tokens_per_split"] == live[0][1]
            assert row["kv_bytes"] == row["tokens"] * 8 * 256 * 2

    def test_report_has_the_length_that_was_asked_for(self):
        policy = sk.load_policy("h200", environ={}, splits="fixed_size")
        tokens = [row["tokens"] for row in policy.plan(**SHAPE, max_seq_len=8192).report()["contexts"]]
        assert tokens == [256, 1024, 4096, 8192]

    def test_adaptive_report_has_each_buckets_own_count(self):
        policy = sk.load_policy("rtx_pro_6000", environ={}, splits="adaptive", max_splits=8, min_kv_per_split=64)
        plan = policy.plan(
            num_q_heads=32, num_kv_heads=1, head_dim=128, page_size=16, max_decode_seqs=64, max_seq_len=512
        )
        assert plan.ctas == 2
        rows = {row["batch"]: (row["num_splits"], row["ctas"]) for row in plan.report()["batches"]}
        assert rows == {1: (8, 16), 4: (8, 64), 16: (6, 192), 64: (2, 256)}

    @pytest.mark.parametrize(("most", "batches"), [(1, [1]), (3, [1, 3]), (16, [1, 4, 16]), (200, [1, 4, 16, 64, 200])])
    def test_the_largest_batch_is_among_those_that_are_shown(self, most, batches):
        plan = sk.load_policy("h200", environ={}).plan(**SHAPE | {"max_decode_seqs": most})
        assert [row["batch"] for row in plan.report()["batches"]] == batches

    def test_without_a_target(self):
        plan = sk.Policy(sm_count=132).plan(**SHAPE)
        assert "no target, 132 SMs" in plan.explain()
        assert plan.report()["contexts"][0]["split_us"] is None
        assert plan.report()["contexts"][0]["unsplit_us"] is None
        assert len(plan.fingerprint()) == 16


class TestExplainedCalls:
    """What a call adds to its plan: query tokens and a window."""

    PLAN = sk.load_policy("h200", environ={}).plan(**SHAPE)

    def test_a_window_costs_what_its_tokens_cost(self):
        rows = {row["tokens"]: row for row in self.PLAN.report(window=1024)["contexts"]}
        whole = {row["tokens"]: row for row in self.PLAN.report()["contexts"]}
        assert rows[256] == whole[256]
        for tokens, row in rows.items():
            bounds = [b for b in self.PLAN.split_bounds(tokens, window=1024) if b != (0, 0)]
            assert row["active_splits"] == len(bounds)
            if tokens >= 1024:
                assert row == whole[1024] | {"tokens": tokens}
        assert "call             a window of 1024 tokens" in self.PLAN.explain(window=1024)

    def test_query_tokens_move_no_split(self):
        alone, several = self.PLAN.report(), self.PLAN.report(q_len=4)
        assert several["q_len"] == 4
        for key in ("plan", "fingerprint", "batches", "contexts", "warnings"):
            assert several[key] == alone[key]
        packed = self.PLAN.packed(4)
        assert packed.ctas == self.PLAN.ctas
        assert several["workspace_bytes"] == packed.scratch_bytes(4 * self.PLAN.row_capacity)
        launch = several["launch"]
        assert launch["smem_bytes"] == packed.mosaic_tile.smem_bytes(packed.stages)
        assert (launch["stages"], launch["warpgroups"], launch["heads_per_warpgroup"]) == (packed.stages, 2, 16)
        text = self.PLAN.explain(q_len=4, window=99)
        assert (
            "call             4 query tokens a sequence, 16 of their heads a warpgroup, a window of 99 tokens" in text
        )
        assert f"{several['launch']['smem_bytes']} bytes of shared memory each" in text
        assert self.PLAN.report(q_len=4, window=99)["contexts"][1]["kv_bytes"] == 102 * 8 * 256 * 2

    def test_what_they_launch_is_theirs(self):
        packed, report = self.PLAN.packed(8), self.PLAN.report(q_len=8)
        assert packed.ctas == 2 * self.PLAN.ctas
        for row, alone in zip(report["batches"], self.PLAN.report()["batches"], strict=True):
            assert row["num_splits"] == alone["num_splits"]
            assert (row["ctas"], row["unsplit_ctas"]) == (2 * alone["ctas"], 2 * alone["unsplit_ctas"])
        for row, alone in zip(report["contexts"], self.PLAN.report()["contexts"], strict=True):
            assert row["active_splits"] == alone["active_splits"]
            assert row["unsplit_us"] == pytest.approx(alone["unsplit_us"] / 2, rel=0.01)

    def test_a_batch_that_is_not_served_is_a_warning(self):
        shape = SHAPE | {"num_q_heads": 128, "head_dim": 128, "head_dim_v": 96, "max_decode_seqs": 64}
        plan = sk.load_policy("h200", environ={}).plan(**shape, kv_dtype="int8")
        assert plan.report(q_len=1)["warnings"] == []
        (warning,) = plan.report(q_len=16)["warnings"]
        assert "q_len=16 in a batch of 64 with head_dim_v=96: the mosaic backend would need" in warning

    def test_the_reference_backend_has_rows_for_each(self):
        plan = sk.load_policy("h200", environ={}, backend="reference").plan(**SHAPE)
        assert plan.report(q_len=20)["workspace_bytes"] == 20 * plan.workspace_bytes
        assert plan.report(q_len=20)["launch"] is None

    @pytest.mark.parametrize(
        ("call", "error", "match"),
        [
            ({"q_len": 17}, NotImplementedError, "q_len=17: the mosaic backend serves up to 16 .*reference"),
            ({"q_len": 0}, ValueError, "q_len=0 is out of range"),
            ({"window": 0}, ValueError, "window=0 is out of range"),
            ({"window": 1.5}, TypeError, "window=1.5"),
        ],
        ids=str,
    )
    def test_refuses(self, call, error, match):
        for explain in (self.PLAN.report, self.PLAN.explain):
            with pytest.raises(error, match=match):
                explain(**call)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_quantised_kv_in_explain(dtype):
    plan = sk.load_policy("h200", environ={}, backend="reference").plan(**SHAPE, kv_dtype=dtype)
    halved = sk.load_policy("h200", environ={}, backend="reference").plan(**SHAPE)
    for row, wide in zip(plan.report()["contexts"], halved.report()["contexts"], strict=True):
        assert 2 * row["kv_bytes"] == wide["kv_bytes"]
    assert f"KV {dtype}, up to" in plan.explain()
    # The plan knows of no scales: what they add is said, not counted.
    assert "KV read leaves scales out" in plan.explain()
    assert "scales" not in halved.explain()
    assert plan.fingerprint() != halved.fingerprint()


class TestDecision:
    def test_where_the_count_moves(self):
        plan = sk.load_policy("h200", environ={}).plan(**SHAPE)
        moves = {(c["setting"], c["value"]): c["num_splits"] for c in plan.report()["changes"]}
        # 4 CTAs a sequence: 132 // 4 = 33. Seven KV heads do not share CTAs in pairs, nine neither.
        assert moves == {
            ("sm_count", 131): 32,
            ("sm_count", 136): 34,
            ("num_kv_heads", 7): 18,
            ("num_kv_heads", 9): 14,
            ("num_q_heads", 136): 16,
            ("target_waves", 2): 66,
        }

    @pytest.mark.parametrize(
        ("target", "splits", "moves"),
        [("h200", 132, {66: 66}), ("gb10", 24, {48: 32, 65: 20})],  # h200: mosaic serves no group of 65
    )
    def test_query_heads_of_one_kv_head(self, target, splits, moves):
        plan = sk.load_policy(target, environ={}).plan(**SHAPE | {"num_q_heads": 64, "num_kv_heads": 1})
        assert plan.num_splits == splits
        changes = plan.report()["changes"]
        assert {c["value"]: c["num_splits"] for c in changes if c["setting"] == "num_q_heads"} == moves
        assert "num_q_heads" in plan.explain()

    @pytest.mark.parametrize("splits", ["auto", "balanced", "legacy", "adaptive", "fixed_size", 7])
    def test_each_move_is_the_nearest(self, splits):
        plan = sk.load_policy("h200", environ={}, splits=splits).plan(**SHAPE, max_seq_len=8192)
        policy = plan.policy
        for change in plan.report()["changes"]:
            setting, value = change["setting"], change["value"]
            now = {"sm_count": 132, "num_kv_heads": 8, "num_q_heads": 32, "target_waves": 1}[setting]

            def count(at, setting=setting):
                if setting == "num_kv_heads":
                    shape, other = {"num_q_heads": 4 * at, "num_kv_heads": at}, policy
                elif setting == "num_q_heads":
                    shape, other = {"num_q_heads": at}, policy
                else:
                    own = {"target_ctas": at} if setting == "sm_count" else {}
                    shape, other = {}, dataclasses.replace(policy, **{setting: at}, **own)
                return other.plan(**SHAPE | shape, max_seq_len=8192).num_splits

            assert count(value) == change["num_splits"] != plan.num_splits
            step = (8 if setting == "num_q_heads" else 1) * (1 if value > now else -1)
            assert {count(at) for at in range(now, value, step)} == {plan.num_splits}

    def test_nothing_moves_a_pinned_count(self):
        plan = sk.load_policy("h200", environ={}, splits=7).plan(**SHAPE)
        assert plan.report()["changes"] == []
        assert "where the count moves" not in plan.explain()

    @pytest.mark.parametrize(
        ("settings", "shape", "match"),
        [
            ({"splits": "off"}, {}, "less than a wave: 4 CTAs on 132 SMs, 128 are idle"),
            ({"splits": 200}, {}, None),
            ({}, {"max_seq_len": 256}, "8 CTAs on 132 SMs, 124 are idle: up to 256 tokens use at most 2 of 33 splits"),
            ({}, {"max_seq_len": 1}, "4 CTAs on 132 SMs, 128 are idle: up to 1 tokens use at most 1 of 33 splits"),
            ({}, {"max_seq_len": 8192}, None),  # there, rounding leaves 32 of the 33 splits that 4096 tokens use
            ({"splits": "fixed_size"}, {"max_seq_len": 8192}, "64 CTAs on 132 SMs, 68 are idle"),
            ({"target_waves": 9}, {}, "max_splits=132 binds: the rule asks for 297 splits"),
            ({"splits": "adaptive"}, {"max_seq_len": 8192}, "not batch-invariant"),
            ({}, {}, None),
        ],
    )
    def test_warnings(self, settings, shape, match):
        plan = sk.load_policy("h200", environ={}, **settings).plan(**SHAPE | shape)
        warnings = plan.report()["warnings"]
        if match is None:
            assert not [w for w in warnings if "binds" not in w]
        else:
            assert match in " ".join(warnings)
            assert f"warning: {warnings[0]}" in " ".join(plan.explain().split())

    @pytest.mark.parametrize("splits", ["auto", "fixed_size", 7])
    def test_the_most_splits_that_are_active(self, splits):
        policy = sk.load_policy("h200", environ={}, splits=splits, min_kv_per_split=192, split_size=192)
        for longest in (1, 64, 191, 192, 193, 700, 1345, 9000):
            plan = policy.plan(**SHAPE, max_seq_len=longest)
            edges = plan.edges(np.arange(1, longest + 1))
            assert most_active(plan) == (edges.stop - edges.first).max()

    def test_another_sm_count_than_the_targets(self):
        policy = dataclasses.replace(sk.load_policy("h200", environ={}), sm_count=16)
        (warning,) = policy.plan(**SHAPE).report()["warnings"]
        assert warning == "16 SMs are not the 132 of h200: a MIG slice, or another part?"

    def test_times_are_the_share_of_the_bandwidth(self):
        plan = sk.load_policy("h200", environ={}).plan(**SHAPE)
        for row in plan.report()["contexts"]:
            peak = row["kv_bytes"] / 4800 / 1e3
            assert row["unsplit_us"] == pytest.approx(peak * 33, abs=0.01)
            assert row["split_us"] == pytest.approx(peak * 33 / row["active_splits"], abs=0.01)
