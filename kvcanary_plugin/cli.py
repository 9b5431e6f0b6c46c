"""Command ``kvcanary``: ``doctor`` looks at an installation, ``demo`` shows the canary on a server of its own, ``fsck``
checks a page file.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings

from rich.console import Console

from . import __version__, doctor, remote
from .report import command


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="kvcanary", description="AddressSanitizer for the KV cache of an SGLang server."
    )
    parser.add_argument("--version", action="version", version=f"kvcanary {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor.add_command(commands)
    commands.add_parser(
        "demo",
        help="Start a tiny server on the CPU, damage its KV in five ways and show every report; one to two minutes, "
        "more on a busy machine. Exit code 0 only if every fault was found in the right place and nothing else was "
        "reported.",
    )
    fsck = commands.add_parser(
        "fsck",
        help="Check a page file of the storage tier. "
        "Exit code 0 if it is clean, 1 if damage was found, 2 if it is no page file or in use.",
    )
    fsck.add_argument("file", metavar="FILE", help="The page file.")
    fsck.add_argument("--deep", action="store_true", help="Read every page too, not only headers and trailers.")
    fsck.add_argument("--repair", action="store_true", help="Drop damaged pages; good ones are never touched.")
    remote.add_commands(commands)
    command.add_command(commands)
    for summary in commands._choices_actions:
        commands.choices[summary.dest].description = summary.help  # with its exit codes
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = make_parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    if options.command == "doctor":
        # Importing SGLang on a machine without its accelerator is chatty; what matters is in the table.
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        return doctor.run_doctor(options, console)
    if options.command in ("status", "set", "audit"):
        return remote.run_remote(options, console)
    if options.command == "report":
        return command.run_report(options)
    if options.command == "fsck":
        from .tiers.hf3fs.fsck import run_fsck

        return run_fsck(options.file, console, deep=options.deep, repair=options.repair)
    from .demo.story import run_demo

    return run_demo(console)


if __name__ == "__main__":
    raise SystemExit(main())
