"""What the pages say is there: commands that parse, targets and files that exist, links that lead somewhere."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
import yaml
from sglang.srt.server_args import ServerArgs

from kvcanary_plugin import activate
from kvcanary_plugin.cli import make_parser
from kvcanary_plugin.config import OPTIONS, read_config
from kvcanary_plugin.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
PROGRAMS = sorted(ROOT.glob("examples/*.py"))
STARTS = ("kvcanary ", "make ", "pip ", "sglang serve", "python -m sglang", ".venv/bin/python ")
INSTALLS = ("pip install .", "pip install '.[redis]'", "pip install redis", "pip uninstall kvcanary")
VARIABLE = re.compile(r"^KVCANARY\w*=\S* ")


def commands_of(path: Path) -> list[str]:
    """Commands in indented blocks and code spans of a page, or in the docstring of a program; lines are joined."""
    text = path.read_text().replace("\\\\\n", "\\\n").replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        spans = re.findall(r"`([^`]+)`", line)
        if line.startswith("    ") and not line.lstrip().startswith(("$ ", 'f"', "print")):
            spans = [re.sub(r"\s+# .*$", "", line)]
        for span in spans:
            command = span.strip()
            while VARIABLE.match(command):
                command = VARIABLE.sub("", command, count=1).strip()
            if command.startswith(STARTS):
                found.append(command)
    return found


COMMANDS = [
    pytest.param(command, id=f"{path.name}: {command}"[:100])
    for path in [*PAGES, *PROGRAMS]
    for command in dict.fromkeys(commands_of(path))
]


@pytest.fixture
def server_parser():
    activate.activate()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    yield parser
    activate.deactivate()


def parse_server(parser: argparse.ArgumentParser, words: list[str]) -> None:
    options = parser.parse_args(words)
    flags = {option.field: getattr(options, option.dest, None) for option in OPTIONS}
    flags = {field: value for field, value in flags.items() if value not in (None, False)}
    read_config({"KVCANARY_ALLOW_INJECT": "1"}, flags)


def commands_in(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands by name."""
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(commands.choices)


def test_there_are_commands():
    assert len(COMMANDS) > 40


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_that_exists(command: str, server_parser: argparse.ArgumentParser):
    first, _, rest = command.partition(" ")
    if first == "kvcanary":
        words = shlex.split(rest.replace("[", "").replace("]", ""))
        if len(words) == 1 and words[0] in commands_in(make_parser()):
            return  # only the name of a command
        if any(word.endswith("...") or word == "|" for word in words):  # a synopsis
            command_parser = commands_in(make_parser())[words[0]]
            known = {flag for action in command_parser._actions for flag in action.option_strings}
            assert {word for word in words if word.startswith("--")} <= known
            return
        if "--" in words:
            words, server = words[: words.index("--")], words[words.index("--") + 1 :]
            parse_server(server_parser, server)
        make_parser().parse_args(words)
    elif first == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert rest.split()[0] in targets
    elif first == "pip":
        assert command in INSTALLS
    elif first == ".venv/bin/python":
        module = rest.split()
        paths = [word for word in module if "/" in word]
        assert all("NAME" in path or (ROOT / path).exists() for path in paths)
    elif "..." not in command and not command.endswith(" --help"):
        words = shlex.split(command.replace("sglang serve", "").replace("python -m sglang.launch_server", ""))
        parse_server(server_parser, words)


@pytest.mark.parametrize(
    "command",
    ["kvcanary fcsk FILE", "kvcanary set --mood raise", "make tset", "sglang serve --model-path M --kvcanary loud"],
)
def test_a_command_that_does_not_exist_is_noticed(command: str, server_parser: argparse.ArgumentParser):
    with pytest.raises((AssertionError, SystemExit, ConfigError)):
        test_a_command_is_one_that_exists(command, server_parser)


def anchors_of(page: Path) -> set[str]:
    """Anchors of the headings, as they are made from them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors_of(file), target


def test_every_alert_has_its_line_in_operations():
    rules = yaml.safe_load((ROOT / "examples/prometheus/alerts.yml").read_text())
    named = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    told = set(re.findall(r"`(Kvcanary\w+)`", (ROOT / "docs/operations.md").read_text()))
    assert named == told


def test_the_readme_tells_of_every_flag_and_fault():
    from kvcanary_plugin.faults.injector import FAULTS

    readme = (ROOT / "README.md").read_text()
    assert [option.flag for option in OPTIONS if option.flag not in readme] == []
    assert [option.variable for option in OPTIONS if option.variable not in readme] == []
    assert [fault for fault in FAULTS if f"`{fault}`" not in readme] == []
