import pytest

from jaxinfer.generation import LLM
from jaxinfer.generation.engine.config import EngineConfig
from tests.generation import sampled
from tests.generation.few_programs import few_programs
from tests.generation.ways import Ways

# One small engine for many tests, whose programs the cache of a run then has. A request takes up to 8 of the pages.
SMALL = {"max_batch": 4, "context": 64, "page_size": 8, "token_budget": 16, "chunk_size": 16, "max_decode_passes": 4}
SMALL_CONFIG = EngineConfig(**SMALL)
SMALL_PAGES = 14
PLAIN = {"max_batch": 4, "token_budget": 32, "chunk_size": 32}
PAGE_BYTES = 16 * 2 * 2 * 2 * 8 * 4  # of `llm`: tokens, keys and values, layers, KV heads, head_dim, float32
SMALL_BYTES = SMALL_PAGES * PAGE_BYTES // 2


@pytest.fixture(scope="session")
def llm(model_dir):
    """One device, with few programs. Tests that build it again find them in the cache of this run."""
    with few_programs():
        return LLM(model_dir, **PLAIN)


@pytest.fixture(scope="session")
def small_llm(model_dir):
    """One device, with programs of all sizes."""
    return LLM(model_dir, cache_bytes=SMALL_BYTES, **SMALL)


@pytest.fixture(scope="session")
def processing_llm(model_dir):
    """One device, for all that is compared with it. Programs with logits processors are compiled for every engine."""
    processors = {"even": sampled.only_even, "next": sampled.next_of_last}
    return LLM(model_dir, max_decode_passes=4, logits_processors=processors, **sampled.SIZES)


@pytest.fixture(scope="session")
def ways(tmp_path_factory):
    """The engines of `tests.generation.ways`."""
    return Ways(tmp_path_factory.mktemp("ways"))
