import pytest

from jaxinfer.hub import HubName


@pytest.mark.parametrize(
    ("text", "repository", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "main"),
        ("org/name_1.5@v1.0", "org/name_1.5", "v1.0"),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
    ],
)
def test_reads_a_repository_and_its_revision(text, repository, revision):
    assert HubName.parse(text) == HubName(repository, revision)
    assert str(HubName.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["nothere", "./org/name", "../name", "/org/name", "a/b/c", "org/na me", "org/", "org/n@"]
)
def test_what_can_only_be_a_path_is_no_repository(text):
    assert HubName.parse(text) is None


def test_a_commit_alone_pins():
    assert HubName.parse("org/name@" + "a1" * 20).pinned
    assert not HubName.parse("org/name@a1a1a1a").pinned
