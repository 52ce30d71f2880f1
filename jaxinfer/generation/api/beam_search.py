"""Beam search: the likeliest continuations of a prompt, its beams run as ordinary requests.

A round asks the engine for one token after every live beam. The pages that a beam shares with its parent are in the
prefix cache (full pages shared, the last one copied), so a round computes one token a beam.

The rules are those of `GenerationMixin._beam_search` of transformers 5, without sampling:

1. Candidates are all live beams with one more token, by the sum of their log probabilities. Among the best
   `beam_width`, those that end (a stop token, or `max_tokens`) are finished; the best `beam_width` that do not end live
   on.
2. A finished beam's score is that sum / length ** length_penalty, its stop token counted; the best `beam_width` stay.
3. With `beam_width` beams finished the search is over if `early_stopping`, or else if the best live beam would not
   score higher than the worst finished one if it ended as it is. Otherwise it ends at `max_tokens`.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

from msgspec import Meta

from jaxinfer.fields import AtLeast1, check_fields, shown
from jaxinfer.generation.engine.engine import Engine
from jaxinfer.generation.engine.request import Request, Sequence
from jaxinfer.generation.foreign_options import BEAM_SEARCH, refuses
from jaxinfer.generation.outputs import FinishReason
from jaxinfer.generation.params import MAX_LOGPROBS, SamplingParams, StopTokenIds
from jaxinfer.text import Prompt, TextStream

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10.0

_BeamWidth = Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH, description=f"an integer in [1, {MAX_BEAM_WIDTH}]")]


@refuses(BEAM_SEARCH)
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Options of a search for the likeliest continuations of a prompt.

    Attributes:
      beam_width: beams that live at once.
      n: how many of the best to return.
      max_tokens: how many tokens a beam can have; with the prompt they must fit the context.
      length_penalty: a beam scores its log probability / length ** length_penalty: 0 the plain sum, 1 the mean of its
        tokens; higher prefers longer ones.
      early_stopping: end as soon as `beam_width` beams have finished; False: go on while the best live beam, if it
        ended as it is, would score higher than a finished one. A live beam may still gain by growing if length_penalty
        is above 0, so both can miss a better one.
      stop_token_ids: token ids that end a beam.
      ignore_eos: go on after the model's end-of-text token.
      adapter: the name of one of the engine's LoRA adapters; None: the model as it is.
    """

    beam_width: _BeamWidth = 4
    n: _BeamWidth = 1
    max_tokens: AtLeast1 = 128
    length_penalty: Annotated[
        float,
        Meta(
            ge=-MAX_LENGTH_PENALTY,
            le=MAX_LENGTH_PENALTY,
            description=f"a number in [-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]",
        ),
    ] = 1.0
    early_stopping: bool = False
    stop_token_ids: StopTokenIds = ()
    ignore_eos: bool = False
    adapter: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.n > self.beam_width:
            raise ValueError(f"BeamSearchParams.n must be <= beam_width={self.beam_width}, got {self.n}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beam:
    """A finished beam: `score` is its `cumulative_logprob` / len(token_ids) ** length_penalty."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    cumulative_logprob: float
    score: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearchOutput:
    """The best beams of one prompt, best first; fewer than asked for only if there are no more texts.

    Attributes:
      num_cached_tokens: how many of the prompt's tokens were in the cache at the beginning.
      num_computed_tokens: tokens that went through the model, in all rounds.
      error: the error of a step that failed, or None; there are no beams then.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    beams: list[Beam]
    num_cached_tokens: int
    num_computed_tokens: int
    error: str | None = None


class Hypothesis(NamedTuple):
    """Tokens after the prompt, and the sum of their log probabilities."""

    ids: tuple[int, ...]
    logprob: float


class BeamSearch:
    """The beams of one prompt. `live` is empty when the search is over; `finished` has the best scores first."""

    def __init__(self, params: BeamSearchParams, stop_token_ids: tuple[int, ...]):
        self.live = [Hypothesis((), 0.0)]
        self.finished: list[Hypothesis] = []
        self._params, self._stop_token_ids = params, stop_token_ids

    @property
    def branching(self) -> int:
        """Number of next tokens of each live beam that can matter: `beam_width` that go on, and all that end."""
        return self._params.beam_width + len(self._stop_token_ids)

    def advance(self, following: Iterable[Mapping[int, float]]) -> None:
        """Advance all live beams by one round.

        Args:
          following: the next tokens of each live beam with their log probabilities, the likeliest first: `branching` of
            them, or all there are.
        """
        width = self._params.beam_width
        candidates = [
            Hypothesis((*beam.ids, token), beam.logprob + logprob)
            for beam, tokens in zip(self.live, following, strict=True)
            for token, logprob in tokens.items()
        ]
        candidates.sort(key=lambda c: c.logprob, reverse=True)
        ended = [c for c in candidates[:width] if self._ends(c)]
        self.finished = sorted([*self.finished, *ended], key=self.score, reverse=True)[:width]
        live = [c for c in candidates if not self._ends(c)][:width]
        self.live = [] if live and self._is_over(live[0]) else live

    def score(self, hypothesis: Hypothesis) -> float:
        """Compute the log probability, normalised by length."""
        return hypothesis.logprob / len(hypothesis.ids) ** self._params.length_penalty

    def stopped(self, hypothesis: Hypothesis) -> bool:
        """Return whether its last token is a stop id."""
        return hypothesis.ids[-1] in self._stop_token_ids

    def _ends(self, hypothesis: Hypothesis) -> bool:
        return self.stopped(hypothesis) or len(hypothesis.ids) == self._params.max_tokens

    def _is_over(self, best: Hypothesis) -> bool:
        if len(self.finished) < self._params.beam_width:
            return False
        return self._params.early_stopping or self.score(best) <= self.score(self.finished[-1])


class _Task:
    """The search of one prompt on an engine; creating it checks the prompt.

    Attributes:
      greedy: the prompt's request for `beam_width` greedy completions, which needs the same programs and as many pages.
    """

    def __init__(self, engine: Engine, prompt: Prompt, params: BeamSearchParams):
        self.greedy = engine.prepare(
            prompt,
            SamplingParams(
                max_tokens=params.max_tokens,
                temperature=0.0,
                n=params.beam_width,
                seed=0,
                stop_token_ids=params.stop_token_ids,
                ignore_eos=params.ignore_eos,
                adapter=params.adapter,
            ),
        )
        self._prompt_ids, stop_token_ids = self.greedy.prompt_token_ids, self.greedy.stop_token_ids
        context = engine.config.context
        if (length := len(self._prompt_ids)) + params.max_tokens > context:
            raise ValueError(
                f"The prompt has {length} tokens; max_tokens={params.max_tokens} more do not fit the context of "
                f"{context}. Shorten the prompt, lower max_tokens or raise the context."
            )
        self._search = BeamSearch(params, stop_token_ids)
        if self._search.branching > MAX_LOGPROBS:
            raise ValueError(
                f"BeamSearchParams.beam_width={params.beam_width} and {len(stop_token_ids)} stop tokens, the model's "
                f"included, are more than the {MAX_LOGPROBS} likeliest tokens that a step returns: lower beam_width, "
                "or give fewer stop_token_ids."
            )
        self._engine, self._params = engine, params
        self._next_token = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            seed=0,
            ignore_eos=True,
            logprobs=self._search.branching,
            adapter=params.adapter,
        )
        self._cached: int | None = None
        self._computed = 0
        self._error: str | None = None

    @property
    def over(self) -> bool:
        return self._error is not None or not self._search.live

    def requests(self) -> list[Request]:
        """Make a request for one token after each live beam."""
        return [self._engine.prepare([*self._prompt_ids, *beam.ids], self._next_token) for beam in self._search.live]

    def take(self, answers: list[Sequence]) -> None:
        """Advance the search by the finished sequences of `requests`."""
        self._error = next((s.error for s in answers if s.error is not None), None)
        if self._error is not None:
            return
        if self._cached is None:
            self._cached = answers[0].num_cached_tokens or 0
        self._computed += sum(s.num_prompt_tokens - (s.num_cached_tokens or 0) for s in answers)
        self._search.advance(s.logprobs[0].top for s in answers)

    def output(self) -> BeamSearchOutput:
        best = [] if self._error is not None else self._search.finished[: self._params.n]
        return BeamSearchOutput(
            prompt=self.greedy.prompt,
            prompt_token_ids=list(self._prompt_ids),
            beams=[self._beam(hypothesis) for hypothesis in best],
            num_cached_tokens=self._cached or 0,
            num_computed_tokens=self._computed,
            error=self._error,
        )

    def _beam(self, hypothesis: Hypothesis) -> Beam:
        stopped = self._search.stopped(hypothesis)
        return Beam(
            text=self._text(hypothesis.ids[:-1] if stopped else hypothesis.ids),
            token_ids=list(hypothesis.ids),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            cumulative_logprob=hypothesis.logprob,
            score=self._search.score(hypothesis),
        )

    def _text(self, ids: Iterable[int]) -> str:
        if (tokenizer := self._engine.inputs.tokenizer) is None:
            return ""
        stream = TextStream(tokenizer, self._prompt_ids)
        return "".join(stream.push(token) for token in ids) + stream.flush()


def beam_search(engine: Engine, prompts: Iterable[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
    """Search after every prompt; results in the order of the prompts. Beams beyond the engine's slots queue.

    Raises ValueError, naming the prompt, for one that cannot run, before anything runs.
    """
    if not isinstance(params, BeamSearchParams):
        raise ValueError(f"params must be BeamSearchParams, got {shown(params)}.")
    tasks = []
    for index, prompt in enumerate(prompts):
        try:
            tasks.append(_Task(engine, prompt, params))
        except ValueError as error:
            raise ValueError(f"Prompt {index}: {error}") from error
    # No more prompts at once than there is room for their beams: their pages stay in the cache from round to round.
    together = max(1, engine.config.max_batch // params.beam_width)
    if tasks:
        engine.compile_for([s for task in tasks for s in task.greedy.sequences()])
    waiting, live = deque(tasks), []
    while waiting or live:
        while waiting and len(live) < together:
            live.append(waiting.popleft())
        asked = [(task, [s for request in task.requests() for s in request.sequences()]) for task in live]
        for _ in engine.run([[s] for _, sequences in asked for s in sequences], compiled=True):
            pass
        for task, answers in asked:
            task.take(answers)
        live = [task for task in live if not task.over]
    return [task.output() for task in tasks]
