"""The mosaic kernels' own text, run on numpy: a thread a warpgroup, barriers that count, memory that is NaN at first.

What it sees that lowering does not: who waits for whom, what is read before it is written, indices out of bounds, and
every number, and vectors that are not aligned. What it cannot see: what else a layout does, and what a GPU reorders. A
schedule is made with numpy too.
"""

import contextlib
import functools
import itertools
import threading
import types
from unittest import mock

import jax
import numpy as np

WAIT_S = 30
"""Seconds after which a barrier that nobody completes is a deadlock."""

thread = threading.local()


class Slice:
    """`pl.ds`."""

    def __init__(self, start, size):
        self.start, self.stop = int(start), int(start) + int(size)


class Ref:
    """An array in memory, or a part of one. A copy may begin inside and end outside: what lies outside is 0."""

    def __init__(self, array):
        self.array = array

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)
    at = property(lambda self: _At(self))

    def part(self, index):
        if index is Ellipsis:
            return self.array
        index = index if isinstance(index, tuple) else (index,)
        where, missing = [], 0
        for i, size in zip(index, self.shape, strict=False):
            if isinstance(i, Slice):
                assert 0 <= i.start < size, ("out of bounds", index, self.shape)
                missing = max(i.stop - size, 0)
                where.append(slice(i.start, min(i.stop, size)))
            else:
                assert isinstance(i, slice) or 0 <= int(i) < size, ("out of bounds", index, self.shape)
                where.append(i if isinstance(i, slice) else int(i))
        part = self.array[tuple(where)] if any(isinstance(i, slice) for i in where) else self.array[(*where, ...)]
        return np.concatenate([part, np.zeros_like(part[:1]).repeat(missing, 0)]) if missing else part

    def __getitem__(self, index):
        part = self.part(index)
        return part.copy() if part.ndim else part[()]

    def __setitem__(self, index, value):
        self.part(index)[...] = value

    def transpose(self, axes):
        return Ref(self.array.transpose(axes))


class _At:
    def __init__(self, ref):
        self.ref = ref

    def __getitem__(self, index):
        return Ref(self.ref.part(index))


class Barriers:
    """An array of barriers; `at` gives one."""

    def __init__(self, arrivals, count, changed):
        self.at = [Barrier(arrivals, changed) for _ in range(count)]


class Barrier:
    def __init__(self, arrivals, changed):
        self.arrivals, self.changed, self.arrived, self.seen = arrivals, changed, 0, {}

    def arrive(self):
        with self.changed:
            self.arrived += 1
            self.changed.notify_all()

    def wait(self):
        with self.changed:
            phase = self.seen.get(thread.warpgroup, 0) + 1
            complete = self.changed.wait_for(
                lambda: self.arrived >= phase * self.arrivals or self.changed.failed, timeout=WAIT_S
            )
            assert complete, "deadlock"
            assert not self.changed.failed, "another warpgroup failed"
            assert self.arrived < (phase + 1) * self.arrivals, "a barrier ran ahead of who waits for it"
            self.seen[thread.warpgroup] = phase


