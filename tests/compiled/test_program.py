"""Programs, buckets, the cache of executables."""

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.compiled import CompileMissError, ProgramCache, ProgramSpec, Sizes
from jaxinfer.compiled import cache as cache_module
from jaxinfer.compiled.background import StoppedError
from jaxinfer.pallas_kernels.dispatch import Operation
from jaxinfer.pallas_kernels.implementation import mosaic, reference
from jaxinfer.pallas_kernels.mosaic.interpreter import interpreted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Add(Sizes):
    program = "add"
    n: int = 1
    m: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subtract(Add):
    program = "subtract"


def spec_of(function, *arguments, **options):
    """A program of one size."""
    return ProgramSpec(
        sizes=Add,
        build=lambda static, sizes: function,
        arguments=lambda sizes: arguments,
        reachable=lambda buckets: (Add(),),
        **options,
    )


def test_a_program_knows_its_memory_and_writes_donated_arguments_in_place():
    array = jax.ShapeDtypeStruct((1000,), jnp.float32)
    program = spec_of(lambda x, y: (x + y, y[:1]), array, array, donate=(0,)).compile(Add(n=1000))
    assert program.memory.argument_bytes == 8000
    assert program.memory.alias_bytes == 4000
    assert program.compile_seconds > 0
    assert repr(program) == "Program(add: n=1000, m=1)"
    x = jnp.ones(1000)
    where = x.unsafe_buffer_pointer()
    out, _ = program(x, jnp.ones(1000))
    assert out.unsafe_buffer_pointer() == where
    assert x.is_deleted()


def test_programs_are_made_without_kernels_on_request():
    def plus(x):
        return Operation("plus", mosaic(lambda x: x + 1), reference(lambda x: x + 2))(x)

    with interpreted():  # which takes the kernel on a CPU
        found = [spec_of(plus, jnp.zeros(())).compile(Add(), kernels=kernels) for kernels in (True, False)]
    assert [float(program(jnp.zeros(()))) for program in found] == [1, 2]


def cache_of_add(calls):
    """A cache of a program that adds 1 to `n` numbers; its buckets are those numbers. `calls`: what was traced.

    Another one subtracts 1, and is never compiled ahead.
    """

    def function(static, sizes):
        calls.append(sizes)
        return lambda x: x + 1 if type(sizes) is Add else x - 1

    def spec(kind):
        return ProgramSpec(
            sizes=kind,
            build=function,
            arguments=lambda sizes: (jax.ShapeDtypeStruct((sizes.n,), jnp.float32),),
            reachable=lambda buckets: (kind(n=n) for n in buckets if kind is Add),
        )

    return ProgramCache([spec(Add), spec(Subtract)], kernels=False)


def test_misses_are_counted_and_compiled_once():
    calls = []
    cache = cache_of_add(calls)
    assert cache.get(Add(n=4)) is cache.get(Add(n=4))
    assert (cache.misses, len(calls)) == (1, 1)


def test_an_executable_is_found_whatever_the_order_of_its_sizes():
    cache = cache_of_add([])
    assert cache.get(Add(n=2, m=3)) is cache.get(Add(m=3, n=2))
    assert cache.misses == 1


def test_programs_with_equal_sizes_are_two():
    cache = cache_of_add([])
    assert cache.get(Add(n=1))(jnp.zeros(1)).tolist() == [1]
    assert cache.get(Subtract(n=1))(jnp.zeros(1)).tolist() == [-1]
    assert cache.misses == 2


def test_compiling_ahead_leaves_no_miss():
    calls = []
    cache = cache_of_add(calls)
    assert cache.compile_ahead((2, 4, 2)) == 2
    assert cache.compile_ahead((2,)) == 0
    with cache.forbid_compile():
        assert cache.get(Add(n=2))(jnp.zeros(2)).tolist() == [1, 1]
        with pytest.raises(CompileMissError, match=r"'add' is not compiled for n=8, m=1 .* \['n=2, m=1', 'n=4, m=1'\]"):
            cache.get(Add(n=8))
    assert (cache.misses, len(calls)) == (0, 2)
    cache.get(Add(n=8))
    assert cache.misses == 1


