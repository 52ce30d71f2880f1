"""Renamed options: the old name is refused with a message that gives the new one."""

RENAMED = {
    "bench": {"--draft-tokens": "--num-speculative-tokens"},
    "generate": {"--draft-tokens": "--num-speculative-tokens"},
    "inspect": {"--steps": "--passes"},
}
"""Command -> old name -> new name."""


def refuse_renamed(command: str | None, args: list[str]) -> None:
    """Raise ValueError if a command's arguments have an option under its old name, as `--old value` or `--old=value`.

    Arguments after `--` are not options.
    """
    renamed = RENAMED.get(command or "", {})
    for arg in args:
        if arg == "--":
            return
        name = arg.split("=", 1)[0]
        if name in renamed:
            raise ValueError(f"{name} is now {renamed[name]}.")
