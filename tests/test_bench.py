"""The benchmark command: what it checks, shows and refuses. What it measures is not tested."""

import dataclasses
import functools
import json
import sys
import textwrap
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from jax.experimental.pallas import mosaic_gpu as plgpu

import splitk_jax as sk
from splitk_jax import bench, bench_report, flashinfer_peer, peers
from splitk_jax.checks import MOSAIC_JAX
from splitk_jax.cli import main
from splitk_jax.kernels.mosaic import read
from splitk_jax.shapes import MODELS, SUITES, Cell, K, equal, log_uniform

ONE = "tiny b2 1k p16"
EQUAL = {name: [cell for cell in cells if len(set(cell.seq_lens)) == 1] for name, cells in SUITES.items()}
RAGGED = {name: [cell for cell in cells if len(set(cell.seq_lens)) > 1] for name, cells in SUITES.items()}


def run(*args):
    return CliRunner().invoke(main, ["bench", "--suite", "smoke", "--target", "cpu", "--repeats", "1", *args])


def of(name, cell_results):
    """One system's result in each cell of a document."""
    return [cell["results"][name] for cell in cell_results["cells"]]


class TestShapes:
    @pytest.mark.parametrize("suite", SUITES)
    def test_cells_have_names_of_their_own(self, suite):
        names = [cell.name for cell in SUITES[suite]]
        assert len(set(names)) == len(names)
        assert all(min(cell.seq_lens) >= cell.q_len >= 1 for cell in SUITES[suite])
        assert all(cell.window is None and cell.q_len == 1 for cell in SUITES[suite]) or suite in ("window", "mtp")

    def test_models(self):
        shapes = {(m.num_q_heads, m.num_kv_heads, m.head_dim) for name, m in MODELS.items() if name != "tiny"}
        assert shapes == {(32, 8, 128), (64, 8, 128), (24, 4, 256), (32, 4, 128), (32, 32, 128), (32, 1, 128)}

    def test_decode_covers_what_serving_meets(self):
        cells = SUITES["decode"]
        assert {cell.model for cell in cells} == set(MODELS) - {"tiny"}
        assert {cell.page_size for cell in cells} == {16, 64}
        assert {1, 4, 16, 64, 128} <= {cell.batch for cell in cells}
        assert {1 * K, 8 * K, 32 * K, 128 * K} <= {cell.seq_lens[0] for cell in EQUAL["decode"]}
        assert len(RAGGED["decode"]) >= 5
        assert {cell.model for cell in RAGGED["decode"]} >= {"llama3-8b", "llama3-70b", "qwen3-d128", "mha"}
        assert set(SUITES["targets"]) <= set(cells)

    def test_targets_are_those_that_are_stated(self):
        shapes = [
            (cell.batch, *dataclasses.astuple(cell.heads), cell.seq_lens[0], cell.page_size)
            for cell in EQUAL["targets"]
        ]
        assert shapes == [
            (1, 32, 8, 128, 1024, 16),
            (1, 32, 8, 128, 8192, 16),
            (1, 24, 4, 256, 4864, 16),
            (1, 32, 8, 128, 131072, 16),
            (16, 32, 8, 128, 8192, 64),
            (64, 32, 8, 128, 2048, 16),
        ]
        (ragged,) = RAGGED["targets"]
        long, *short = sorted(ragged.seq_lens, reverse=True)
        assert (long, len(short)) == (128 * K, 63)
        assert min(short) >= 512
        assert max(short) <= 4 * K

    def test_invariance_is_a_grid_and_ragged_mixes(self):
        grid = {(cell.batch, cell.seq_lens[0]) for cell in EQUAL["invariance"]}
        assert grid == {(batch, n * K) for batch in (1, 4, 16, 64) for n in (1, 8, 32, 128)}
        assert len(RAGGED["invariance"]) == 3

    def test_a_window_stands_beside_its_tokens_alone(self):
        cells = [cell for cell in SUITES["window"] if cell.window is not None]
        assert len(cells) == 8
        for cell in cells:
            assert (cell.model, cell.q_len) == ("llama3-8b", 1)
            assert cell.window < min(cell.seq_lens)
            alone = equal("llama3-8b", cell.batch, cell.window, cell.page_size)
            assert alone in SUITES["window"]
            assert alone.kv_bytes == cell.kv_bytes
        assert {(cell.batch, cell.window) for cell in cells} == {(b, n * K) for b in (1, 16) for n in (1, 4)}
        assert {cell.seq_lens[0] for cell in cells} == {8 * K, 32 * K, 128 * K}
        assert {cell.page_size for cell in cells} == {16, 64}

    def test_mtp_is_a_row_of_query_tokens_for_each_model(self):
        assert all(cell.window is None for cell in SUITES["mtp"])
        for model in ("llama3-8b", "qwen3-d256", "qwen3-d128"):
            cells = [cell for cell in SUITES["mtp"] if cell.model == model]
            assert [(c.q_len, c.batch, c.seq_lens[0], c.page_size) for c in cells] == [
                *((q_len, 16, 8 * K, 64) for q_len in (1, 2, 4, 8)),
                (4, 1, 8 * K, 16),
                (4, 64, 2 * K, 16),
            ]

    def test_fp8_has_bfloat16_at_as_many_tokens_and_at_as_many_bytes_first(self):
        seen = []
        for cell in SUITES["fp8"]:
            wide = dataclasses.replace(cell, kv_dtype="bfloat16")
            if cell.quantised:
                assert wide in seen
                assert cell.kv_bytes in {other.kv_bytes for other in seen if not other.quantised}
                assert 2 * cell.kv_bytes == wide.kv_bytes
            seen.append(cell)
        assert {cell.kv_dtype for cell in seen} == {"bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"}
        assert max(cell.kv_bytes for cell in seen) >= 500e6

    def test_names_say_what_is_not_the_default(self):
        assert dataclasses.replace(equal("mha", 2, 1 * K), kv_dtype="float8_e4m3fn").name == "mha b2 1k e4m3 p16"
        assert equal("mha", 2, 1 * K).name == "mha b2 1k p16"
        assert equal("mha", 2, 8 * K, 64, window=1 * K).name == "mha b2 8k w1k p64"
        assert equal("mha", 2, 8 * K, q_len=4).name == "mha b2 8k q4 p16"
        assert equal("mha", 2, 300, window=100, q_len=4).name == "mha b2 300 w100 q4 p16"

    def test_bytes_are_of_what_is_attended(self):
        cell = Cell(model="tiny", seq_lens=(5, 64, 1000), page_size=16, context="", window=64)
        assert cell.attended == 5 + 64 + 64
        cell = dataclasses.replace(cell, q_len=4)  # the first of four queries reaches three tokens further back
        assert cell.attended == 5 + 64 + 67
        assert cell.kv_bytes == cell.attended * 2 * MODELS["tiny"].token_values
        assert (cell.width, cell.live_pages) == (63, 1 + 4 + 63)
        assert dataclasses.replace(cell, window=None).attended == 1069

    def test_bytes_and_pages(self):
        cell = equal("llama3-8b", 1, 8 * K)
        assert (cell.kv_bytes, cell.width, cell.live_pages, cell.page_bytes) == (33_554_432, 512, 512, 65_536)
        cell = Cell(model="qwen3-d256", seq_lens=(1, 64, 65), page_size=64, context="")
        assert (cell.kv_bytes, cell.width, cell.live_pages) == (130 * 4096, 2, 4)

    def test_ragged_lengths_are_the_same_everywhere(self):
        cell = log_uniform("mha", 5, 512, 16 * K)
        assert cell.seq_lens == (9555, 7081, 2199, 1255, 3011)
        assert cell.context == "log 512-16k"
        assert log_uniform("mha", 5, 512, 16 * K, seed=1).seq_lens != cell.seq_lens

    def test_pools_are_exact_where_they_can_be(self):
        for cell in (*SUITES["decode"], *SUITES["window"], *SUITES["mtp"]):
            pools, num_pages = bench.pools_of(cell, on_gpu=True)
            exact = num_pages == cell.batch * cell.width
            assert exact or (cell.context == "128k+63" and num_pages == cell.live_pages)
            assert bench.MIN_POOLS <= pools <= bench.LAYERS
            assert pools == bench.LAYERS or pools * cell.kv_bytes > 5 * 60 * 2**20
            assert pools * num_pages * cell.page_bytes <= bench.POOL_BYTES
        assert bench.pools_of(equal("llama3-8b", 16, 128 * K), on_gpu=True)[0] == 2

    def test_checked_rows(self):
        assert bench.checked_rows(equal("llama3-8b", 128, 1 * K)) == list(range(128))
        for cell in (cell for cells in SUITES.values() for cell in cells):
            rows = bench.checked_rows(cell)
            assert {0, cell.batch - 1} <= set(rows) <= set(range(cell.batch))
            assert max(cell.seq_lens) in [cell.seq_lens[row] for row in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def done(folder):
    return run("--json", str(folder / "bench.json"))


@pytest.fixture(scope="module")
def facts(done, folder):
    assert done.exit_code == 0, done.output
    assert [path.name for path in folder.iterdir()] == ["bench.json"]
    return json.loads((folder / "bench.json").read_text())


class TestSmoke:
    """The smallest suite, whole: checked, timed and shown."""

    def test_tables(self, done):
        assert done.exit_code == 0, done.output
        for text in ("target      cpu (configs/cpu.toml)", "plans", "TB/s", "the best peer over ours: geomean"):
            assert text in done.stdout
        for cell in SUITES["smoke"]:
            assert done.stdout.count(cell.name) >= 2
        assert all(len(line) <= 118 for line in done.stdout.splitlines() if "[every cell]" not in line)

    def test_progress_is_said_cell_by_cell(self, done):
        lines = done.stderr.splitlines()
        assert [line.partition(",")[0] for line in lines] == ["[1/2", "[2/2"]
        assert "splitk_jax" in lines[0]
        assert "gather" in lines[0]

    def test_document(self, facts):
        for key in ("suite", "target", "device", "platform_version", "calls", "repeats", "tolerance", "versions"):
            assert facts[key], key
        assert facts["versions"].keys() == {"splitk_jax", "jax", "jaxlib"}
        assert facts["peers"].keys() == set(peers.NAMES)
        assert [cell["cell"] for cell in facts["cells"]] == [cell.name for cell in SUITES["smoke"]]
        keys = (facts, facts["peers"]["gather"], facts["cells"][0], *facts["cells"][0]["results"].values())
        keys += (facts["cells"][0]["plan"], facts["cells"][0]["floor"])
        for key in {key for part in keys for key in part}:
            assert key in bench.__doc__, key
        for cell in facts["cells"]:
            assert cell["kv_bytes"] == sum(cell["seq_lens"]) * 2 * MODELS["tiny"].token_values
            assert cell["layers"] >= 2
            assert cell["skipped"] is cell["cost"] is None
            assert cell["plan"]["backend"] == "reference"

    @pytest.mark.parametrize("name", ["splitk_jax", "gather"])
    def test_what_is_right_is_timed(self, facts, name):
        for cell, result in zip(facts["cells"], of(name, facts), strict=True):
            assert (result["status"], result["reason"]) == ("ok", None)
            assert 0 < result["error"] < bench.TOLERANCE
            assert result["queued_us"] > 0
            assert result["tb_per_s"] == pytest.approx(cell["kv_bytes"] / result["queued_us"] / 1e6)
            assert result["over_ours"] == result["queued_us"] / cell["results"]["splitk_jax"]["queued_us"]

    @pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU has a floor and kernel times")
    def test_a_cpu_has_no_floor_and_says_so(self, facts, done):
        for cell in facts["cells"]:
            assert cell["floor"]["queued_us"] is None
            assert cell["results"]["splitk_jax"]["kernel_us"] is None
            assert cell["results"]["splitk_jax"]["over_floor"] is None
        assert "no floor: the read kernel needs a GPU, got cpu [every cell]" in done.stdout

    @pytest.mark.skipif(jax.default_backend() == "gpu", reason="these peers run on a GPU")
    @pytest.mark.parametrize("name", ["cudnn", "fa3", "flashinfer", "stock"])
    def test_peers_that_are_not_here_are_shown_with_the_reason(self, facts, done, name):
        assert facts["peers"][name]["missing"] == "needs a GPU, got cpu"
        assert {result["status"] for result in of(name, facts)} == {"missing"}
        assert f"{name} missing: needs a GPU, got cpu [every cell]" in done.stdout

    def test_json_to_the_standard_output_is_all_of_it(self):
        done = run("--json", "-", "--peers", "none", "--only", ONE)
        facts = json.loads(done.stdout)
        assert [cell["cell"] for cell in facts["cells"]] == [ONE]
        assert facts["peers"] == {}
        assert facts["cells"][0]["results"].keys() == {"splitk_jax"}

    def test_plot(self, tmp_path):
        pytest.importorskip("matplotlib")
        path = tmp_path / "bench.png"
        done = run("--plot", str(path), "--peers", "gather")
        assert done.exit_code == 0, done.output
        assert path.read_bytes().startswith(b"\x89PNG")


class TestWrong:
    """A system that is wrong is not timed, and is shown."""

    @pytest.mark.parametrize(
        ("spoil", "status", "reason"),
        [
            pytest.param(lambda out: jnp.zeros_like(out), "wrong", "relative error 1, above 0.01", id="zeros"),
            pytest.param(lambda out: out.at[-1, -1].set(jnp.nan), "wrong", "relative error inf", id="one-nan-row"),
            pytest.param(lambda out: out[::-1], "wrong", "relative error", id="rows-exchanged"),
            pytest.param(lambda out: out.reshape(3, 5), "failed", "TypeError", id="raises"),
        ],
    )
    def test_ours(self, monkeypatch, spoil, status, reason):
        right = bench.paged_decode_attention
        monkeypatch.setattr(bench, "paged_decode_attention", lambda *args, **options: spoil(right(*args, **options)))
        done = run("--json", "-", "--peers", "gather", "--only", ONE)
        assert done.exit_code == 1
        assert f"Error: splitk_jax is not right: {ONE}: splitk_jax {status} ({reason}" in done.stderr
        (result,) = of("splitk_jax", json.loads(done.stdout))
        assert result["status"] == status
        assert reason in result["reason"]
        assert result["queued_us"] is None
        (gather,) = of("gather", json.loads(done.stdout))
        assert gather["status"] == "ok"

    def test_a_dropped_split_is_seen(self, monkeypatch):
        right = bench.paged_decode_attention
        monkeypatch.setattr(
            bench,
            "paged_decode_attention",
            lambda q, k, v, tables, lens, **options: right(q, k, v, tables, lens - 16, **options),
        )
        done = run("--peers", "none", "--only", ONE)
        assert done.exit_code == 1
        assert "wrong" in done.stdout

    def test_a_peer(self, monkeypatch):
        def candidates(cell, num_pages):
            def no_softmax(q, k_pages, v_pages, block_tables, seq_lens):
                return q

            return {"a": no_softmax, "b": no_softmax}

        spoilt = [dataclasses.replace(p, candidates=candidates) for p in peers.IN_PROCESS if p.name == "gather"]
        monkeypatch.setattr(peers, "IN_PROCESS", tuple(spoilt))
        done = run("--peers", "gather", "--only", ONE)
        assert done.exit_code == 0
        assert "gather wrong: relative error" in done.stdout
        assert "faster than" not in done.stdout

    def test_the_right_way_to_call_a_peer_outweighs_a_wrong_one(self, monkeypatch):
        (gather,) = [p for p in peers.IN_PROCESS if p.name == "gather"]

        def candidates(cell, num_pages):
            return {"wrong": lambda q, *pages: q, "right": gather.candidates(cell, num_pages)[""]}

        monkeypatch.setattr(peers, "IN_PROCESS", (dataclasses.replace(gather, candidates=candidates),))
        (result,) = of("gather", json.loads(run("--json", "-", "--peers", "gather", "--only", ONE).stdout))
        assert (result["status"], result["choice"]) == ("ok", "right")

    def test_a_cell_that_a_peer_does_not_serve(self, monkeypatch):
        monkeypatch.setattr(peers, "GATHER_BYTES", 1000)
        done = run("--peers", "gather", "--only", ONE)
        assert done.exit_code == 0
        assert "gather unserved: would gather 0.0 GB; the bound is 1e-06 GB [every cell]" in done.stdout

    def test_cells_that_do_not_fit_are_skipped_and_said(self, monkeypatch):
        monkeypatch.setattr(bench, "POOL_BYTES", 1000)
        done = run("--peers", "none", "--only", ONE)
        assert done.exit_code == 0
        assert "skipped: 2 sets of pools take 0.0 GB; the bound is 0.0 GB" in done.stdout


WINDOWS = (
    equal("tiny", 2, 1 * K, window=100),
    equal("tiny", 2, 1 * K, q_len=3),
    log_uniform("tiny", 3, 64, 1 * K),
    equal("tiny", 2, 300, window=64, q_len=2),
)


class TestWindowsAndQueryTokens:
    """Cells with a window, several query tokens, and both, on a small model."""

    @pytest.fixture(autouse=True)
    def _suite(self, monkeypatch):
        monkeypatch.setitem(SUITES, "smoke", WINDOWS)
        monkeypatch.setattr(bench, "CALLS", 1)

    def test_a_run(self):
        done = run("--json", "-", "--peers", "gather")
        assert done.exit_code == 0, done.output
        facts = json.loads(done.stdout)
        assert [(cell["window"], cell["q_len"]) for cell in facts["cells"]] == [(100, 1), (None, 3), (None, 1), (64, 2)]
        assert [cell["context"] for cell in facts["cells"]][:2] == ["1k", "1k"]
        for key in facts["cells"][0]:
            assert key in bench.__doc__, key
        for name in ("splitk_jax", "gather"):
            for cell, result in zip(WINDOWS, of(name, facts), strict=True):
                assert result["status"] == "ok", (cell.name, result)
                assert 0 < result["error"] < bench.TOLERANCE
                assert result["tb_per_s"] == pytest.approx(cell.kv_bytes / result["queued_us"] / 1e6)

    @pytest.mark.parametrize("suite", ["window", "mtp", "fp8"])
    def test_tables_name_each_cell_in_the_usual_width(self, suite):
        done = run("--suite", suite, "--seconds", "1e-9")
        assert done.exit_code == 0, done.output
        for cell in SUITES[suite]:
            assert f"{cell.name} " in done.stdout
            assert f" {cell.span} " in done.stdout
        tables = done.stdout.partition("the run's 1e-09 seconds were over")[0]
        assert all(len(line) <= 118 for line in tables.splitlines())

    @staticmethod
    def token_by_token(q, *args, seq_lens, shift=0, **options):
        """The op on each query token alone, at `shift` tokens from where it belongs."""
        own = [seq_lens - q.shape[1] + 1 + t + shift for t in range(q.shape[1])]
        decode = functools.partial(sk.paged_decode_attention, **options)
        return jnp.stack([decode(q[:, t], *args, jnp.minimum(n, seq_lens)) for t, n in enumerate(own)], axis=1)

    def outcome(self, monkeypatch, cell, spoilt):
        monkeypatch.setitem(SUITES, "smoke", (cell,))
        monkeypatch.setattr(bench, "paged_decode_attention", spoilt)
        (result,) = of("splitk_jax", json.loads(run("--json", "-", "--peers", "none").stdout))
        return result["status"]

    @pytest.mark.parametrize(
        ("window", "status"),
        [(100, "ok"), (None, "wrong"), (99, "wrong"), (101, "wrong"), (1, "wrong")],
        ids=str,
    )
    def test_a_window_that_is_not_the_cells(self, monkeypatch, window, status):
        def spoilt(*args, **options):
            assert options.pop("window") == 100
            return sk.paged_decode_attention(*args, **options, window=window)

        assert self.outcome(monkeypatch, WINDOWS[0], spoilt) == status

    @pytest.mark.parametrize(
        ("shift", "status"),
        [
            pytest.param(0, "ok", id="right"),
            pytest.param(1, "wrong", id="one-late"),
            pytest.param(-1, "wrong", id="one-early"),
            pytest.param(2, "wrong", id="no-causal-edge"),
        ],
    )
    def test_a_causal_edge_that_is_off(self, monkeypatch, shift, status):
        def spoilt(q, k, v, tables, seq_lens, **options):
            assert q.shape[:2] == (2, 3)
            return self.token_by_token(q, k, v, tables, seq_lens=seq_lens, shift=shift, **options)

        assert self.outcome(monkeypatch, WINDOWS[1], spoilt) == status

    def test_query_tokens_in_another_order(self, monkeypatch):
        def spoilt(q, *args, **options):
            return sk.paged_decode_attention(q, *args, **options)[:, ::-1]

        assert self.outcome(monkeypatch, WINDOWS[1], spoilt) == "wrong"

    @pytest.mark.parametrize("cell", WINDOWS, ids=lambda cell: cell.name)
    def test_a_layer_takes_the_last_ones_output(self, cell):
        _, num_pages = bench.pools_of(cell, on_gpu=False)
        inputs = bench.Inputs(cell, num_pages=num_pages, pools=2, layers=2)
        assert inputs.q.shape == bench.query_shape(cell)
        plan = bench.plan_for(sk.load_policy("cpu", environ={}), cell)
        decode = bench.ours(plan, cell)
        last, first = jax.jit(bench.chain(decode, layers=3))(inputs.q, *inputs.args)
        assert inputs.error(first) < bench.TOLERANCE
        again = first
        for pools in (inputs.pools[1], inputs.pools[0]):
            again = jax.jit(decode)(again, *pools, inputs.block_tables, inputs.seq_lens)
        np.testing.assert_array_equal(last, again)

    @pytest.mark.parametrize("attend", [bench.dense_row, peers.gather_softmax], ids=["dense", "gather"])
    @pytest.mark.parametrize(("window", "q_len"), [(None, 1), (1, 1), (16, 1), (17, 3), (40, 2), (1000, 4)])
    def test_against_a_loop_over_tokens(self, attend, window, q_len):
        rng = np.random.default_rng(0)
        seq_lens = np.array([q_len, 16, 17, 50, 64, 79, 80])
        k, v = (rng.standard_normal((40, 16, 2, 8)).astype(np.float32) for _ in "kv")
        tables = rng.permutation(40)[: 7 * 5].reshape(7, 5)
        q = rng.standard_normal((7, q_len, 4, 8)).astype(np.float32)
        expected = np.zeros(q.shape)
        for row, token, head in np.ndindex(*q.shape[:3]):
            own = seq_lens[row] - q_len + token + 1
            tokens = slice(0 if window is None else max(own - window, 0), own)
            keys, values = (x[tables[row]].reshape(-1, 2, 8)[tokens, head // 2].astype(float) for x in (k, v))
            weights = np.exp(keys @ q[row, token, head] * 8**-0.5)
            expected[row, token, head] = weights @ values / weights.sum()
        k, v, tables, seq_lens = (
            jnp.asarray(x, x.dtype if x.dtype == "f" else "int32") for x in (k, v, tables, seq_lens)
        )
        q = jnp.asarray(q if q_len > 1 else q[:, 0])
        if attend is bench.dense_row:
            out = jnp.stack([attend(q[i], k, v, tables[i], seq_lens[i], window=window) for i in range(7)])
        else:
            out = attend(q, k, v, tables, seq_lens, window=window)
        assert out.shape == q.shape
        np.testing.assert_allclose(np.reshape(out, expected.shape), expected, atol=1e-5)


@pytest.mark.skipif(
    jax.__version_info__ < MOSAIC_JAX, reason=f"jax {jax.__version__} has no Mosaic GPU that serves this"
)
@pytest.mark.parametrize(
    "cell",
    [
        *(cell for cell in SUITES["mtp"] if cell.q_len == 8),
        *(cell for cell in SUITES["window"] if cell.span == "32k w4k"),
    ],
    ids=lambda cell: cell.name,
)
def test_our_steps_lower_for_a_gpu(cell):
    plan = bench.plan_for(sk.load_policy("h200", environ={}, ahead_of_time=True), cell)
    assert plan.backend == "mosaic"
    pool = jax.ShapeDtypeStruct(
        (cell.live_pages, cell.page_size, cell.heads.num_kv_heads, cell.heads.head_dim), jnp.bfloat16
    )
    traced = jax.jit(bench.chain(bench.ours(plan, cell), layers=2)).trace(
        jax.ShapeDtypeStruct(bench.query_shape(cell), jnp.bfloat16),
        [(pool, pool)] * 2,
        jax.ShapeDtypeStruct((cell.batch, cell.width), jnp.int32),
        jax.ShapeDtypeStruct((cell.batch,), jnp.int32),
    )
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_the_profiler_gets_what_it_takes_for_a_jitted_function():
    """And can call twice, although a step consumes what it is given."""
    step = jax.jit(lambda x, y: (x + y, x * 2), donate_argnums=0)
    fed: Any = bench._Fed(step, jnp.zeros(2))
    assert isinstance(fed, jax.stages.Wrapped)
    fed(jnp.ones(2))
    np.testing.assert_array_equal(fed(jnp.ones(2)), [2, 2])


QUANTISED_CELLS = tuple(
    dataclasses.replace(equal("tiny", 2, 300), kv_dtype=dtype)
    for dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
)


class TestQuantised:
    def test_a_run(self, monkeypatch):
        monkeypatch.setitem(SUITES, "fp8", QUANTISED_CELLS)
        done = run("--suite", "fp8", "--json", "-", "--peers", "gather")
        assert done.exit_code == 0, done.output
        facts = json.loads(done.stdout)
        ours, peer = of("splitk_jax", facts), of("gather", facts)
        assert [result["status"] for result in ours] == ["ok"] * 4
        assert [result["status"] for result in peer] == ["ok", *["unserved"] * 3]
        assert all(0 < result["error"] < bench.TOLERANCE for result in ours)
        wide, *others = facts["cells"]
        assert wide["faster"] is None
        for cell, result in zip(others, ours[1:], strict=True):
            assert cell["faster"] == pytest.approx(ours[0]["queued_us"] / result["queued_us"])
            assert 2 * cell["kv_bytes"] == wide["kv_bytes"]
            assert result["tb_per_s"] == pytest.approx(cell["kv_bytes"] / result["queued_us"] / 1e6)

    @pytest.mark.parametrize("name", ["k_scale", "v_scale"])
    def test_a_scale_that_is_off(self, monkeypatch, name):
        def spoilt(*args, **options):
            return sk.paged_decode_attention(*args, **options | {name: 1.02 * options[name]})

        monkeypatch.setitem(SUITES, "smoke", QUANTISED_CELLS[3:])
        monkeypatch.setattr(bench, "paged_decode_attention", spoilt)
        (result,) = of("splitk_jax", json.loads(run("--json", "-", "--peers", "none").stdout))
        assert result["status"] == "wrong"

    def test_the_table_and_the_summary(self, monkeypatch):
        monkeypatch.setitem(SUITES, "smoke", QUANTISED_CELLS)
        done = run("--peers", "none")
        assert done.exit_code == 0, done.output
        assert "bfloat16's at as many tokens over it" in done.stdout
        assert "int8 at as many tokens as bfloat16: geomean " in done.stdout


def test_invariance_compares_the_plan_with_pinned_counts(monkeypatch):
    monkeypatch.setitem(SUITES, "invariance", (equal("tiny", 2, 1 * K), equal("tiny", 1, 100)))
    done = run("--suite", "invariance", "--json", "-")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["peers"] == {}
    assert [list(cell["results"]) for cell in facts["cells"]] == [
        ["splitk_jax", "pinned 1", "pinned 2", "pinned 4"],
        ["splitk_jax", "pinned 1"],
    ]
    for cell in facts["cells"]:
        own, *pinned = (result["queued_us"] for result in cell["results"].values())
        assert cell["cost"] == pytest.approx(own / min(pinned) - 1)
    monkeypatch.setattr(bench, "CALLS", 1)
    done = run("--suite", "invariance", "--only", "tiny b1")
    assert "cost of one fixed tree over the best count of each cell: geomean" in done.stdout
    assert "worst" in done.stdout


def test_a_run_that_is_cut_says_what_it_left_out():
    done = run("--peers", "none", "--seconds", "1e-9", "--json", "-")
    assert done.exit_code == 0
    assert [cell["skipped"] for cell in json.loads(done.stdout)["cells"]] == ["the run's 1e-09 seconds were over"] * 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--suite", "all"],
            "--suite='all' is not known: accepted are decode, targets, invariance, window, mtp, fp8, smoke",
        ),
        (["--peers", "cudnn,fa4"], "--peers='cudnn,fa4': 'fa4' is not known: accepted are all, none, cudnn, fa3"),
        (["--peers", ""], "--peers='': '' is not known"),
        (["--repeats", "0"], "--repeats=0 is out of range"),
        (["--seconds", "0"], "--seconds=0.0 is out of range"),
        (["--page-size", "32"], "--only=None, --page-size=32 leave no cell of the suite smoke: tiny b2 1k p16"),
        (["--only", "llama"], "--only='llama', --page-size=None leave no cell"),
        (["--json", "/nowhere/x.json"], "--json='/nowhere/x.json': '/nowhere' is not a folder"),
        (["--plot", "x.pdf"], "--plot='x.pdf' must end in .png"),
        (["--target", "h300"], "target 'h300' is not known"),
    ],
    ids=lambda x: " ".join(x)[:30] if isinstance(x, list) else "",
)
def test_bad_options_are_refused_before_anything_runs(args, message):
    done = run(*args)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_plot_without_matplotlib_is_refused(monkeypatch):
    monkeypatch.setattr(bench, "installed", lambda module: module != "matplotlib")
    done = run("--plot", "x.png")
    assert done.exit_code == 2
    assert "--plot needs matplotlib, which is not installed: pip install 'splitk_jax[bench]'" in done.stderr


