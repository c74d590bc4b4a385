"""Target files and the environment: every key has a reader, and every wrong one is an error that names it."""

import dataclasses
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import tomli
import tomli_w

import splitk_jax as sk
from splitk_jax.target import (
    ENV_NAMES,
    HARDWARE_KEYS,
    KERNEL_KEYS,
    MAX_CONFIG_BYTES,
    POLICY_KEYS,
    TILE_KEYS,
    load_target,
    load_targets,
    read_environment,
    target_files,
    target_for_device,
)

NAMES = ["a100", "b200", "cpu", "gb10", "h100", "h100_pcie", "h200", "l40s", "mi300x", "rtx_4090", "rtx_pro_6000"]
SHAPE = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "max_decode_seqs": 64}


def document():
    """A whole target, every key stated."""
    return {
        "schema": 1,
        "hardware": {
            "name": "Test part",
            "device_kinds": ["Test GPU"],
            "arch": "sm_90",
            "sm_count": 132,
            "hbm_gb_per_s": 4800,
            "l2_mib": 50,
            "smem_per_cta_kib": 227,
        },
        "policy": {
            "splits": "auto",
            "split_size": 512,
            "target_waves": 2,
            "target_ctas": 132,
            "max_splits": 64,
            "min_kv_per_split": 256,
        },
        "kernel": {
            "backend": "mosaic",
            "tile": [
                {
                    "head_dim": 128,
                    "kv_dtype": "bfloat16",
                    "page_size": 16,
                    "heads_per_cta": 64,
                    "warpgroups": 2,
                    "block_kv": 64,
                    "step_kv": 128,
                    "stages": 3,
                }
            ],
        },
    }


@pytest.fixture
def write(tmp_path):
    def write_file(doc, name="part.toml"):
        path = tmp_path / name
        path.write_text(doc if isinstance(doc, str) else tomli_w.dumps(doc))
        return str(path)

    return write_file


class TestPackagedTargets:
    def test_all_are_there_and_load(self):
        assert [t.name for t in load_targets()] == NAMES

    @pytest.mark.parametrize("name", NAMES)
    def test_plans(self, name):
        policy = sk.load_policy(name, environ={})
        plan = policy.plan(**SHAPE)
        assert plan.num_splits >= 1
        assert plan.backend == ("mosaic" if plan.policy.target.arch == "sm_90" else "reference")

    @pytest.mark.parametrize(
        ("name", "arch", "sm_count"),
        [
            ("gb10", "sm_121", 48),
            ("rtx_pro_6000", "sm_120", 188),
            ("rtx_4090", "sm_89", 128),
            ("l40s", "sm_89", 142),
            ("a100", "sm_80", 108),
            ("h100", "sm_90", 132),
            ("h100_pcie", "sm_90", 114),
            ("h200", "sm_90", 132),
            ("b200", "sm_100", 148),
            ("mi300x", "gfx942", 304),
        ],
    )
    def test_hardware(self, name, arch, sm_count):
        target = sk.load_target(name)
        assert (target.arch, target.sm_count) == (arch, sm_count)

    def test_no_device_is_claimed_twice(self):
        kinds = [kind for target in load_targets() for kind in target.device_kinds]
        assert len(kinds) == len(set(kinds))

    def test_every_hardware_number_of_a_gpu_names_its_source(self):
        for name in NAMES:
            if name == "cpu":
                continue
            text = (resources.files("splitk_jax") / "configs" / f"{name}.toml").read_text()
            hardware = text[text.index("[hardware]") : text.index("[policy]")].splitlines()
            for i, line in enumerate(hardware):
                if line.split(" = ")[0] in ("sm_count", "hbm_gb_per_s", "l2_mib", "smem_per_cta_kib"):
                    assert "#" in line or hardware[i - 1].startswith("#"), f"{name}: {line}"

    def test_checkout_and_package_are_the_same_files(self):
        checkout = Path(__file__).parents[1] / "configs"
        assert sorted(p.stem for p in checkout.glob("*.toml")) == sorted(target_files())


