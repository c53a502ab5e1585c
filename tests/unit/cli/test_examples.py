"""The help of every verb has examples, and every example is a command that parses."""

from __future__ import annotations

import shlex

import pytest

from edge_server.cli.examples import verbs_of
from edge_server.cli.main import command_line

VERBS = dict(verbs_of(command_line()))


def examples(name: str) -> list[str]:
    """The commands below `examples:` in the help of a verb."""
    _, _, text = (VERBS[name].epilog or "").partition("examples:\n")
    lines = (line for line in text.partition("\n\n")[0].splitlines() if "edge-server" in line)
    return [line.strip() for line in lines]


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_examples_that_parse(name: str) -> None:
    commands = examples(name)
    assert commands
    for line in commands:
        command = line.removeprefix("source <(").removesuffix(")")
        words = shlex.split(command.partition(" | ")[0].partition(" > ")[0].partition(" < ")[0])
        words = words[words.index("edge-server") + 1 :]
        assert " ".join(words).startswith(name)
        arguments, unknown = command_line().parse_known_args(words)
        assert not unknown
        assert callable(arguments.verb)