def junk(shape, dtype):
    dtype = np.dtype(dtype)
    return np.full(shape, np.iinfo(dtype).max // 2 if dtype.kind in "iu" else np.nan, dtype)


def kernel(body, *, out_type, grid, grid_names, compiler_params, scratch_types=(), num_threads=1, thread_name="wg"):
    """`plgpu.kernel`, its CTAs one after another."""
    del compiler_params

    def launch(*operands):
        operands = [x if isinstance(x, Ref) else Ref(np.asarray(x)) for x in operands]
        outs = [Ref(junk(x.shape, x.dtype)) for x in out_type]
        for cta in np.ndindex(*grid):
            changed, errors = threading.Condition(), []
            changed.failed = False
            scratch = [make(changed) for make in scratch_types]

            def warpgroup(index, cta=cta, changed=changed, errors=errors, scratch=scratch):
                np.seterr(all="ignore")  # of this thread
                thread.warpgroup = index
                thread.axes = dict(zip(grid_names, map(np.int32, cta), strict=True)) | {thread_name: np.int32(index)}
                try:
                    body(*operands, *outs, *scratch)
                except BaseException as e:  # noqa: BLE001 - raised below, in the test's thread
                    errors.append(e)
                    with changed:
                        changed.failed = True
                        changed.notify_all()

            threads = [threading.Thread(target=warpgroup, args=(i,)) for i in range(num_threads)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            if errors:
                raise errors[0]
        return [x.array for x in outs]

    return launch


def copy(src, dst, barrier=None):
    assert src.shape == dst.shape
    dst.array[...] = src.array
    if barrier is not None:
        barrier.arrive()


def load(ref, layout):
    """From where vectors as long as the layout's may begin; those of one word always may."""
    layout = layout.to_mgpu()
    length = getattr(layout, "vector_length", None) or layout.vec_size
    whole = ref.array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    offset = ref.array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    assert offset % (length * ref.array.itemsize) == 0, ("misaligned", offset, length)
    return np.array(ref.array)


def load_transposed(ref, transforms, rows):
    """Without the order of lanes, which `lanes_in_order` undoes."""
    del transforms
    return np.pad(ref.array.T.astype(np.float16), ((0, rows - ref.shape[1]), (0, 0)), mode="edge")


def copy_in(src, dst, barrier, *, wanted):
    assert src.shape == dst.shape
    if wanted:
        dst.array[...] = src.array
    barrier.arrive()


def wgmma(acc, a, b):
    a = a.array if isinstance(a, Ref) else a
    assert a.dtype == b.dtype
    product = a.astype(np.float64) @ b.array.astype(np.float64)
    acc.array[...] = (acc.array + product).astype(np.float32)


def iota(dtype, shape, axis, layout=None):
    del layout
    return np.broadcast_to(
        np.arange(shape[axis], dtype=dtype).reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape
    )


def run_state(body):
    def run(state):
        ref = Ref(state)
        body(ref)
        return ref.array

    return run


def reduce_rows(op, x, scratch, layout, reduced):
    del scratch, layout, reduced
    return x.max(axis=0) if op == "max" else x.sum(axis=0, dtype=np.float32)


def div(a, b):
    """Towards 0, as `lax.div`."""
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(np.int32)


def fori_loop(start, stop, body, carry):
    for i in range(int(start), int(stop)):
        carry = body(np.int32(i), carry)
    return carry


def make_schedule(seq_lens, block_tables, **options):
    """The mosaic backend's schedule, computed by numpy: nothing is compiled."""
    from splitk_jax.kernels.mosaic import schedule

    with mock.patch.object(schedule, "jnp", np), np.errstate(all="ignore"):
        return schedule.make_schedule(np.asarray(seq_lens), np.asarray(block_tables), **options)


class _Instead:
    """A module with some names replaced."""

    def __init__(self, module, **names):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)


@contextlib.contextmanager
def emulated():
    """Within it, the mosaic kernels are functions on numpy arrays."""
    from splitk_jax.kernels import partials
    from splitk_jax.kernels.mosaic import combine, fold, merge, schedule, split

    plgpu = _Instead(
        split.plgpu,
        kernel=kernel,
        SMEM=lambda shape, dtype, transforms=(): lambda changed: Ref(junk(shape, dtype)),
        Barrier=lambda num_arrivals, num_barriers: functools.partial(Barriers, num_arrivals, num_barriers),
        commit_smem=lambda: None,
        set_max_registers=lambda n, action: None,
        barrier_wait=lambda barrier: barrier.wait(),
        barrier_arrive=lambda barrier: barrier.arrive(),
        layout_cast=lambda x, layout: x,
        broadcasted_iota=iota,
        wgmma=wgmma,
        ACC=type("ACC", (), {"__new__": lambda cls, shape, dtype: np.zeros(shape, dtype), "init": np.array}),
        copy_gmem_to_smem=copy,
        copy_smem_to_gmem=copy,
        wait_smem_to_gmem=lambda *args, **options: None,
    )
    pallas = types.SimpleNamespace(
        ds=Slice,
        when=lambda condition: lambda body: body() if condition else None,
        run_scoped=lambda body, acc: body(Ref(acc)),
        run_state=run_state,
    )
    lax = types.SimpleNamespace(
        axis_index=lambda name: thread.axes[name],
        div=div,
        rem=lambda a, b: a - div(a, b) * b,
        cond=lambda which, yes, no: yes() if which else no(),
        fori_loop=fori_loop,
        broadcast_in_dim=lambda x, shape, axes: np.broadcast_to(np.expand_dims(x, 1 - axes[0]), shape),
        shift_right_logical=lambda a, b: a >> b,
        bitcast_convert_type=lambda x, dtype: x.view(dtype),
        optimization_barrier=lambda x: x,
    )
    access = types.SimpleNamespace(
        load=load,
        load_tile=load,
        half_operand=lambda x: x.astype(np.float16),
        operand_apart=lambda x: x.astype(np.float16),
        pairs_apart=lambda x, layout: x,
        FOURS=split.access.FOURS,
        load_transposed=load_transposed,
        lanes_in_order=lambda x: x,
        store=lambda ref, value: ref.__setitem__(..., value),
        copy_in=copy_in,
        reduce_rows=reduce_rows,
    )
    numbers = _Instead(
        np, full=lambda shape, value, dtype=None: np.full(shape, value, dtype or np.asarray(value).dtype)
    )
    replaced = itertools.chain(
        ((module, "jnp", numbers) for module in (schedule, split, combine, fold, merge, partials)),
        (
            (module, name, value)
            for module in (split, combine, merge)
            for name, value in (("plgpu", plgpu), ("pl", pallas), ("lax", lax), ("access", access))
        ),
        [(combine, "jax", _Instead(jax, new_ref=lambda x: Ref(np.array(x)), freeze=lambda ref: ref.array))],
    )
    with contextlib.ExitStack() as stack, np.errstate(all="ignore"):
        for module, name, value in replaced:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def merge_states(outs, lses):
    """`merge_states` by the mosaic backend's kernel."""
    from splitk_jax.kernels.mosaic.merge import merge

    with emulated():
        return merge(list(outs), list(lses))


def decode(paged, plan, *, window=None, softcap=None, sinks=None, k_scale=None, v_scale=None):
    """(out, lse) of the op on the arrays of a `support.Paged`."""
    from splitk_jax.kernels.mosaic.combine import combine
    from splitk_jax.kernels.mosaic.split import split

    q, *rest = paged.arrays
    one_query = q.ndim == 3
    scale = np.float32(plan.head_dim**-0.5)
    with emulated():
        q, scales = q[:, None] if one_query else q, (None if x is None else np.asarray(x) for x in (k_scale, v_scale))
        launched = split(q, *rest, scale, sinks, *scales, plan=plan, window=window, softcap=softcap)
        out, lse = map(np.asarray, combine(launched, sinks, plan=plan))
    return (out[:, 0], lse[:, 0]) if one_query else (out, lse)