class TestEveryKeyHasAReader:
    """Another value of a key must show in what the library decides or reports: a key that nobody reads fails here."""

    OTHER = {  # noqa: RUF012
        "hardware.name": "Other part",
        "hardware.device_kinds": ["Other GPU"],
        "hardware.arch": "sm_80",
        "hardware.sm_count": 66,
        "hardware.hbm_gb_per_s": 100,
        "hardware.l2_mib": 7,
        "hardware.smem_per_cta_kib": 99,
        "policy.splits": 5,
        "policy.split_size": 1024,
        "policy.target_waves": 1,
        "policy.target_ctas": 500,
        "policy.max_splits": 3,
        "policy.min_kv_per_split": 512,
        "kernel.backend": "reference",
        "tile.head_dim": 64,
        "tile.kv_dtype": "float16",
        "tile.heads_per_cta": 1,
        "tile.block_kv": 128,
        "tile.step_kv": 64,
        "tile.page_size": 64,
        "tile.warpgroups": 1,
        "tile.stages": 2,
    }

    def test_the_walk_covers_the_schema(self):
        sections = {"hardware": HARDWARE_KEYS, "policy": POLICY_KEYS, "kernel": KERNEL_KEYS, "tile": TILE_KEYS}
        assert set(self.OTHER) == {f"{section}.{key}" for section, keys in sections.items() for key in keys}

    def observe(self, path, splits):
        """What a policy of this file decides, without the file's own values printed back."""
        policy = sk.load_policy(path, environ={}, **({"splits": splits} if splits else {}))
        seen = {"device": [k for k in ("Test GPU", "Other GPU") if k in policy.target.device_kinds]}
        try:
            plan = policy.plan(**SHAPE, num_seqs=4, max_seq_len=8192)
        except (NotImplementedError, ValueError) as e:
            return seen | {"refused": str(e)}
        facts = plan.report()
        return seen | {key: facts[key] for key in facts if key not in ("settings", "rule", "formula")}

    @pytest.mark.parametrize("key", OTHER)
    def test_read(self, key, write):
        section, _, name = key.partition(".")
        changed = document()
        table = changed["kernel"]["tile"][0] if section == "tile" else changed[section]
        assert table[name] != self.OTHER[key]
        table[name] = self.OTHER[key]
        rule = {"policy.split_size": "fixed_size", "policy.target_ctas": "adaptive"}.get(key)
        # Under one name: the file's own name must not be what differs.
        assert self.observe(write(document()), rule) != self.observe(write(changed), rule)


