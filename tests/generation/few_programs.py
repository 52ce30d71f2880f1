"""Engines of few programs, for tests of what they compute: each program takes a second or more to compile."""

import contextlib
import dataclasses
import functools

import pytest

from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.plan import MOVES
from jaxinfer.generation.execution.platforms import buckets_of


class OneSize(Buckets):
    """Buckets of one size each, all of which every request may need."""

    def reachable(self, sequences, config, *, num_pages, lanes=1):
        return self


@contextlib.contextmanager
def few_programs():
    """Within it, engines are made that pad each step to the largest sizes.

    Tests of engines with all sizes show that the sizes change nothing.
    """

    def largest(config, platform, **options):
        buckets = buckets_of(config, platform, **options).largest
        return OneSize(**{field.name: getattr(buckets, field.name) for field in dataclasses.fields(buckets)})

    # Not a function: programs would not be kept for other engines. They do not depend on it, but on sizes.
    replacement = functools.partial(largest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxinfer.generation.execution.plan.MOVES", MOVES[-1:])
        patch.setattr("jaxinfer.generation.execution.plan.buckets_of", replacement)
        yield
