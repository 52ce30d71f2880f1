"""Options under an old name are refused with the new one."""

import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.cli.renamed import refuse_renamed


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        (("generate", "DIR"), "--draft-tokens", "--num-speculative-tokens"),
        (("bench", "latency", "DIR"), "--draft-tokens", "--num-speculative-tokens"),
        (("bench", "throughput", "DIR"), "--draft-tokens", "--num-speculative-tokens"),
        (("inspect", "DIR"), "--steps", "--passes"),
    ],
)
@pytest.mark.parametrize("spelling", [lambda option: (option, "7"), lambda option: (f"{option}=7",)])
def test_an_old_name_is_refused_with_the_new_one(command, old, new, spelling):
    done = CliRunner().invoke(app, [*command, *spelling(old)])
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"error: {old} is now {new}.\n")


def test_a_name_that_a_command_never_had_is_unknown():
    done = CliRunner().invoke(app, ["info", "DIR", "--steps", "7"])
    assert done.exit_code == 2
    assert "No such option: --steps" in done.stderr


def test_other_arguments_pass():
    refuse_renamed("generate", ["DIR", "--prompt", "draft-tokens", "--", "--draft-tokens"])
    refuse_renamed(None, ["--draft-tokens"])