class TestWrongFiles:
    @pytest.mark.parametrize(
        ("section", "key", "value", "match"),
        [
            ("policy", "splitz", "auto", r"\[policy\] splitz='auto' is not known: accepted are splits, split_size"),
            ("hardware", "sms", 1, r"\[hardware\] sms=1 is not known: accepted are name"),
            ("kernel", "stages", 4, r"\[kernel\] stages=4 is not known: accepted are backend, tile"),
            (
                "policy",
                "target_waves",
                True,
                r"\[policy\] target_waves=True is not valid: .* whole number from 1 to 64",
            ),
            ("policy", "target_waves", 2.0, r"target_waves=2.0 is not valid"),
            ("policy", "max_splits", "64", r"max_splits='64' is not valid"),
            ("policy", "max_splits", 0, r"max_splits=0 is not valid: accepted is a whole number from 1 to 4096"),
            (
                "policy",
                "splits",
                "sometimes",
                r"\[policy\] splits='sometimes' is not valid: accepted is auto, balanced",
            ),
            ("policy", "splits", True, r"splits=True is not valid"),
            (
                "policy",
                "min_kv_per_split",
                100,
                r"min_kv_per_split=100 \(.*part.toml \[policy\] min_kv_per_split\) is not valid: .*block_kv=64",
            ),
            ("hardware", "sm_count", -1, r"\[hardware\] sm_count=-1 is not valid"),
            ("hardware", "arch", "hopper", r"arch='hopper' is not valid: accepted is sm_NN, gfxNNN or cpu"),
            ("hardware", "device_kinds", "NVIDIA H200", r"device_kinds=.*list of device_kind strings"),
            ("hardware", "name", "", r"name='' is not valid"),
            ("hardware", "name", "\x1b[31mred", r"name=.* is not valid"),
            ("kernel", "backend", "cuda", r"\[kernel\] backend='cuda' is not valid: accepted is mosaic, reference"),
            ("kernel", "tile", 3, r"\[kernel\] tile=3 is not valid: accepted are \[\[kernel.tile\]\] rows"),
        ],
        ids=lambda x: str(x)[:24],
    )
    def test_key(self, section, key, value, match, write):
        changed = document()
        changed[section][key] = value
        path = write(changed)
        with pytest.raises(sk.ConfigError, match=match) as e:
            sk.load_policy(path, environ={})
        assert path in str(e.value)

    @pytest.mark.parametrize(
        ("key", "value", "match"),
        [
            ("pages", 4, r"row 1: pages=4 is not known: accepted are head_dim, kv_dtype"),
            ("stages", 0, r"row 1: stages=0 is not valid: accepted is a whole number from 1 to 32"),
            ("stages", "3", r"row 1: stages='3' is not valid"),
            ("block_kv", 0, r"row 1: block_kv=0 is not valid"),
            ("kv_dtype", "fp8", r"row 1: kv_dtype='fp8' is not valid: accepted is float32, bfloat16, float16"),
            ("step_kv", 100, r"row 1: tile.step_kv=100: accepted is a multiple of block_kv=64"),
        ],
    )
    def test_tile(self, key, value, match, write):
        changed = document()
        changed["kernel"]["tile"][0][key] = value
        with pytest.raises(sk.ConfigError, match=match):
            sk.load_policy(write(changed), environ={})

    @pytest.mark.parametrize("key", ["hardware.sm_count", "policy.splits", "kernel.backend", "hardware.name"])
    def test_missing_key(self, key, write):
        changed = document()
        section, _, name = key.partition(".")
        del changed[section][name]
        with pytest.raises(sk.ConfigError, match=rf"\[{section}\] {name} is missing: state it, or name .* as base"):
            sk.load_policy(write(changed), environ={})

    def test_missing_tile(self, write):
        changed = document()
        del changed["kernel"]["tile"]
        with pytest.raises(sk.ConfigError, match=r"\[\[kernel.tile\]\] is missing"):
            sk.load_policy(write(changed), environ={})
        changed = document()
        del changed["kernel"]["tile"][0]["block_kv"]
        with pytest.raises(sk.ConfigError, match="row 1: block_kv is missing"):
            sk.load_policy(write(changed), environ={})

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("schema = 1\nschema = 1\n", "not valid TOML"),
            ("schema = 1\n[policy]\nsplits = 1\nsplits = 2\n", "not valid TOML"),
            ("schema = \n", "not valid TOML"),
            ("schema = 2\n", "schema=2 is not valid: accepted is 1"),
            ("schema = true\n", "schema=True is not valid"),
            ("", "schema=None is not valid"),
            ("schema = 1\npolicy = 3\n", r"policy=3 is not valid: accepted is a table \[policy\]"),
            ("schema = 1\n[polices]\n", "polices={} is not known: accepted are schema, base, hardware, policy, kernel"),
            ("schema = 1\nx = " + "[" * 2000 + "]" * 2000, "not valid TOML"),
            ("schema = 1\nx = " + "9" * 5000, "not valid TOML|is not known"),
            ("schema = 1\n# " + "x" * MAX_CONFIG_BYTES, "larger than 65536 bytes"),
            ("schema = 1\n[hardware]\nhbm_gb_per_s = nan\n", "hbm_gb_per_s=nan is not valid"),
            ("schema = 1\n[hardware]\nhbm_gb_per_s = inf\n", "hbm_gb_per_s=inf is not valid"),
        ],
        ids=lambda x: x[:28].replace("\n", " "),
    )
    def test_text(self, text, match, write):
        path = write(text)
        with pytest.raises(sk.ConfigError, match=match) as e:
            sk.load_policy(path, environ={})
        assert path in str(e.value)

    def test_not_utf8(self, tmp_path):
        path = tmp_path / "part.toml"
        path.write_bytes(b"schema = 1 # \xff\n")
        with pytest.raises(sk.ConfigError, match="not valid TOML"):
            sk.load_policy(str(path), environ={})

    def test_what_is_no_file_neither_hangs_nor_escapes(self, tmp_path):
        os.mkfifo(tmp_path / "pipe.toml")
        (tmp_path / "folder.toml").mkdir()
        (tmp_path / "nowhere.toml").symlink_to(tmp_path / "gone")
        for name in ("pipe", "folder", "nowhere"):
            for asked, folder in ((name, str(tmp_path)), (str(tmp_path / f"{name}.toml"), None)):
                with pytest.raises(sk.ConfigError, match=f"{name}.toml' does not exist or is not a regular file"):
                    load_target(asked, config_dir=folder)

    def test_overlong_names(self):
        with pytest.raises(sk.ConfigError, match=r"cannot be read: File name too long|does not exist"):
            load_target("x" * 5000 + ".toml")
        with pytest.raises(sk.ConfigError, match="is not a folder"):
            load_target("h200", config_dir="x" * 5000)

    def test_a_byte_order_mark_is_no_key(self, tmp_path):
        path = tmp_path / "part.toml"
        path.write_bytes(b"\xef\xbb\xbf" + tomli_w.dumps(document()).encode())
        assert load_target(str(path)).hardware_name == "Test part"

    @pytest.mark.parametrize("name", ["/nowhere/part.toml", "part.toml", "configs/"])
    def test_no_such_file_is_not_the_default(self, name):
        with pytest.raises(sk.ConfigError, match="does not exist or is not a regular file"):
            sk.load_policy(name, environ={})

    @pytest.mark.parametrize("name", ["h300", "H200", "", "README"])
    def test_no_such_name(self, name):
        with pytest.raises(sk.ConfigError, match=r"is not known: accepted are a100, b200.*path that ends in .toml"):
            sk.load_policy(name, environ={})

    def test_a_target_is_named_by_a_string(self, tmp_path):
        with pytest.raises(TypeError, match="target="):
            sk.load_policy(tmp_path, environ={})


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("sm_count", 0, "sm_count=0 is not valid: accepted is a whole number from 1 to 4096"),
        ("arch", "hopper", "arch='hopper' is not valid"),
        ("settings", (("splits", True),), "splits=True is not valid"),
        ("tiles", (), r"tiles=\(\) is not valid"),
    ],
)
def test_a_target_is_checked_however_it_is_made(field, value, match):
    with pytest.raises(sk.ConfigError, match=match):
        dataclasses.replace(sk.load_target("h200"), **{field: value})


