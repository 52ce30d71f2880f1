"""Chat templates of strangers reach nothing, end within their limits, and leave the server free for others."""

import asyncio
import dataclasses
import time

import pytest

pytest.importorskip("starlette")

from jaxinfer import AsyncLLM, http
from tests.generation.conftest import PLAIN
from tests.generation.few_programs import few_programs
from tests.http.asgi import Client

USER = [{"role": "user", "content": "hi"}]
BODY = {"messages": USER, "max_tokens": 1, "temperature": 0}
SLOW = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(64) }}",
    "{{ lipsum(n=10**8) }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99999) %}{% set n.x = (n.x + n.x)[:99999]|sort %}{% endfor %}",
]
"""Each would take minutes or hours."""
REFUSED = [
    "{% for i in range(10**9) %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 'a'|center(10**9) }}",
    "{{ 'ab'|indent(10**9) ~ 'a\\n'|indent(10**9) }}",
    "{{ ('a' * 10**4) | list | join('b' * 10**6) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ 2 ** (10 ** 9) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ '{0.__class__.__mro__}'.format('') | length ** raise_exception.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__'] }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ messages.append(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ open('/etc/passwd').read() }}",
    "{{ lipsum.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
]


@pytest.fixture(scope="module")
def trusting(model_dir):
    with few_programs():
        llm = AsyncLLM(model_dir, trust_request_chat_template=True, max_waiting=64, **PLAIN)
    yield llm
    llm.close()


@dataclasses.dataclass
class Answer:
    status: int
    message: str | None
    seconds: float


async def ask(client, path, body):
    begin = time.monotonic()
    answer = await client.post(path, body)
    content = await answer.json()
    return Answer(answer.status, content.get("error", {}).get("message"), time.monotonic() - begin)


def attack(llm, templates):
    """Send templates one after the other, and completions beside them; returns the answers to both."""
    client = Client(http.app(llm, name="tiny"))

    async def main():
        others, stop = [], asyncio.Event()

        async def beside():
            while not stop.is_set():
                others.append(await ask(client, "/v1/completions", {"prompt": "a", "max_tokens": 1}))
                others.append(await ask(client, "/v1/chat/completions", BODY))
                await asyncio.sleep(0.02)

        await ask(client, "/v1/completions", {"prompt": "a", "max_tokens": 1})
        await ask(client, "/v1/chat/completions", BODY)
        beside_them = asyncio.ensure_future(beside())
        answers = [
            await ask(client, "/v1/chat/completions", BODY | {"chat_template": template}) for template in templates
        ]
        stop.set()
        await beside_them
        return answers, others

    return asyncio.run(asyncio.wait_for(main(), 300))


def check_others(others):
    assert {other.status for other in others} == {200}
    assert max(other.seconds for other in others) < 4


@pytest.mark.slow
def test_templates_that_reach_out_or_take_gigabytes_are_refused(trusting):
    answers, others = attack(trusting, REFUSED)
    passed = [template for template, answer in zip(REFUSED, answers, strict=True) if answer.status != 400]
    assert not passed, passed
    assert not [answer for answer in answers if "/root" in answer.message or "root:" in answer.message]
    check_others(others)
    assert attack(trusting, ["{{ messages[0].content }}"])[0][0].status == 200


@pytest.mark.slow
def test_templates_that_never_end_are_given_up(trusting):
    answers, others = attack(trusting, SLOW)
    assert [(answer.status, answer.message) for answer in answers] == [
        (400, "The chat template takes more than 5 s.")
    ] * len(SLOW)
    assert max(answer.seconds for answer in answers) < 20
    check_others(others)
