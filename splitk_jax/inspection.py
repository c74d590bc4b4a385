"""`inspect`: the split decisions that a function froze, read from its trace before anything compiles.

What is shown is read from the function's jaxpr: the plan is a parameter of an equation in it (`marks.py`), kernel names
and grids are the kernel calls' own. Lowered, compiled and exported functions have no jaxpr any more; of them the names
in their text are read.
"""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from splitk_jax import marks, report
from splitk_jax.plan import DecodePlan

KERNEL = "splitk_"
OWN_FOLDERS = tuple(f"{Path(module).parent}{os.sep}" for module in (__file__, jax.__file__))
JITTED = type(jax.jit(lambda: None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the library in a function.

    Attributes:
      kind: `decode` or `merge`.
      where: what it is inside of, outermost first: `scan of 32`, `vmap of 3`, `while`, `condition of while`,
        `branch 1 of cond` (of `jax.lax.cond` the true one), `shard_map`, `remat`, `exported`.
      times: how often one run of the function makes it; None where that is not static: in a while loop or a branch, and
        in text. Under `vmap` a decode is a loop, and a merge one merge of larger arrays.
      source: the line that makes it, `path:line (function)`; None where it is not known.
      batch, q_len: of the queries, static; None in text.
      states: how many states a merge merges; None for a decode.
      num_splits, backend, fingerprint: the plan's; None for a merge.
      kernels: names of the kernels, as lowered text has them, with the launch grid of each; the grid is None where the
        backend has none, or in text.
      window, softcap, sinks: static decisions beside the plan's, and whether there are sinks; None also in text, which
        does not say.
      plan: the plan; None for a merge, and in text.
      in_text: whether it was read from text, which has each different call once, however often it is made.
    """

    kind: str
    where: tuple[str, ...] = ()
    times: int | None = 1
    source: str | None = None
    batch: int | None = None
    q_len: int | None = None
    states: int | None = None
    num_splits: int | None = None
    backend: str | None = None
    fingerprint: str | None = None
    kernels: tuple[tuple[str, tuple[int, ...] | None], ...] = ()
    window: int | None = None
    softcap: float | None = None
    sinks: bool | None = None
    plan: DecodePlan | None = None
    in_text: bool = False


@dataclass(frozen=True, slots=True)
class Inspection:
    """The calls of a function, in program order; prints as a table.

    Attributes:
      calls: each `Call`.
    """

    calls: tuple[Call, ...]

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, i: int) -> Call:
        return self.calls[i]

    def report(self) -> list[dict[str, Any]]:
        """The calls as plain values for programs; a plan as its `facts`."""
        return [
            asdict(replace(call, plan=None)) | {"plan": None if call.plan is None else call.plan.facts()}
            for call in self.calls
        ]

    def to_json(self) -> str:
        """`report` as JSON."""
        return json.dumps(self.report(), indent=2)

    def __str__(self) -> str:
        if not self.calls:
            return "no call of splitk_jax\n"
        rows = [
            (
                call.in_text,
                call.kind,
                "-" if call.source is None else call.source.rpartition("/")[2],
                " > ".join(call.where) or "-",
                "?" if call.times is None else call.times,
                _or_dash(call.batch),
                _or_dash(call.q_len),
                _options(call),
                _or_dash(call.num_splits),
                call.fingerprint or "-",
            )
            for call in self.calls
        ]
        # Layers of a model follow one another: equal lines are one. Of a text nobody knows how many calls it has.
        lines = [("?" if in_text else len(list(same)), *row) for (in_text, *row), same in itertools.groupby(rows)]
        header = ("calls", "kind", "at", "in", "times", "batch", "q_len", "options", "splits", "plan")
        parts = [report.table("calls", header, lines, left=4, whole=("plan",))]
        kernels = dict.fromkeys((call.fingerprint, *kernel) for call in self.calls for kernel in call.kernels)
        if kernels:
            launches = [
                (plan, name, "-" if grid is None else " x ".join(map(str, grid))) for plan, name, grid in kernels
            ]
            parts.append(report.table("kernels", ("plan", "kernel", "grid"), launches, left=3, whole=("plan",)))
        return report.render(*parts)


def _options(call: Call) -> str:
    named = [f"{name}={value}" for name in ("window", "softcap") if (value := getattr(call, name)) is not None]
    return (
        ", ".join([*named, *(["sinks"] if call.sinks else []), *([f"{call.states} states"] if call.states else [])])
        or "-"
    )


def inspect(fn: Any, *args: Any, **kwargs: Any) -> Inspection:
    """Finds every decode and merge call in a function, without compiling or running it; no device is needed.

    Its plans may be for another machine, also where nobody said `ahead_of_time=True`.

    Args:
      fn: a function, jitted or not; or what became of one: `jax.stages.Traced`, `Lowered`, `Compiled`,
        `jax.export.Exported`, of which the text is read.
      *args, **kwargs: what it would be called with; `jax.ShapeDtypeStruct` will do for arrays. For a function that is
        not jitted, arguments without a shape and dtype are passed as they are.

    Returns:
      The calls, in program order. Of a text, each different call once.

    Raises:
      TypeError: arguments for what is lowered already.
      Whatever tracing the function raises.
    """
    text = _text(fn)
    if text is not None or isinstance(fn, jax.stages.Traced):
        if args or kwargs:
            raise TypeError(f"fn={type(fn).__name__} is traced already: accepted is no further argument")
        return Inspection(_calls_in_text(text, ()) if text is not None else _calls(fn.jaxpr))
    if not callable(fn):
        raise TypeError(
            "fn must be a function, or a jax.stages.Traced, Lowered or Compiled, or a jax.export.Exported, got"
            f" {type(fn).__module__}.{type(fn).__qualname__}"
        )
    # What `disable_jit` would run step by step is traced all the same: it is what runs without it.
    with marks.inspecting(), jax.disable_jit(False):
        if isinstance(fn, JITTED):
            return Inspection(_calls(fn.trace(*args, **kwargs).jaxpr))
        return Inspection(_calls(_trace(fn, args, kwargs)))


def _text(fn: Any) -> str | None:
    if isinstance(fn, jax.export.Exported):
        return str(fn.mlir_module())
    if not hasattr(fn, "as_text"):
        return None
    # Lowered and compiled functions, JAX's and those that other libraries wrap in their own.
    try:
        return fn.as_text(debug_info=True) or ""
    except TypeError:  # of a compiled function there is no choice
        return fn.as_text() or ""


def _trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The jaxpr of a function that is not jitted, over its leaves that are arrays."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]

    def call(*traced: Any) -> Any:
        filled = list(leaves)
        for i, x in zip(arrays, traced, strict=True):
            filled[i] = x
        args, kwargs = jax.tree.unflatten(tree, filled)
        fn(*args, **kwargs)  # what it returns need not be arrays

    return jax.make_jaxpr(call)(*(leaves[i] for i in arrays))


def _calls_in_text(text: str, where: tuple[str, ...]) -> tuple[Call, ...]:
    def kernels(*call: Any) -> tuple[tuple[str, None], ...]:
        # In device code names stand between \00 and have endings; s3 is not s33, and t64 not t64x3.
        names = marks.kernel_names(*call)
        return tuple((name, None) for name in names if re.search(rf"(?<![A-Za-z_]){name}(?!\d|x\d)", text))

    decodes = dict.fromkeys(match.groups() for match in marks.DECODE_NAME.finditer(text))
    merges = dict.fromkeys(match[1] for match in marks.MERGE_NAME.finditer(text))
    return (
        *(
            Call(
                kind="decode",
                where=where,
                times=None,
                num_splits=int(splits),
                backend=backend,
                fingerprint=fingerprint,
                kernels=kernels(splits, tile, backend),
                in_text=True,
            )
            for splits, tile, backend, fingerprint in decodes
        ),
        *(Call(kind="merge", where=where, times=None, states=int(states), in_text=True) for states in merges),
    )


def _calls(closed: Any) -> tuple[Call, ...]:
    return tuple(_walk(getattr(closed, "jaxpr", closed), (), 1, None))


def _walk(jaxpr: Any, where: tuple[str, ...], times: int | None, source: str | None) -> Iterator[Call]:
    for equation in jaxpr.eqns:
        primitive, params = equation.primitive.name, equation.params
        # A cached trace of an inner function was made elsewhere: the outermost line of ours is the call's.
        line = _source(equation) or source
        if primitive == "call_exported":
            yield from _calls_in_text(str(params["exported"].mlir_module()), (*where, "exported"))
            continue
        for label, count, inner in _bodies(primitive, params):
            inside = where if label is None else (*where, label)
            often = None if times is None or count is None else times * count
            mark = next((each for each in inner.eqns if each.primitive in (marks.plan_p, marks.merge_p)), None)
            if mark is None:
                yield from _walk(inner, inside, often, line)
            elif mark.primitive is marks.plan_p:
                yield _decode_call(inner, mark.params, inside, often, line)
            else:
                mapped = tuple(f"vmap of {size}" for size in reversed(mark.params["mapped"]))
                states = mark.params["states"]
                yield Call(kind="merge", where=(*inside, *mapped), times=often, source=line, states=states)


def _decode_call(
    jaxpr: Any, decisions: dict[str, Any], where: tuple[str, ...], times: int | None, source: str | None
) -> Call:
    equations = list(_equations(jaxpr, ()))
    launches = [(equation, loops) for equation, loops in equations if _name(equation).startswith(KERNEL)]
    plan: DecodePlan = decisions["plan"]
    # Under `vmap` the call is a loop over its rows.
    mapped = launches[0][1] if launches else ()
    for size in mapped:
        where, times = (*where, f"vmap of {size}"), None if times is None else times * size
    return Call(
        kind="decode",
        where=where,
        times=times,
        source=source,
        batch=decisions["batch"],
        q_len=decisions["q_len"],
        num_splits=plan.num_splits,
        backend=plan.backend,
        fingerprint=plan.fingerprint(),
        kernels=tuple(dict.fromkeys((_name(equation), _grid(equation)) for equation, _ in launches)),
        window=decisions["window"],
        softcap=decisions["softcap"],
        sinks=decisions["sinks"],
        plan=plan,
    )


def _name(equation: Any) -> str:
    return str(equation.params.get("name", ""))


def _grid(equation: Any) -> tuple[int, ...] | None:
    """The grid of a kernel launch; None for what is none."""
    meshes = equation.params.get("meshes") or ()
    return tuple(meshes[0].grid) if meshes else None


def _equations(jaxpr: Any, loops: tuple[int, ...]) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Each equation of a call with the lengths of the scans around it; kernels are not entered."""
    for equation in jaxpr.eqns:
        yield equation, loops
        if not _name(equation).startswith(KERNEL):
            for _, _, inner in _bodies(equation.primitive.name, equation.params):
                around = (*loops, equation.params["length"]) if equation.primitive.name == "scan" else loops
                yield from _equations(inner, around)


def _bodies(primitive: str, params: dict[str, Any]) -> Iterator[tuple[str | None, int | None, Any]]:
    """(label, how often it runs or None, jaxpr) of each jaxpr in an equation; no label where it runs just once."""
    if primitive == "scan":
        yield f"scan of {params['length']}", params["length"], params["jaxpr"].jaxpr
    elif primitive == "while":
        yield "condition of while", None, params["cond_jaxpr"].jaxpr
        yield "while", None, params["body_jaxpr"].jaxpr
    elif primitive == "cond":
        for i, branch in enumerate(params["branches"]):
            yield f"branch {i} of cond", None, branch.jaxpr
    else:
        label = {"shard_map": "shard_map", "checkpoint": "remat", "remat2": "remat"}.get(primitive)
        for value in params.values():
            for each in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(each, "jaxpr", each)
                if hasattr(inner, "eqns"):
                    yield label, 1, inner


def _source(equation: Any) -> str | None:
    """The innermost line that is neither JAX's nor the library's."""
    traceback = getattr(equation.source_info, "traceback", None)
    frames = [] if traceback is None else traceback.frames
    return users_line((frame.file_name, frame.line_num, frame.function_name) for frame in frames)


def users_line(frames: Iterable[tuple[str, int, str]]) -> str | None:
    """The first of (file, line, function) that is neither JAX's nor the library's, as `path:line (function)`."""
    for path, line, function in frames:
        if not path.startswith((*OWN_FOLDERS, "<")):
            return f"{path}:{line} ({function.split('.')[-1]})"
    return None


def _or_dash(value: int | None) -> Any:
    return "-" if value is None else value
