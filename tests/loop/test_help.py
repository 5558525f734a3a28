"""Help costs no import of anything heavy, and says what a newcomer has to know."""

import shlex
import time

import pytest
import typer

import cast_engine.cli
import trainer.cli
from cast_engine.errors import EXIT_CODES, ExitCode
from tests.loop.commands import spawn


@pytest.mark.parametrize("args", [("cast-engine",), ("cast-train",), ("cast-engine", "run")])
def test_help_takes_less_than_a_second(args):
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        result = spawn(*args, "--help")
        seconds.append(time.monotonic() - started)
        assert result.code == 0, result.err
        assert "Usage:" in result.out
    assert min(seconds) < 1


ENGINE = typer.main.get_command(cast_engine.cli.app)
COMMANDS = {f"cast-engine {name}": command for name, command in ENGINE.commands.items()}
COMMANDS["cast-train"] = typer.main.get_command(trainer.cli.app)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_examples_that_parse_and_the_exit_codes(name):
    command = COMMANDS[name]
    examples = [line.strip() for line in command.epilog.splitlines() if line.startswith("  ")]
    examples = [line for line in examples if not line.startswith("cd ")]
    assert examples
    assert EXIT_CODES in command.epilog
    for line in examples:
        assert line.startswith(f"{name} ")
        context = command.make_context(name, shlex.split(line.removeprefix(name)))
        assert context.params
    for parameter in command.params:
        if parameter.name != "help":
            assert parameter.help, f"{name} {parameter.name}"
            assert parameter.help.endswith((".", "help")), parameter.help


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_that_may_be_left_out_names_its_default(name):
    may_be_left_out = [p for p in COMMANDS[name].params if not p.required and p.param_type_name == "option"]
    for option in may_be_left_out:
        if not (option.is_flag or option.name in {"overrides", "show"}):
            assert option.show_default, f"{name} {option.name}"


def test_all_exit_codes_are_listed():
    listed = {int(part.split()[0]) for part in EXIT_CODES.removeprefix("Exit codes: ").split("; ")}
    assert listed == set(ExitCode)


def test_the_list_of_commands_cuts_no_sentence_off():
    out = spawn("cast-engine", "--help").out
    assert "..." not in out.partition("Commands:")[2]
    assert EXIT_CODES.split(";", 1)[0] in out