def test_two_threads_compile_one_program_once():
    calls = []
    cache = cache_of_add(calls)
    threads = [threading.Thread(target=cache.get, args=(Add(n=3),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_compiling_is_forbidden_in_one_context_alone():
    """Two threads forbid it, and the first leaves while the second is inside: one flag for both stayed set for ever."""
    cache, both_inside, left = cache_of_add([]), threading.Barrier(3), threading.Event()

    def first():
        with cache.forbid_compile():
            both_inside.wait(60)
        left.set()

    def second():
        with cache.forbid_compile():
            both_inside.wait(60)
            assert left.wait(60)
            with cache.forbid_compile():
                pass
            with pytest.raises(CompileMissError):
                cache.get(Add(n=2))
        return cache.get(Add(n=2))

    with ThreadPoolExecutor(2) as threads:
        done, program = threads.submit(first), threads.submit(second)
        both_inside.wait(60)
        outside = cache.get(Add(n=1))
        done.result()
        assert program.result()(jnp.zeros(2)).tolist() == [1, 1]
    assert outside(jnp.zeros(1)).tolist() == [1]
    assert cache.get(Add(n=3))(jnp.zeros(3)).tolist() == [1, 1, 1]


def test_compiling_is_forbidden_for_one_cache_alone():
    one, other = cache_of_add([]), cache_of_add([])
    with one.forbid_compile():
        assert other.get(Add(n=2))(jnp.zeros(2)).tolist() == [1, 1]


class Slowly:
    """Notes what begins to be compiled, and can be held, or refuse a size."""

    def __init__(self, monkeypatch):
        self.begun, self.refused, self.open = [], (), threading.Event()
        compile_it = ProgramSpec.compile

        def compile_slowly(spec, sizes, **options):
            self.begun.append(sizes.n)
            assert self.open.wait(60)
            if sizes.n in self.refused:
                raise RuntimeError(f"no room for {sizes.n}.\nMore of that.")
            return compile_it(spec, sizes, **options)

        monkeypatch.setattr(ProgramSpec, "compile", compile_slowly)
        monkeypatch.setattr(cache_module, "BACKGROUND_DELAY", 0.0)

    def until(self, begun, *, idle=False):
        """Wait until this many have begun, and if `idle`, nothing is compiled."""
        give_up = time.monotonic() + 60
        while len(self.begun) < begun or (idle and any(x.name == "jaxinfer-call" for x in threading.enumerate())):
            assert time.monotonic() < give_up, self.begun
            time.sleep(1e-3)


@pytest.fixture
def slowly(monkeypatch):
    made = Slowly(monkeypatch)
    yield made
    made.open.set()


def test_a_call_goes_before_the_background(slowly):
    cache = cache_of_add([])
    cache.compile_in_background((1, 2, 3))
    slowly.until(1)
    call = threading.Thread(target=cache.get, args=(Add(n=3),))
    call.start()
    slowly.until(2)
    slowly.open.set()
    call.join()
    slowly.until(3, idle=True)
    assert (slowly.begun, cache.misses, len(list(cache))) == ([1, 3, 2], 1, 3)
    assert cache.compile_ahead((1, 2, 3)) == 0


def test_an_error_in_the_background_is_one_line_and_leaves_the_rest_to_calls(slowly, caplog):
    slowly.open.set()
    slowly.refused = (2,)
    cache = cache_of_add([])
    cache.compile_in_background((1, 2, 3))
    slowly.until(2, idle=True)
    (record,) = caplog.records
    assert record.getMessage() == (
        "Programs are compiled only when a request needs them, since add(n=2, m=1) could not be compiled in the "
        "background: no room for 2."
    )
    assert record.exc_info is None
    assert cache.get(Add(n=3))(jnp.zeros(3)).tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="no room for 2"):
        cache.get(Add(n=2))
    slowly.refused = ()
    assert cache.get(Add(n=2))(jnp.zeros(2)).tolist() == [1, 1]
    assert (slowly.begun, cache.misses) == ([1, 2, 3, 2, 2], 3)


def test_nothing_is_compiled_ahead_or_in_the_background_after_the_end(slowly):
    cache = cache_of_add([])
    cache.compile_in_background((1, 2))
    slowly.until(1)
    cache.turns.stop()
    slowly.open.set()
    slowly.until(1, idle=True)
    with pytest.raises(StoppedError):
        cache.compile_ahead((2, 4))
    assert slowly.begun == [1]
