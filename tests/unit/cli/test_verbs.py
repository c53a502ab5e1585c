"""A verb is declared by its help: what stands there is what the command line takes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from edge_server.cli.verbs import Verb, add_arguments, add_verbs

TEXT = """\
FILE  what is read, and how; 100 % of it
[DIR]
-q, --quiet  say less
--count N = 3  of what
--require WHAT...  repeatable
--kind {a,b} = a
--serve [PORT=8000]  at this port
--to REPO!  where to,
    in the end
sweep:
--delays US,… = 0,10
"""


def parse(text: str, *words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    list(add_arguments(parser, text))
    return vars(parser.parse_args(words))


def test_each_form_of_an_argument_is_read_as_its_word_has_it() -> None:
    usual = {
        "file": Path("x"),
        "dir": None,
        "quiet": False,
        "count": 3,
        "require": [],
        "kind": "a",
        "serve": None,
        "to": "r",
        "delays": (0, 10),
    }
    assert parse(TEXT, "x", "--to", "r") == usual
    words = "x d --to r -q --count 5 --require a --require b --kind b --serve --delays 1:2"
    assert parse(TEXT, *words.split()) == {
        **usual,
        "dir": Path("d"),
        "quiet": True,
        "count": 5,
        "require": ["a", "b"],
        "kind": "b",
        "serve": 8000,
        "delays": (1, 2),
    }
    assert parse("PICTURES...", "a", "b") == {"pictures": [Path("a"), Path("b")]}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["x"], "the following arguments are required: --to"),
        (["--to", "r"], "the following arguments are required: FILE"),
        (["x", "--to", "r", "--kind", "c"], "invalid choice: 'c'"),
        (["x", "--to", "r", "--count", "0"], "0: give a whole number, 1 or above"),
    ],
)
def test_what_does_not_fit_is_a_usage_error(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(TEXT, *words)
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--image", "a", "--input", "x=y"]])
def test_of_flags_behind_a_bar_exactly_one_is_given(words: list[str]) -> None:
    text = "|--image URI\n|--input NAME=FILE..."
    assert parse(text, "--image", "a")["image"] == "a"
    with pytest.raises(SystemExit):
        parse(text, *words)


def test_a_verb_has_what_its_text_says() -> None:
    above, below = Verb.all_of(
        "goods | | what there is\n"
        "  About goods.\n"
        "  exit codes: 0 done\n"
        "  ! interrupted; all is there\n"
        "\n"
        "goods list | cli.goods:show | the goods\n"
        "    --json  one object\n"
        "    @place\n"
        "  $ --json\n"
        "  $ --place x\n"
        "\n"
        "@place\n"
        "    --place DIR  where\n"
    )
    assert (above.about, above.codes) == ("About goods.", "exit codes: 0 done")
    assert below.arguments == "--json  one object\n--place DIR  where"
    assert below.examples == ("--json", "--place x")
    parser = argparse.ArgumentParser()
    added = add_verbs("edge-server", parser.add_subparsers(), (above, below))
    assert [action.dest for action in added] == ["json", "place"]
    given = parser.parse_args(["goods", "list", "--place", "x"])
    assert (given.verb, given.flags) == (below, ["--json", "--place"])
    assert given.interrupted == "interrupted; all is there"
