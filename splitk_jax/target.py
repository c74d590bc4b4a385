"""Targets: what a GPU model is and what it asks of the split policy, read from TOML and the environment.

The only module that opens config files or reads `os.environ`. It checks types and ranges key by key and decides
nothing; the rules are in `policy.py`.
"""

import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import tomli

SCHEMA = 1
MAX_CONFIG_BYTES = 64 * 1024

BACKENDS = ("mosaic", "reference")
RULES = ("auto", "balanced", "legacy", "adaptive", "fixed_size")
OFF_WORDS = ("off", "0", "false", "no")
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
QUANTISED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
KV_DTYPES = (*FLOAT_DTYPES, *QUANTISED_DTYPES)
INT_MAX = 2**31 - 1

ENV_PREFIX = "SPLITK_JAX_"
SPLITS_ALIAS = "ATLAS_ATTN_DECODE_SPLITK"


class ConfigError(ValueError):
    """A target file, an environment variable or an override that cannot be taken at its word."""


def parse_splits(text: str) -> str | int:
    """Reads a split rule as it is written in the environment.

    Args:
      text: `auto`, `balanced`, `legacy`, `adaptive`, `fixed_size`, a whole number without sign or leading zeros, or
        one of `off`, `0`, `false`, `no`.

    Returns:
      The rule's name, or the pinned split count; the four words for off give 1.

    Raises:
      ConfigError: any other text.
    """
    if not isinstance(text, str):
        raise TypeError(f"text={text!r} must be a string, got {type(text).__name__}")
    return _checked("splits", Key(_splits), text)


def whole_number(name: str, value: Any, low: int = 1, high: int = INT_MAX) -> int:
    """Checks a count that a caller gave: an int or a numpy integer, never a bool or a float.

    Raises:
      TypeError: not a whole number. ValueError: outside [low, high].
    """
    try:
        # An array of one number and a tracer have an index method, that raises.
        if isinstance(value, bool) or getattr(value, "ndim", 0):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be a static whole number, got {type(value).__name__}") from None
    if not low <= number <= high:
        raise ValueError(f"{name}={value!r} is out of range: accepted is a whole number from {low} to {high}")
    return number


class _Rejected(Exception):  # noqa: N818 - never leaves this module: `_checked` adds where the value stood
    """Raised by a key's check; says what is accepted."""


def _splits(value: Any) -> str | int:
    """A split rule: its text form, or (TOML, keyword argument) a whole number as itself."""
    if type(value) is str:
        if value in RULES:
            return value
        if value in OFF_WORDS:
            return 1
        if re.fullmatch(r"[1-9][0-9]{0,9}", value):
            value = int(value)
    if type(value) is int and 0 <= value <= INT_MAX:
        return max(value, 1)
    raise _Rejected(f"{', '.join(RULES)}, off, false, no, or a whole number from 0 to {INT_MAX}")


@dataclass(frozen=True, slots=True)
class Whole:
    """Accepts a whole number in [low, high]; `true` is not 1 and 8.0 is not 8."""

    low: int
    high: int

    def __call__(self, value: Any) -> int:
        if type(value) is int and self.low <= value <= self.high:
            return value
        raise _Rejected(f"a whole number from {self.low} to {self.high}")


@dataclass(frozen=True, slots=True)
class Number:
    """Accepts a whole or decimal number in [low, high]; NaN is in no range."""

    low: float
    high: float

    def __call__(self, value: Any) -> float:
        if type(value) in (int, float) and self.low <= value <= self.high:
            return value
        raise _Rejected(f"a number from {self.low:g} to {self.high:g}")


@dataclass(frozen=True, slots=True)
class Choice:
    """Accepts one of a few words."""

    words: tuple[str, ...]

    def __call__(self, value: Any) -> str:
        if type(value) is str and value in self.words:
            return value
        raise _Rejected(", ".join(self.words))


@dataclass(frozen=True, slots=True)
class Text:
    """Accepts a short string that matches a pattern."""

    pattern: str
    wanted: str

    def __call__(self, value: Any) -> str:
        if type(value) is str and len(value) <= 128 and value.isprintable() and re.fullmatch(self.pattern, value):
            return value
        raise _Rejected(self.wanted)