class TestUserTargets:
    def test_by_path(self, write):
        assert sk.load_policy(write(document()), environ={}).target.hardware_name == "Test part"

    def test_by_folder_and_name(self, write, tmp_path):
        write(document(), "mine.toml")
        env = {"SPLITK_JAX_CONFIG_DIR": str(tmp_path)}
        assert sk.load_policy("mine", environ=env).target.source == str(tmp_path / "mine.toml")
        assert sk.load_policy(environ=env | {"SPLITK_JAX_TARGET": "mine"}).target.name == "mine"

    def test_a_file_of_the_same_name_replaces_the_packaged_one(self, write, tmp_path):
        write(document(), "h200.toml")
        policy = sk.load_policy("h200", environ={"SPLITK_JAX_CONFIG_DIR": str(tmp_path)})
        assert policy.target.hardware_name == "Test part"

    def test_base_states_only_what_differs(self, write):
        path = write("schema = 1\nbase = 'h200'\n[policy]\nsplits = 11\n")
        policy = sk.load_policy(path, environ={})
        origins = dict(policy.origins)
        assert (policy.splits, policy.sm_count, policy.split_size) == (11, 132, 512)
        assert origins["splits"] == f"{path} [policy] splits"
        assert origins["split_size"] == f"configs/h200.toml [policy] split_size (base of {path})"

    @pytest.mark.parametrize("base", ["'h300'", "3", "'README'", "'/etc/passwd'"])
    def test_base_is_a_packaged_target(self, base, write):
        with pytest.raises(sk.ConfigError, match=r"base=.*is not valid: accepted are a100, b200"):
            sk.load_policy(write(f"schema = 1\nbase = {base}\n"), environ={})

    def test_a_users_device_goes_before_the_packaged_one(self, write, tmp_path):
        write("schema = 1\nbase = 'h200'\n[policy]\nsplits = 11\n", "tuned.toml")
        assert target_for_device("NVIDIA H200", config_dir=str(tmp_path)).name == "tuned"
        write("schema = 1\nbase = 'h200'\n", "again.toml")
        with pytest.raises(sk.ConfigError, match=r"'NVIDIA H200' is claimed by .*again.toml, .*tuned.toml"):
            target_for_device("NVIDIA H200", config_dir=str(tmp_path))

    def test_folder_must_exist(self):
        with pytest.raises(sk.ConfigError, match="SPLITK_JAX_CONFIG_DIR='/nowhere' is not a folder"):
            sk.load_policy("h200", environ={"SPLITK_JAX_CONFIG_DIR": "/nowhere"})