def test_a_fault_keeps_its_traceback(monkeypatch):
    def fail(self, cell):
        raise ValueError("a bug")

    monkeypatch.setattr(bench.Run, "_cell", fail)
    done = run("--only", ONE)
    assert isinstance(done.exception, RuntimeError)
    assert str(done.exception.__cause__) == "a bug"


def test_pinned_counts_are_those_that_make_other_trees():
    policy = sk.load_policy("h200", environ={}, ahead_of_time=True, min_kv_per_split=256)
    plan = bench.plan_for(policy, equal("llama3-8b", 4, 8 * K))
    assert plan.num_splits == 33
    for tokens, counts in ((200, [1]), (256, [1]), (257, [1, 2]), (1 * K, [1, 2, 4]), (8 * K, [1, 2, 4, 8, 16, 32])):
        assert bench.pinned_counts(plan, equal("llama3-8b", 4, tokens)) == counts
    assert bench.pinned_counts(plan, equal("llama3-8b", 1, 128 * K)) == list(bench.PINNED)


class TestPeers:
    def test_what_each_refuses(self):
        cell = next(cell for cell in SUITES["decode"] if cell.context == "128k+63")
        (cudnn,) = [p for p in peers.IN_PROCESS if p.name == "cudnn"]
        (gather,) = [p for p in peers.IN_PROCESS if p.name == "gather"]
        with pytest.raises(peers.Unserved, match=r"exactly batch \* table width = 524288 pages \(34.4 GB a layer\)"):
            cudnn.candidates(cell, cell.live_pages)
        with pytest.raises(peers.Unserved, match=r"would gather .* GB; the bound is 6 GB"):
            gather.candidates(cell, cell.live_pages)

    @pytest.mark.parametrize(
        ("cell", "what"),
        [(equal("tiny", 2, 1 * K, window=100), "a window"), (equal("tiny", 2, 1 * K, q_len=2), "several query tokens")],
        ids=["window", "q_len"],
    )
    @pytest.mark.parametrize(
        ("name", "why"), [("cudnn", "first token"), ("stock", "the whole context, with one query")]
    )
    def test_a_peer_without_windows_and_query_tokens_says_so(self, cell, what, name, why):
        (peer,) = [p for p in peers.IN_PROCESS if p.name == name]
        with pytest.raises(peers.Unserved, match=f"^{what}: .*{why}"):
            peer.candidates(cell, cell.live_pages)

    @pytest.mark.parametrize(
        ("cell", "window_size", "splits"),
        [
            (equal("llama3-8b", 1, 128 * K), (-1, -1), [4, 8, 16, 32]),
            (equal("llama3-8b", 1, 128 * K, window=1 * K), (1023, 0), [4, 8]),
            (equal("llama3-8b", 16, 8 * K, q_len=4), (-1, -1), [1, 2, 4, 8]),
        ],
        ids=lambda x: x.name if isinstance(x, Cell) else "",
    )
    def test_what_fa3_is_asked_for(self, monkeypatch, cell, window_size, splits):
        asked = []

        def flash_mha_with_kvcache(q, k_cache, v_cache, **options):
            asked.append((q.shape, options))
            return q

        stub = SimpleNamespace(flash_mha_with_kvcache=flash_mha_with_kvcache)
        monkeypatch.setitem(sys.modules, "flash_attn3_jax", stub)
        (fa3,) = [p for p in peers.IN_PROCESS if p.name == "fa3"]
        q = jnp.zeros(bench.query_shape(cell), jnp.bfloat16)
        for decode in fa3.candidates(cell, cell.live_pages).values():
            assert decode(q, None, None, None, None).shape == q.shape
        assert [options["num_splits"] for _, options in asked] == splits
        for shape, options in asked:
            assert shape == (cell.batch, cell.q_len, 32, 128)
            assert (options["window_size"], options["is_causal"]) == (window_size, True)

    def test_the_gather_copies_the_pages_of_the_window(self):
        (gather,) = [p for p in peers.IN_PROCESS if p.name == "gather"]
        cell = equal("llama3-8b", 16, 128 * K, window=4 * K)
        assert gather.candidates(cell, cell.live_pages).keys() == {""}
        with pytest.raises(peers.Unserved, match=r"would gather 8\.6 GB"):
            gather.candidates(dataclasses.replace(cell, window=None), cell.live_pages)

    def test_a_package_that_is_not_installed(self):
        (peer,) = [dataclasses.replace(p, module="no_such.module") for p in peers.IN_PROCESS if p.name == "fa3"]
        assert peer.missing("gpu") == "not installed: no module no_such.module"
        assert dataclasses.replace(peer, distributions=("no-such",)).version() is None