def _texts(value: Any) -> tuple[str, ...]:
    if type(value) is list and all(type(v) is str and 0 < len(v) <= 128 for v in value):
        return tuple(value)
    raise _Rejected("a list of device_kind strings")


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a target file: how its value is checked, and whether a file without a base may leave it out."""

    check: Callable[[Any], Any]
    required: bool = False


HARDWARE_KEYS = {
    "name": Key(Text(r"\S.*", "the part's name"), required=True),
    "device_kinds": Key(_texts, required=True),
    "arch": Key(Text(r"sm_[0-9]{2,3}|gfx[0-9a-f]{3,4}|cpu", "sm_NN, gfxNNN or cpu"), required=True),
    "sm_count": Key(Whole(1, 4096), required=True),
    "hbm_gb_per_s": Key(Number(1, 100_000)),
    "l2_mib": Key(Number(1, 4096)),
    "smem_per_cta_kib": Key(Whole(1, 1024)),
}
POLICY_KEYS = {
    "splits": Key(_splits, required=True),
    "split_size": Key(Whole(1, 1 << 20)),
    "target_waves": Key(Whole(1, 64)),
    "target_ctas": Key(Whole(1, 1 << 20)),
    "max_splits": Key(Whole(1, 4096)),
    "min_kv_per_split": Key(Whole(1, 1 << 20)),
}
KERNEL_KEYS = {"backend": Key(Choice(BACKENDS), required=True)}
TILE_KEYS = {
    "head_dim": Key(Whole(1, 4096)),
    "kv_dtype": Key(Choice(KV_DTYPES)),
    "page_size": Key(Whole(1, 1 << 20)),
    "heads_per_cta": Key(Whole(1, 256), required=True),
    "warpgroups": Key(Whole(1, 2)),
    "block_kv": Key(Whole(1, 4096), required=True),
    "step_kv": Key(Whole(1, 16384), required=True),
    "stages": Key(Whole(1, 32)),
}
SECTIONS = {"hardware": HARDWARE_KEYS, "policy": POLICY_KEYS, "kernel": KERNEL_KEYS}
# What a keyword argument of `load_policy` or a variable of the environment may replace.
OVERRIDES = POLICY_KEYS | KERNEL_KEYS
ENV_OVERRIDES = {
    "SPLITK_JAX_SPLITS": "splits",
    "SPLITK_JAX_SPLIT_SIZE": "split_size",
    "SPLITK_JAX_TARGET_WAVES": "target_waves",
    "SPLITK_JAX_TARGET_CTAS": "target_ctas",
    "SPLITK_JAX_MAX_SPLITS": "max_splits",
    "SPLITK_JAX_MIN_KV_PER_SPLIT": "min_kv_per_split",
    "SPLITK_JAX_KERNEL": "backend",
}
ENV_TARGET = "SPLITK_JAX_TARGET"
ENV_CONFIG_DIR = "SPLITK_JAX_CONFIG_DIR"
ENV_LOG = "SPLITK_JAX_LOG"
ENV_NAMES = (ENV_TARGET, ENV_CONFIG_DIR, ENV_LOG, *ENV_OVERRIDES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One `[[kernel.tile]]` row: the model-static conditions it holds under, and the tile it gives.

    Attributes:
      head_dim: the query head dim it is for; None for any.
      kv_dtype: the K/V dtype it is for; None for any.
      page_size: tokens; the page size it is for; None for any.
      heads_per_cta: query heads of one KV head that one CTA packs.
      warpgroups: warpgroups of a CTA of the mosaic backend that compute, at most; each takes a KV head of its own, or a
        part of the query heads of one.
      block_kv: tokens; the granularity of split edges.
      step_kv: tokens that are loaded and multiplied at once, of all KV heads of a CTA together; a multiple of
        `block_kv`.
      stages: steps whose loads a CTA of the mosaic backend has in flight, at most; None where it is not used.
    """

    head_dim: int | None = None
    kv_dtype: str | None = None
    page_size: int | None = None
    heads_per_cta: int
    warpgroups: int = 1
    block_kv: int
    step_kv: int
    stages: int | None = None

    def __post_init__(self) -> None:
        for key, spec in TILE_KEYS.items():
            value = getattr(self, key)
            if value is not None or spec.required:
                _checked(f"tile.{key}", spec, value)
        if self.step_kv % self.block_kv:
            raise ConfigError(f"tile.step_kv={self.step_kv}: accepted is a multiple of block_kv={self.block_kv}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A GPU model: the facts of its hardware, and the policy and kernel settings that its file declares.

    Attributes:
      name: the file's stem.
      source: the file as a person would name it.
      packaged: whether the file came with the package.
      hardware_name, device_kinds, arch, sm_count, hbm_gb_per_s (GB/s), l2_mib (MiB), smem_per_cta_kib (KiB): the
        `[hardware]` table; the last three are None where the part has no such number.
      settings: (key, value) of `[policy]` and of `kernel.backend`, only the keys that are stated.
      tiles: the `[[kernel.tile]]` rows in order.
      origins: (key, file and key) for each setting; takes no part in equality.
      whole_sm_count: SMs of the whole part, where the file declares a slice of it: a base's `name` with fewer SMs; else
        None.
    """

    name: str
    source: str
    packaged: bool
    hardware_name: str
    device_kinds: tuple[str, ...]
    arch: str
    sm_count: int
    hbm_gb_per_s: float | None
    l2_mib: float | None
    smem_per_cta_kib: int | None
    settings: tuple[tuple[str, Any], ...]
    tiles: tuple[Tile, ...]
    origins: tuple[tuple[str, str], ...] = field(compare=False, repr=False)
    whole_sm_count: int | None = None

    def __post_init__(self) -> None:
        for key, spec in HARDWARE_KEYS.items():
            value = self.hardware_name if key == "name" else getattr(self, key)
            if value is not None or spec.required:
                _checked(key, spec, list(value) if type(value) is tuple else value)
        for key, value in self.settings:
            check_override(key, value)
        if not self.tiles or not all(isinstance(tile, Tile) for tile in self.tiles):
            raise ConfigError(f"tiles={self.tiles!r} is not valid: accepted is a tuple of at least one Tile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The `SPLITK_JAX_*` variables, read once and checked.

    Attributes:
      target: a target's name or a path; None when unset.
      config_dir: a folder of user targets; None when unset.
      log_plans: whether a plan is logged when it is first traced.
      overrides: key -> (value, variable), for the variables that are set.
    """

    target: str | None
    config_dir: str | None
    log_plans: bool
    overrides: Mapping[str, tuple[Any, str]]


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Reads every variable of ours.

    Args:
      environ: the variables; `os.environ` when None.

    Raises:
      ConfigError: a value that does not parse, or a name with our prefix that nothing reads.
    """
    environ = os.environ if environ is None else environ
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in ENV_NAMES:
            raise ConfigError(f"environment variable {name} is not known: accepted are {', '.join(ENV_NAMES)}")
    overrides = {}
    for variable, key in ENV_OVERRIDES.items():
        source = variable
        if key == "splits" and variable not in environ:
            source = SPLITS_ALIAS
        if source in environ:
            overrides[key] = (override_from_text(f"environment variable {source}", key, environ[source]), source)
    for name in (ENV_TARGET, ENV_CONFIG_DIR):
        if name in environ and not environ[name].strip():
            raise ConfigError(f"environment variable {name}={environ[name]!r} is empty: set it or unset it")
    log = environ.get(ENV_LOG)
    if log not in (None, "plan"):
        raise ConfigError(f"environment variable {ENV_LOG}={log!r} is not valid: accepted is plan; or unset it")
    return Environment(
        target=environ.get(ENV_TARGET),
        config_dir=environ.get(ENV_CONFIG_DIR),
        log_plans=log is not None,
        overrides=overrides,
    )


def override_from_text(label: str, key: str, text: str) -> Any:
    """Reads one override as a variable or a command line writes it.

    Raises:
      ConfigError: a text that is not accepted, naming `label`.
    """
    value: Any = text
    # Exact decimal: int() would also take " 8", "+8" and "1_0".
    if isinstance(OVERRIDES[key].check, Whole) and re.fullmatch(r"0|[1-9][0-9]{0,9}", text):
        value = int(text)
    return _checked(label, OVERRIDES[key], value)


def check_override(key: str, value: Any) -> Any:
    """Checks one keyword override as the same key of a target file is checked.

    Raises:
      ConfigError: an unknown key or a value that is not accepted, naming both.
    """
    if key not in OVERRIDES:
        raise ConfigError(f"override {key!r} is not known: accepted are {', '.join(OVERRIDES)}")
    return _checked(key, OVERRIDES[key], value)


def _checked(label: str, key: Key, value: Any) -> Any:
    try:
        return key.check(value)
    except _Rejected as accepted:
        raise ConfigError(f"{label}={value!r} is not valid: accepted is {accepted}") from None


def _configs() -> Traversable:
    return resources.files("splitk_jax") / "configs"


def target_files(config_dir: str | None = None) -> dict[str, Path | Traversable]:
    """The target files by name: the packaged ones, replaced and joined by those in `config_dir`.

    Raises:
      ConfigError: `config_dir` is not a folder.
    """
    files: dict[str, Path | Traversable] = {
        entry.name.removesuffix(".toml"): entry for entry in _configs().iterdir() if entry.name.endswith(".toml")
    }
    if config_dir is not None:
        if not os.path.isdir(config_dir):  # Path.is_dir raises for an overlong name
            raise ConfigError(f"{ENV_CONFIG_DIR}={config_dir!r} is not a folder: name one that holds target TOMLs")
        files |= {path.stem: path for path in Path(config_dir).glob("*.toml")}
    return dict(sorted(files.items()))


def load_target(name: str, *, config_dir: str | None = None) -> Target:
    """Loads one target by name or by path.

    Args:
      name: a target's name (`h200`), or a path: anything with a slash or ending in `.toml`.
      config_dir: a folder of user targets, searched before the packaged ones.

    Raises:
      ConfigError: no such target, or a file that is not valid; names file, key, value and what is accepted.
    """
    if "/" in name or os.sep in name or name.endswith(".toml"):
        return _read_target(Path(name).stem, Path(name))
    files = target_files(config_dir)
    if name not in files:
        raise ConfigError(
            f"target {name!r} is not known: accepted are {', '.join(files)}, or a path that ends in .toml"
        )
    return _read_target(name, files[name])


def load_targets(config_dir: str | None = None) -> list[Target]:
    """Loads every target that a name reaches."""
    return [_read_target(name, entry) for name, entry in target_files(config_dir).items()]


def target_for_device(device_kind: str, *, config_dir: str | None = None) -> Target:
    """Finds the target whose `device_kinds` holds a device's string; a user's file goes before a packaged one.

    Raises:
      ConfigError: no target, or more than one, answers to it.
    """
    targets = load_targets(config_dir)
    found = [t for t in targets if device_kind in t.device_kinds]
    found = [t for t in found if not t.packaged] or found
    if len(found) == 1:
        return found[0]
    if found:
        sources = ", ".join(t.source for t in found)
        raise ConfigError(f"device_kind {device_kind!r} is claimed by {sources}: choose one with {ENV_TARGET}")
    known = ", ".join(sorted(repr(kind) for t in targets for kind in t.device_kinds))
    raise ConfigError(
        f"device_kind {device_kind!r} matches no target: known are {known}. Set {ENV_TARGET} to a target's name or to"
        " the path of a TOML that describes this device"
    )


def _read_target(name: str, entry: Path | Traversable) -> Target:
    packaged = not isinstance(entry, Path) or entry.parent == _configs()
    source = f"configs/{entry.name}" if packaged else str(entry)
    tables = _read_tables(source, entry)
    origins = {f"{table}.{key}": f"{source} [{table}] {key}" for table, keys in tables.items() for key in keys}
    base, whole = tables.pop("base", {}).get("base"), None
    if base is not None:
        if packaged:
            raise ConfigError(f"{source}: base={base!r} is not valid: a packaged target stands alone")
        inherited, inherited_origins = _read_base(source, base)
        tables = {table: inherited[table] | tables[table] for table in tables}
        origins = inherited_origins | origins
        whole = inherited["hardware"]
    for table, keys in SECTIONS.items():
        missing = [key for key, spec in keys.items() if spec.required and key not in tables[table]]
        if missing:
            raise ConfigError(
                f"{source}: [{table}] {missing[0]} is missing: state it, or name a packaged target as base"
            )
    tiles = tables["kernel"].pop("tile", ())
    if not tiles:
        raise ConfigError(f"{source}: [[kernel.tile]] is missing: state at least one row")
    hardware = tables["hardware"]
    is_slice = whole and hardware["name"] == whole["name"] and hardware["sm_count"] < whole["sm_count"]
    return Target(
        name=name,
        source=source,
        packaged=packaged,
        hardware_name=hardware["name"],
        device_kinds=hardware["device_kinds"],
        arch=hardware["arch"],
        sm_count=hardware["sm_count"],
        hbm_gb_per_s=hardware.get("hbm_gb_per_s"),
        l2_mib=hardware.get("l2_mib"),
        smem_per_cta_kib=hardware.get("smem_per_cta_kib"),
        settings=tuple((tables["policy"] | tables["kernel"]).items()),
        tiles=tiles,
        origins=tuple((key.partition(".")[2], origin) for key, origin in origins.items()),
        whole_sm_count=whole["sm_count"] if whole and is_slice else None,
    )


def _read_base(source: str, base: Any) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    packaged = target_files()
    if type(base) is not str or base not in packaged:
        raise ConfigError(f"{source}: base={base!r} is not valid: accepted are {', '.join(packaged)}")
    tables = _read_tables(f"configs/{base}.toml", packaged[base])
    origins = {
        f"{table}.{key}": f"configs/{base}.toml [{table}] {key} (base of {source})"
        for table, keys in tables.items()
        for key in keys
    }
    return tables, origins


def _read_tables(source: str, entry: Path | Traversable) -> dict[str, dict[str, Any]]:
    """Parses and checks one file; keys that are left out stay out."""
    document = _parse(source, entry)
    _no_unknown(source, "", document, ("schema", "base", *SECTIONS))
    if type(document.get("schema")) is not int or document["schema"] != SCHEMA:
        raise ConfigError(f"{source}: schema={document.get('schema')!r} is not valid: accepted is {SCHEMA}")
    tables: dict[str, dict[str, Any]] = {}
    for section, keys in SECTIONS.items():
        table = document.get(section, {})
        if type(table) is not dict:
            raise ConfigError(f"{source}: {section}={table!r} is not valid: accepted is a table [{section}]")
        extra = ("tile",) if section == "kernel" else ()
        _no_unknown(source, f"[{section}] ", table, (*keys, *extra))
        tables[section] = {
            key: _checked(f"{source}: [{section}] {key}", keys[key], value)
            for key, value in table.items()
            if key in keys
        }
        if "tile" in extra and "tile" in table:
            tables[section]["tile"] = _tiles(source, table["tile"])
    if "base" in document:
        tables["base"] = {"base": document["base"]}
    return tables


def _tiles(source: str, rows: Any) -> tuple[Tile, ...]:
    if type(rows) is not list or not all(type(row) is dict for row in rows):
        raise ConfigError(f"{source}: [kernel] tile={rows!r} is not valid: accepted are [[kernel.tile]] rows")
    tiles = []
    for i, row in enumerate(rows):
        label = f"{source}: [[kernel.tile]] row {i + 1}"
        _no_unknown(label, "", row, tuple(TILE_KEYS))
        missing = [key for key, spec in TILE_KEYS.items() if spec.required and key not in row]
        if missing:
            raise ConfigError(f"{label}: {missing[0]} is missing")
        for key, value in row.items():
            _checked(f"{label}: {key}", TILE_KEYS[key], value)
        try:
            tiles.append(Tile(**row))
        except ConfigError as e:
            raise ConfigError(f"{label}: {e}") from None
    return tuple(tiles)


def _parse(source: str, entry: Path | Traversable) -> dict[str, Any]:
    try:
        # Looked at first: opening a pipe would wait for ever.
        if not entry.is_file():
            raise ConfigError(f"target file {source!r} does not exist or is not a regular file")
        with entry.open("rb") as f:
            data = f.read(MAX_CONFIG_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"{source}: cannot be read: {e.strerror}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{source}: larger than {MAX_CONFIG_BYTES} bytes, the most a target file may have")
    try:
        return tomli.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{source}: not valid TOML: {e}") from None


def _no_unknown(source: str, table: str, got: Mapping[str, Any], accepted: tuple[str, ...]) -> None:
    for key, value in got.items():
        if key not in accepted:
            raise ConfigError(f"{source}: {table}{key}={value!r} is not known: accepted are {', '.join(accepted)}")
