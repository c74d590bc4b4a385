"""The benchmark command: what it checks, shows and refuses. What it measures is not tested."""

import dataclasses
import functools
import json
import textwrap
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from jax.experimental.pallas import mosaic_gpu as plgpu

import splitk_jax as sk
from splitk_jax import bench, peers
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
        assert all(min(cell.seq_lens) >= 1 for cell in SUITES[suite])

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
        for cell in SUITES["decode"]:
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
            assert cell["kv_bytes"] == sum(cell["seq_lens"]) * MODELS["tiny"].token_bytes
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
        monkeypatch.setattr(bench, "paged_decode_attention", lambda *args, plan: spoil(right(*args, plan=plan)))
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
            lambda q, k, v, tables, lens, *, plan: right(q, k, v, tables, lens - 16, plan=plan),
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
        (["--suite", "all"], "--suite='all' is not known: accepted are decode, targets, invariance, smoke"),
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

        def start(body, head_dims=(128,)):
            program = tmp_path / "program.py"
            program.write_text("import json, sys, time\nfor line in sys.stdin:\n" + textwrap.indent(body, "    "))
            monkeypatch.setattr(peers, "FLASHINFER_PROGRAM", program)
            started.append(peers.FlashInfer(list(head_dims)))
            started[0].start()
            return started[0]

        yield start
        for flashinfer in started:
            flashinfer.close()
            flashinfer.close()  # twice is once

    ask = staticmethod(functools.partial(peers.FlashInfer.ask, layers=4, pools=2, calls=20, repeats=5))

    def test_questions_and_answers(self, start):
        flashinfer = start(
            "request = json.loads(line)\nprint(json.dumps({'error': 0.0} | request), flush=True)", (64, 128)
        )
        assert flashinfer.ready(wait=True)
        assert self.ask(flashinfer, self.CELL) == {
            "error": 0.0,
            "num_q_heads": 8,
            "num_kv_heads": 2,
            "head_dim": 128,
            "page_size": 16,
            "seq_lens": [1024, 1024],
            "layers": 4,
            "pools": 2,
            "calls": 20,
            "repeats": 5,
        }

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
        flashinfer = peers.FlashInfer([128])
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
        assert f"floor {bench.number(run.rows[0].floor.queued_us)} ({self.LAUNCH})" in said
        tables = bench.tables(run)
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
        assert "no floor: relative error inf, above 0.01 [every cell]" in bench.tables(run)


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
