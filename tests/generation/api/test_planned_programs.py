"""The planner knows what compiled programs exchange, and the memory that they take, in every way to run a model."""

import re
from collections import Counter

import pytest

from jaxinfer import LLM
from jaxinfer.compiled.dumps import read_collectives
from jaxinfer.generation.execution.memory import part_bytes
from jaxinfer.models.planning import shape_of
from jaxinfer.sharding import MeshConfig
from jaxinfer.sharding.planner import Catalogue, Runner, Ways
from jaxinfer.sharding.planner.costs import Format
from jaxinfer.sharding.planner.exchanges import Pass
from jaxinfer.sharding.planner.memory import Step, kv_bytes, request_bytes, weight_bytes, work_bytes
from tests.generation.sampled import SIZES
from tests.generation.ways import RARE_WAYS, WAYS
from tests.tiny import HYBRID, MOE_CONFIGS, save_tiny

pytestmark = pytest.mark.xdist_group("ways")

CATALOGUE = Catalogue.read()
MIXTURES = {
    "experts": {"expert": 2},
    "sliced experts": {"expert": 2, "tensor": 2},
    "experts in lanes": {"data": 2},
    "experts in lanes of two": {"data": 2, "expert": 2},
    "sliced experts in lanes": {"data": 2, "expert": 2, "tensor": 2},
}
DELTA_RULES = {"dense": HYBRID, "mixture": HYBRID.with_mlps((MOE_CONFIGS["shared"].layer(0).mlp,))}
HYBRID_WAYS = {
    "whole": {},
    "slices": {"tensor": 2},
    "lanes": {"data": 2},
    "stages": {"pipeline": 2},
    "lanes of two": {"data": 2, "expert": 2},
    "stages of two": {"pipeline": 2, "tensor": 2},
}
FEW = {**SIZES, "context": 64, "max_decode_passes": 4}


def slow(name):
    return pytest.param(name, marks=pytest.mark.slow)


def each(names):
    return [name if name in WAYS else slow(name) for name in names if "streamed" not in name]


def in_stages(llm):
    return llm.model.mesh is not None and llm.model.mesh.shape["pipeline"] > 1


def programs_of(llm):
    """The programs of the largest sizes that run the model: they decode, or read prompts too."""
    executor = llm.engine.executor
    executor.programs.compile_ahead(executor._packer.buckets.largest)
    found = [program for program in executor.programs if program.name in ("decode", "prefill", "ring")]
    assert {chunks_of(program) > 0 for program in found} == {False, True}
    return found


def chunks_of(program):
    return getattr(program.sizes, "chunks", 0)


def runner_of(llm):
    """The model as it is stored: that it is fitted to a mesh is the planner's to know."""
    shape, mesh, size = shape_of("tiny", llm.model.fitting.original), llm.model.mesh, llm.model.weights.dtype.itemsize
    return Runner(
        model=shape,
        device=CATALOGUE.device("h200"),
        system=CATALOGUE.system(shape, Format()),
        ways=Ways() if mesh is None else Ways(**mesh.shape),
        format=Format(weight_bytes=size, kv_bytes=size, number_bytes=size),
    )


def predicted_exchanges(llm, program):
    """The bytes that a device sends, by the kind of collective and whether it is in a loop of passes or ticks."""
    runner, sizes, config = runner_of(llm), program.sizes, llm.engine.config
    parts, chunks = getattr(sizes, "micro_batches", 1), chunks_of(program)
    rows, width = sizes.batch + chunks, 1 + getattr(sizes, "speculative", 0)
    one = Pass(
        tokens=(sizes.batch * width + chunks * config.chunk_size) / parts,
        rows=rows * width / parts,
        number_bytes=runner.format.number_bytes,
        decodes=not chunks,
    )
    found = Counter()
    for exchange in one.exchanges(runner.model, runner.ways):
        found[exchange.kind, not chunks or runner.ways.pipeline > 1] += exchange.wire_bytes
    tokens = 1 if chunks else config.max_decode_passes * width
    for exchange in one.once(runner.ways, rows=rows, width=tokens):
        found[exchange.kind, False] += exchange.wire_bytes
    return found


def compiled_exchanges(llm, program):
    """The same, read from a program, without what rows ask for besides their best tokens."""
    found = Counter()
    for one in read_collectives(program.executable.as_text(), llm.model.mesh.size):
        if all(re.search(r"/(first_stage|last_stage|some_stages)/cond$", each) for each in one.conditions):
            found[one.kind, one.in_loop] += one.trips * one.wire_bytes
    return found


def check_exchanges(llm):
    for program in programs_of(llm):
        assert compiled_exchanges(llm, program) == pytest.approx(predicted_exchanges(llm, program), rel=1e-12)


@pytest.mark.parametrize("way", each(name for name, options in (WAYS | RARE_WAYS).items() if "mesh" in options))
def test_exchanged_bytes_are_those_of_compiled_programs(ways, way):
    check_exchanges(ways[way])


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    return {
        name: save_tiny(tmp_path_factory.mktemp("models") / name, config=config) for name, config in MOE_CONFIGS.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", MOE_CONFIGS)
@pytest.mark.parametrize("way", MIXTURES)
def test_mixtures_exchange_what_is_predicted(mixtures, name, way):
    llm = LLM(mixtures[name], mesh=MeshConfig(**MIXTURES[way]), **FEW)
    check_exchanges(llm)
    check_memory(llm)


@pytest.mark.slow
@pytest.mark.parametrize("name", DELTA_RULES)
@pytest.mark.parametrize("way", HYBRID_WAYS)
def test_recurrent_states_take_and_exchange_what_is_predicted(tmp_path, name, way):
    folder, ways = save_tiny(tmp_path / "model", config=DELTA_RULES[name]), HYBRID_WAYS[way]
    llm = LLM(folder, mesh=MeshConfig(**ways) if ways else None, **FEW)
    if ways:
        check_exchanges(llm)
    check_memory(llm)


def check_memory(llm):
    """Arguments to the byte; with what programs compute within 10%."""
    runner, config, memory = runner_of(llm), llm.engine.config, llm.memory
    layout = llm.engine.executor.state.layout
    states = config.max_batch + 1 + layout.num_snapshots
    stored = weight_bytes(runner) + kv_bytes(runner, memory.num_pages * config.page_size, states)
    stored += part_bytes(layout.adapters)  # which are the user's, not the model's
    options = layout.slots(1).options.packed.shape[1]
    for program in programs_of(llm):
        sizes, chunks = program.sizes, chunks_of(program)
        parts = getattr(sizes, "micro_batches", 1)
        step = Step(
            rows=sizes.batch,
            chunks=chunks,
            tokens=chunks * config.chunk_size // parts,
            micro_batches=parts,
            pages=sizes.pages,
            options=options,
            speculates=bool(getattr(sizes, "speculative", 0)),
        )
        requests = request_bytes(runner, step, slots=config.max_batch, context=config.context)
        compiled = program.executable.memory_analysis()
        assert compiled.argument_size_in_bytes == stored + requests
        peak = compiled.argument_size_in_bytes + compiled.temp_size_in_bytes
        assert stored + requests + work_bytes(runner, step) == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("way", each(WAYS | RARE_WAYS))
def test_memory_is_that_of_compiled_programs(ways, way):
    check_memory(ways[way])