class TestEnvironment:
    @pytest.mark.parametrize(
        ("variable", "text", "field", "value"),
        [
            ("SPLITK_JAX_SPLITS", "11", "splits", 11),
            ("SPLITK_JAX_SPLITS", "no", "splits", 1),
            ("SPLITK_JAX_SPLITS", "auto", "splits", "auto"),
            ("SPLITK_JAX_SPLIT_SIZE", "1024", "split_size", 1024),
            ("SPLITK_JAX_TARGET_WAVES", "3", "target_waves", 3),
            ("SPLITK_JAX_MAX_SPLITS", "8", "max_splits", 8),
            ("SPLITK_JAX_MIN_KV_PER_SPLIT", "512", "min_kv_per_split", 512),
            ("SPLITK_JAX_TARGET_CTAS", "264", "target_ctas", 264),
            ("SPLITK_JAX_KERNEL", "reference", "backend", "reference"),
            ("ATLAS_ATTN_DECODE_SPLITK", "legacy", "splits", "legacy"),
            ("ATLAS_ATTN_DECODE_SPLITK", "balanced", "splits", "balanced"),
        ],
    )
    def test_override(self, variable, text, field, value):
        policy = sk.load_policy("h200", environ={variable: text})
        assert getattr(policy, field) == value
        assert dict(policy.origins)[field] == f"environment variable {variable}"

    @pytest.mark.parametrize(
        "variable", [n for n in ENV_NAMES if n not in ("SPLITK_JAX_TARGET", "SPLITK_JAX_CONFIG_DIR")]
    )
    @pytest.mark.parametrize("text", ["", " 8 ", "8.0", "0x8", "abc", "-1", "True", "1_0", "²"])
    def test_loose_values_are_refused(self, variable, text):
        with pytest.raises(sk.ConfigError, match=rf"environment variable {variable}=.* is not valid: accepted is"):
            sk.load_policy("h200", environ={variable: text})

    @pytest.mark.parametrize("variable", ["SPLITK_JAX_TARGET", "SPLITK_JAX_CONFIG_DIR"])
    def test_empty_is_not_unset(self, variable):
        with pytest.raises(sk.ConfigError, match=f"{variable}='' is empty"):
            sk.load_policy("h200", environ={variable: ""})

    def test_unknown_name_with_our_prefix(self):
        with pytest.raises(sk.ConfigError, match=r"SPLITK_JAX_SPLIT is not known: accepted are SPLITK_JAX_TARGET"):
            sk.load_policy("h200", environ={"SPLITK_JAX_SPLIT": "8"})

    def test_alias_gives_way(self):
        both = {"SPLITK_JAX_SPLITS": "3", "ATLAS_ATTN_DECODE_SPLITK": "nonsense"}
        assert sk.load_policy("h200", environ=both).splits == 3

    def test_precedence(self, write):
        path = write("schema = 1\nbase = 'h200'\n[policy]\nsplits = 5\n")
        env = {"SPLITK_JAX_SPLITS": "7"}
        assert sk.load_policy("h200", environ={}).splits == "balanced"
        assert sk.load_policy(path, environ={}).splits == 5
        assert sk.load_policy(path, environ=env).splits == 7
        policy = sk.load_policy(path, environ=env, splits=9)
        assert policy.splits == 9
        assert dict(policy.origins)["splits"] == "argument splits"

    @pytest.mark.parametrize(("key", "value"), [("splitz", 3), ("sm_count", 3), ("splits", True), ("max_splits", 0)])
    def test_wrong_argument(self, key, value):
        with pytest.raises(sk.ConfigError, match=f"{key}"):
            sk.load_policy("h200", environ={}, **{key: value})

    def test_read_when_resolved_and_never_written(self, monkeypatch):
        monkeypatch.setenv("SPLITK_JAX_SPLITS", "6")
        before = dict(os.environ)
        assert sk.policy_from_env() == 6
        assert sk.load_policy("h200").splits == 6
        monkeypatch.delenv("SPLITK_JAX_SPLITS")
        assert sk.policy_from_env() is None
        assert sk.load_policy("h200").splits == "balanced"
        assert dict(os.environ) == {k: v for k, v in before.items() if k != "SPLITK_JAX_SPLITS"}

    def test_resolve_policy_lays_layers_over_a_target(self):
        target = sk.load_target("h200")
        policy = sk.resolve_policy(target, environ={"SPLITK_JAX_SPLITS": "legacy"}, max_splits=4)
        assert (policy.splits, policy.max_splits, policy.split_size) == ("legacy", 4, 512)

    def test_defaults_are_the_documented_constants(self, write):
        changed = document()
        changed["policy"] = {"splits": "auto"}
        policy = sk.load_policy(write(changed), environ={})
        assert (policy.max_splits, policy.target_waves) == (sk.MAX_DECODE_SPLITS, sk.SPLITK_TARGET_WAVES)
        assert dict(policy.origins)["max_splits"] == "default MAX_DECODE_SPLITS"

    def test_environment_is_read_once_as_a_value(self):
        environment = read_environment({"SPLITK_JAX_TARGET": "h200", "SPLITK_JAX_SPLITS": "2", "HOME": "/"})
        assert environment.target == "h200"
        assert environment.overrides == {"splits": (2, "SPLITK_JAX_SPLITS")}


