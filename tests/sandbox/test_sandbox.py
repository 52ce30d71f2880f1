"""What strangers write ends within its limits, and harms nobody."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxinfer.sandbox.process import Sandbox
from jaxinfer.sandbox.program import MEMORY_BYTES

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SLOW = [ENDLESS, "{{ lipsum(n=10**8) }}"]
LARGE = [
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "{{ 'a' * 10**9 }}",
    "{{ [1]|tojson(indent=10**9) }}",
    "{{ 'a'|center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ 'a\\nb'|indent(10**10) }}",
    "{{ ('a' * 10**5).replace('a', 'b' * 10**6) }}",
    "{{ range(99999)|list * 10**6 }}",
]
SURE_TO_START = 60.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def templates():
    sandbox = Sandbox("render", "The chat template")
    yield sandbox
    sandbox.close()


def render(sandbox, template, **arguments):
    return sandbox.call(template=template, arguments=arguments)


def peak_bytes(sandbox):
    """The most memory that the process has had, and that it had at its start."""
    status = Path(f"/proc/{sandbox._process.pid}/status").read_text()
    return int(status.partition("VmPeak:")[2].split()[0]) * 1024


def test_templates_are_rendered(templates):
    assert render(templates, "{{ a[0].b }}é", a=[{"b": "\ud800x"}]) == "\ud800xé"
    with pytest.raises(ValueError, match=r"The chat template cannot be read, in line 1: "):
        render(templates, "{% if %}")
    with pytest.raises(ValueError, match="The chat template refuses these messages: no"):
        render(templates, "{{ raise_exception('no') }}")
    assert render(templates, "{{ 1 + 1 }}") == "2"


def test_templates_that_take_much_memory_are_refused(templates):
    render(templates, "")
    start = peak_bytes(templates)
    for template in LARGE:
        with pytest.raises(ValueError, match=r"The chat template takes more than 256.0 MB"):
            render(templates, template)
    assert peak_bytes(templates) < start + 1.1 * MEMORY_BYTES
    with pytest.raises(ValueError, match=r"The chat template writes 10,000,000 characters, at most 8,388,608"):
        render(templates, "{{ 'a' * 10**7 }}")
    assert render(templates, "{{ 1 + 1 }}") == "2"


def test_templates_that_take_long_are_given_up(templates, monkeypatch):
    render(templates, "")
    monkeypatch.setattr(templates, "_seconds", 0.5)
    for template in SLOW:
        begin = time.monotonic()
        with pytest.raises(ValueError, match=r"The chat template takes more than 0.5 s"):
            render(templates, template)
        assert time.monotonic() - begin < SURE_TO_START
        assert templates._process is None
    monkeypatch.undo()
    assert render(templates, "{{ 1 + 1 }}") == "2"


def test_grammars_that_take_long_are_given_up(monkeypatch):
    sandbox = Sandbox("check_grammar", "The grammar")
    arguments = {"kind": "regex", "value": "a+", "whitespace_pattern": None}
    assert sandbox.call(**arguments) is None
    with pytest.raises(ValueError, match=r"StructuredOutputsParams.regex does not compile: "):
        sandbox.call(**arguments | {"value": "a("})
    monkeypatch.setattr(sandbox, "_seconds", 0.5)
    patterns = ", ".join(f'{{"type": "string", "pattern": ".*{i}.*"}}' for i in range(30))
    with pytest.raises(ValueError, match=r"The grammar takes more than 0.5 s"):
        sandbox.call(kind="json", value=f'{{"allOf": [{patterns}]}}', whitespace_pattern=None)
    monkeypatch.undo()
    assert sandbox.call(**arguments) is None
    sandbox.close()


def test_a_process_that_was_killed_is_started_anew(templates):
    render(templates, "")
    first = templates._process
    first.kill()
    first.wait()
    assert render(templates, "{{ 1 + 1 }}") == "2"
    assert templates._process.pid != first.pid


def test_what_dies_with_its_process_is_refused(templates, monkeypatch):
    render(templates, "")
    threading.Timer(0.2, os.kill, (templates._process.pid, signal.SIGKILL)).start()
    with pytest.raises(ValueError, match="The chat template cannot be used: its process has ended"):
        render(templates, ENDLESS)
    assert render(templates, "{{ 1 + 1 }}") == "2"


def test_an_interrupted_call_gives_its_answer_to_nobody(templates):
    """Ctrl-C while the answer is on its way."""
    render(templates, "")
    interrupted, before = [], signal.getsignal(signal.SIGUSR1)

    def interrupt(*_):
        interrupted.append(templates._process)
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR1, interrupt)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            render(templates, ENDLESS)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert interrupted[0].poll() is not None
    assert render(templates, "{{ 1 + 1 }}") == "2"


def test_arguments_larger_than_a_pipe(templates):
    text = "a" * 8_000_000
    assert render(templates, "{{ a }}", a=text) == text


def test_a_process_that_does_not_read_is_given_up(templates, monkeypatch):
    render(templates, "")
    monkeypatch.setattr(templates, "_seconds", 0.5)
    os.kill(templates._process.pid, signal.SIGSTOP)
    with pytest.raises(ValueError, match=r"The chat template takes more than 0.5 s"):
        render(templates, "{{ a }}", a="a" * 1_000_000)
    monkeypatch.undo()
    assert render(templates, "{{ 1 + 1 }}") == "2"


def test_closing_ends_a_call(templates):
    render(templates, "")
    process = templates._process
    threading.Timer(0.2, templates.close).start()
    with pytest.raises(RuntimeError, match="This sandbox is closed"):
        render(templates, ENDLESS)
    process.wait(SURE_TO_START)
    with pytest.raises(RuntimeError, match="This sandbox is closed"):
        render(templates, "")


def test_the_process_ends_with_its_owner(templates):
    other = Sandbox("render", "The chat template")
    render(other, "")
    process = other._process
    del other
    gc.collect()
    assert process.poll() is not None


PROGRAM = """
from jaxinfer.sandbox.process import Sandbox
sandbox = Sandbox("render", "The chat template")
print(sandbox.call(template="{{ 1 + 1 }}", arguments={}), sandbox._process.pid, flush=True)
"""


def test_nothing_of_the_current_folder_runs_and_an_exit_without_close_leaves_nothing(tmp_path):
    for name in ("json", "jinja2", "resource", "typing"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('executed')")
    command = [sys.executable, "-P", "-c", PROGRAM]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    result, pid = done.stdout.split()
    assert result == "2"
    until = time.monotonic() + SURE_TO_START
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


LIMITED = """
import resource, sys
from jaxinfer.sandbox.program import limit_memory
hard = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
limit_memory(256_000_000)
print(resource.getrlimit(resource.RLIMIT_AS)[0] < hard)
"""


@pytest.mark.parametrize(("hard", "lowered"), [(1 << 36, "True"), (200_000_000, "False")])
def test_a_limit_that_the_system_has_set_stays(hard, lowered):
    done = subprocess.run([sys.executable, "-c", LIMITED, str(hard)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, lowered, "")
