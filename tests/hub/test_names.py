import pytest

from jaxinfer.hub import HubName


@pytest.mark.parametrize(
    ("text", "repository", "revision", "tag"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "main", ""),
        ("org/name_1.5@v1.0", "org/name_1.5", "v1.0", ""),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3", ""),
        ("org/name:UD-Q4_K_XL", "org/name", "main", "UD-Q4_K_XL"),
        ("org/name@v1.0:Q8_0", "org/name", "v1.0", "Q8_0"),
    ],
)
def test_reads_a_repository_its_revision_and_a_tag(text, repository, revision, tag):
    assert HubName.parse(text) == HubName(repository, revision, tag)
    assert str(HubName.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["nothere", "./org/name", "../name", "/org/name", "a/b/c", "org/na me", "org/", "org/n@", "org/n:", "org/n:a/b"],
)
def test_what_can_only_be_a_path_is_no_repository(text):
    assert HubName.parse(text) is None


def test_a_commit_alone_pins():
    assert HubName.parse("org/name@" + "a1" * 20).pinned
    assert not HubName.parse("org/name@a1a1a1a").pinned