def fresh_process(code):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SPLITK_JAX_", "ATLAS_"))}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


SHAPE_FLAGS = "--q-heads 8 --kv-heads 8 --head-dim 64 --page-size 16 --max-decode-seqs 4"


@pytest.mark.parametrize(
    "code",
    [
        "import splitk_jax",
        f"import splitk_jax; splitk_jax.load_policy('h200').plan(**{SHAPE}).explain()",
        "from splitk_jax.cli import main; main(['targets'], standalone_mode=False)",
        "from splitk_jax.cli import main; main(['show', 'gb10'], standalone_mode=False)",
        f"from splitk_jax.cli import main; main('explain --target h200 {SHAPE_FLAGS}'.split(), standalone_mode=False)",
    ],
    ids=["import", "plan", "targets", "show", "explain"],
)
def test_d08_no_backend_is_started(code):
    """A started backend would ignore XLA_FLAGS set later and break multi-process start-up."""
    check = "import sys; sys.exit(17 if xla_bridge.backends_are_initialized() else 0)"
    done = fresh_process(f"{code}\nfrom jax._src import xla_bridge\n{check}")
    assert done.returncode == 0, done.stderr


def test_policy_and_plan_need_no_jax():
    """Decisions are made where no JAX is: the modules left of the kernels do not import it."""
    done = fresh_process(
        "import sys; sys.modules['jax'] = None\n"
        "import importlib.util, types\n"
        "spec = importlib.util.find_spec('splitk_jax')\n"
        "package = types.ModuleType('splitk_jax'); package.__path__ = spec.submodule_search_locations\n"
        "package.__spec__ = spec; sys.modules['splitk_jax'] = package\n"
        "import splitk_jax.plan\n"
    )
    assert done.returncode == 0, done.stderr


def test_tomls_are_toml_for_everyone():
    for entry in target_files().values():
        tomli.loads(entry.read_text())