class TestFlashInfer:
    """The side of the conversation that runs here, with a program that stands for the other."""

    CELL = equal("tiny", 2, 1 * K)

    @pytest.fixture
    def start(self, monkeypatch, tmp_path):
        started = []

        def start(body, kernels=((128, False),)):
            program = tmp_path / "program.py"
            program.write_text("import json, sys, time\nfor line in sys.stdin:\n" + textwrap.indent(body, "    "))
            monkeypatch.setattr(peers, "FLASHINFER_PROGRAM", program)
            started.append(peers.FlashInfer(list(kernels)))
            started[0].start()
            return started[0]

        yield start
        for flashinfer in started:
            flashinfer.close()
            flashinfer.close()  # twice is once

    ask = staticmethod(functools.partial(peers.FlashInfer.ask, layers=4, pools=2, calls=20, repeats=5))

    def test_questions_and_answers(self, start):
        flashinfer = start(
            "request = json.loads(line)\nprint(json.dumps({'error': 0.0} | request), flush=True)",
            ((64, False), (128, True)),
        )
        assert flashinfer.ready(wait=True)
        assert self.ask(flashinfer, self.CELL) == {
            "error": 0.0,
            "num_q_heads": 8,
            "num_kv_heads": 2,
            "head_dim": 128,
            "page_size": 16,
            "seq_lens": [1024, 1024],
            "window": None,
            "q_len": 1,
            "layers": 4,
            "pools": 2,
            "calls": 20,
            "repeats": 5,
        }

    def test_a_window_and_query_tokens_are_asked_for(self, start):
        flashinfer = start("print(line.strip(), flush=True)")
        answer = self.ask(flashinfer, equal("tiny", 2, 1 * K, window=100, q_len=3))
        assert (answer["window"], answer["q_len"]) == (100, 3)

    def test_each_kernel_of_a_run_is_compiled_once(self, monkeypatch):
        monkeypatch.setitem(SUITES, "smoke", (*SUITES["window"], *SUITES["mtp"]))
        options = {"page_size": None, "only": None, "repeats": 1, "seconds": None, "json_path": None, "plot_path": None}
        options = bench.Options.parse(suite="smoke", peers="none", target="cpu", **options)
        started = bench.Run(options, say=print).flashinfer
        assert started._kernels == [(128, False), (128, True), (256, False)]

    @pytest.mark.parametrize(
        ("window", "q_len", "wrapper", "expected"),
        [
            (None, 1, "decode", {"window_left": -1}),
            (1024, 1, "decode", {"window_left": 1023}),
            (None, 4, "prefill", {"window_left": -1, "causal": True}),
        ],
    )
    def test_what_flashinfer_plans(self, monkeypatch, window, q_len, wrapper, expected):
        planned = []

        def stub(name):
            def make(work, layout, **options):
                assert (layout, options["backend"]) == ("NHD", "fa2")
                return SimpleNamespace(plan=lambda *args, **options: planned.append((name, args, options)))

            return make

        monkeypatch.setitem(
            sys.modules,
            "flashinfer",
            SimpleNamespace(
                BatchDecodeWithPagedKVCacheWrapper=stub("decode"), BatchPrefillWithPagedKVCacheWrapper=stub("prefill")
            ),
        )
        torch = SimpleNamespace(
            empty=lambda *args, **options: None, arange=np.arange, uint8="u1", int32="i4", bfloat16="bf16"
        )
        shape = {
            "num_q_heads": 8,
            "num_kv_heads": 2,
            "head_dim": 128,
            "page_size": 16,
            "window": window,
            "q_len": q_len,
        }
        pages = ([0, 2, 4], "indices", "last_page_len")
        flashinfer_peer.wrapper(torch, shape, *pages)
        ((name, args, options),) = planned
        assert name == wrapper
        assert args[-7:] == (*pages, 8, 2, 128, 16)
        assert [list(x) for x in args[:-7]] == ([] if q_len == 1 else [[0, q_len, 2 * q_len]])
        assert options == expected | {"q_data_type": "bf16", "kv_data_type": "bf16"}

    def test_it_is_not_ready_while_it_compiles(self, start):
        flashinfer = start("time.sleep(60)")
        assert not flashinfer.ready()

    def test_its_last_words_are_the_reason(self, start):
        flashinfer = start("if 'warm' not in line: sys.exit('out of memory')\nprint('{}', flush=True)")
        assert self.ask(flashinfer, self.CELL) == {"reason": "it ended: out of memory"}
        assert flashinfer.ready(wait=True)
        assert self.ask(flashinfer, self.CELL) == {"reason": "it ended: out of memory"}

    def test_no_answer_is_not_waited_for_for_ever(self, start, monkeypatch):
        monkeypatch.setattr(peers, "FLASHINFER_CELL_S", 0.2)
        flashinfer = start("if 'warm' not in line: time.sleep(60)\nprint('{}', flush=True)")
        assert self.ask(flashinfer, self.CELL) == {"reason": "no answer in 0 s"}
        assert flashinfer._process.returncode is not None

    def test_nor_is_a_compilation(self, start, monkeypatch):
        monkeypatch.setattr(peers, "FLASHINFER_WARM_S", 0.2)
        flashinfer = start("time.sleep(60)")
        assert flashinfer.ready(wait=True)
        assert self.ask(flashinfer, self.CELL) == {"reason": "its kernels did not compile in 0 s"}

    @pytest.mark.skipif(peers.installed("torch"), reason="torch is installed here")
    def test_the_program_answers_what_it_cannot_do(self):
        flashinfer = peers.FlashInfer([(128, False)])
        flashinfer.start()
        try:
            assert self.ask(flashinfer, self.CELL) == {"reason": "ModuleNotFoundError: No module named 'torch'"}
        finally:
            flashinfer.close()

    @pytest.mark.parametrize(
        ("answer", "status", "us"),
        [
            ({"reason": "group 6"}, "failed", None),
            ({"error": 0.5, "queued_us": 1.0, "kernel_us": 1.0}, "wrong", None),
            ({"error": float("nan"), "queued_us": 1.0, "kernel_us": 1.0}, "wrong", None),
            ({"error": 1e-3, "queued_us": 2.0, "kernel_us": None}, "ok", 2.0),
        ],
    )
    def test_answers_as_results(self, answer, status, us):
        result = bench.flashinfer_result(answer)
        assert (result.status, result.queued_us) == (status, us)


needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "force_gpu_interpret_mode"), reason="this JAX has no public interpreter of GPU kernels"
)


@needs_interpreter
class TestRunOnAGpu:
    """A run that takes this machine for a GPU: the floor under an interpreter, FlashInfer played by a program."""

    LAUNCH = read.Launch(ctas_per_sm=2, rows=64, slots=2)

    @pytest.fixture
    def start(self, monkeypatch, tmp_path):
        program = tmp_path / "program.py"
        answer = {"error": 1e-3, "queued_us": 100.0, "kernel_us": 90.0}
        program.write_text(f"import sys\nfor line in sys.stdin: print({json.dumps(json.dumps(answer))}, flush=True)")
        for name, value in {"CALLS": 1, "FEW_POOLS": 2, "LAYERS": 2}.items():
            monkeypatch.setattr(bench, name, value)
        monkeypatch.setattr(bench, "kernel_times", lambda way, inputs: {"split": 1.5, "combine": 0.5})
        monkeypatch.setattr(peers, "FLASHINFER_PROGRAM", program)
        monkeypatch.setattr(peers.FlashInfer, "missing", staticmethod(lambda platform: None))
        monkeypatch.setattr(read, "LAUNCHES", (self.LAUNCH,))

        def start():
            options = {"page_size": None, "only": None, "repeats": 1, "json_path": None, "plot_path": None}
            options = bench.Options.parse(
                suite="smoke", peers="flashinfer,gather", target="cpu", seconds=None, **options
            )
            said = []
            run = bench.Run(options, say=said.append)
            client = SimpleNamespace(platform_version="made up")
            run.device = SimpleNamespace(
                platform="gpu", device_kind="made up", memory_stats=lambda: {"bytes_limit": 10**8}, client=client
            )
            with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
                run.execute()
            return run, "\n".join(said)

        return start

    def test_every_figure(self, start):
        run, said = start()
        assert run.not_right() == []
        for cell in bench.document(run)["cells"]:
            floor = cell["floor"]
            assert (floor["launch"], floor["kernel_us"], floor["reason"]) == (str(self.LAUNCH), 2.0, None)
            assert cell["results"]["flashinfer"]["queued_us"] == 100
            ours = cell["results"]["splitk_jax"]
            assert ours["kernels"] == {"split": 1.5, "combine": 0.5}
            assert ours["kernel_us"] == 2
            assert ours["over_floor"] == ours["queued_us"] / floor["queued_us"]
        assert f"floor {bench_report.number(run.rows[0].floor.queued_us)} ({self.LAUNCH})" in said
        tables = bench_report.tables(run)
        assert "over the floor: geomean" in tables
        assert "100 " in tables

    def test_a_floor_that_reads_too_little_is_no_floor(self, start, monkeypatch):
        right = read.read
        monkeypatch.setattr(read, "read", lambda k, v, sums, *, size, **kw: right(k, v, sums, size=size // 2, **kw))
        run, _ = start()
        assert run.not_right() == []
        for cell in bench.document(run)["cells"]:
            assert cell["floor"]["queued_us"] is None
            assert cell["results"]["splitk_jax"]["over_floor"] is None
        assert "no floor: relative error inf, above 0.01 [every cell]" in bench_report.tables(run)

    def test_the_floor_of_a_window_reads_the_window(self, start, monkeypatch):
        cells = (equal("tiny", 2, 1 * K, window=128), equal("tiny", 2, 512, window=96, q_len=2))
        monkeypatch.setitem(SUITES, "smoke", cells)
        right, sizes = read.read, []

        def record(k, v, sums, *, size, **options):
            sizes.append(size)
            return right(k, v, sums, size=size, **options)

        monkeypatch.setattr(read, "read", record)
        run, _ = start()
        assert run.not_right() == []
        assert list(dict.fromkeys(sizes)) == [2 * 128 * 2 * 128, 2 * 97 * 2 * 128]
        assert all(row.floor.queued_us is not None for row in run.rows)


class TestRead:
    """The read floor's kernel."""

    def pool(self, num_pages, seed=0):
        return jax.random.normal(jax.random.key(seed), (num_pages, 16, 2, 64), jnp.bfloat16)

    @pytest.mark.parametrize("launch", read.LAUNCHES, ids=str)
    def test_it_lowers_for_a_gpu(self, launch):
        cell = equal("qwen3-d256", 1, 4864)
        pool = jax.ShapeDtypeStruct((cell.live_pages, 16, 4, 256), jnp.bfloat16)
        call = functools.partial(read.read, size=4864 * 4 * 256, launch=launch, ctas=132)
        traced = jax.jit(call).trace(pool, pool, jax.ShapeDtypeStruct((132,), jnp.float32))
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()

    def test_launches_fit_an_sm(self):
        for launch in read.LAUNCHES:
            assert launch.ctas_per_sm * (launch.slots * launch.rows * read.LANES * 2 + 2048) <= 227 * 1024

    @pytest.mark.parametrize(
        ("rows", "slots", "ctas", "size"),
        [
            pytest.param(8, 3, 3, 40 * 2048, id="whole"),
            pytest.param(8, 2, 2, 11 * 2048 + 256, id="part-of-a-pool"),
            pytest.param(64, 4, 5, 40 * 2048, id="chunk-beyond-the-pool"),
            pytest.param(8, 4, 1, 2048, id="fewer-chunks-than-slots"),
        ],
    )
    @pytest.mark.skipif(
        not hasattr(plgpu, "force_gpu_interpret_mode") and jax.default_backend() != "gpu",
        reason="this JAX has no public interpreter of GPU kernels",
    )
    def test_it_reads_every_chunk(self, rows, slots, ctas, size):
        launch = read.Launch(ctas_per_sm=1, rows=rows, slots=slots)
        k, v = self.pool(40), self.pool(40, seed=1)
        sums = jnp.arange(ctas, dtype=jnp.float32)
        on_gpu = jax.default_backend() == "gpu"
        with nullcontext() if on_gpu else plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            out = read.read(k, v, sums, size=size, launch=launch, ctas=ctas)
        expected = np.arange(ctas, dtype=np.float32)
        for i, (pool, chunk) in enumerate((x, c) for x in (k, v) for c in range(read.chunks(size, launch))):
            expected[i % ctas] += np.float32(pool.reshape(-1)[chunk * rows * read.LANES])
        np.testing.assert_allclose(out, expected, rtol=1e-6)
        from_zero = bench.read_sums(k, v, size=size, launch=launch, ctas=ctas)
        np.testing.assert_array_equal(out, np.asarray(sums) + from_zero)
