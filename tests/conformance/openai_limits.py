"""What a user of the `openai` client meets at a server with a key that runs one request at a time.

openai_limits.py URL MODEL KEY
"""

import sys

import openai

URL, MODEL, KEY = sys.argv[1:]
OPTIONS = {"model": MODEL, "prompt": "a", "extra_body": {"ignore_eos": True}}


def client(key, **options):
    return openai.OpenAI(base_url=f"{URL}/v1", api_key=key, timeout=120, **options)


def caught(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} expected")


def keys():
    for key in ("wrong", f"{KEY}2", KEY[:-1]):
        error = caught(openai.AuthenticationError, lambda key=key: client(key).completions.create(**OPTIONS))
        assert error.status_code == 401
    assert client(KEY).completions.create(max_tokens=4, **OPTIONS).usage.completion_tokens == 4


def overload():
    stream = client(KEY).completions.create(max_tokens=900, stream=True, **OPTIONS)
    next(iter(stream))
    once = client(KEY, max_retries=0).completions
    error = caught(openai.RateLimitError, lambda: once.create(max_tokens=4, **OPTIONS))
    assert int(error.response.headers["retry-after"]) >= 1
    stream.close()
    patient = client(KEY, max_retries=8).completions
    assert patient.create(max_tokens=4, **OPTIONS).usage.completion_tokens == 4


for check in (keys, overload):
    check()
    print(check.__name__, flush=True)
