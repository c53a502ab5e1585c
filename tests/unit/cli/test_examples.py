"""The help of every verb has examples, and every example is a command that parses."""

from __future__ import annotations

import shlex
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

from edge_server.cli.commands import COMMANDS
from edge_server.cli.main import command_line, run_command
from edge_server.cli.verbs import Verb

if TYPE_CHECKING:
    import argparse

ALL = Verb.all_of(COMMANDS)
VERBS = [verb.name for verb in ALL]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return command_line()


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_examples_that_parse(
    name: str, parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_command([*name.split(), "--help"])
    _, _, text = capsys.readouterr().out.partition("examples:\n")
    commands = [line.strip() for line in text.partition("\n\n")[0].splitlines()]
    assert commands
    for command in commands:
        words = shlex.split(command.partition(" | ")[0].partition(" > ")[0].partition(" < ")[0])
        words = words[words.index("edge-server") + 1 :]
        assert " ".join(words).startswith(name)
        arguments, unknown = parser.parse_known_args(words)
        assert not unknown
        assert callable(arguments.verb)


@pytest.mark.parametrize("verb", [verb for verb in ALL if verb.run], ids=lambda v: v.name)
def test_every_verb_runs_a_function_that_there_is(verb: Verb) -> None:
    module, _, function = verb.run.partition(":")
    assert callable(getattr(import_module(f"edge_server.{module}"), function))
