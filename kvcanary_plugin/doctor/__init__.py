"""``kvcanary doctor``: what is installed, whether the plugin can work here, and what it would cover."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from .checkup import Checkup


def add_command(commands: Any) -> None:
    """Add ``doctor`` to what ``add_subparsers`` has returned."""
    parser = commands.add_parser(
        "doctor",
        help="Show what is installed, whether kvcanary can work here, and what it would check in a server. "
        "Exit code 1 if something would keep it from working.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="Print one JSON object and nothing else.")
    form.add_argument("--verbose", action="store_true", help="List every seam, also where all are as expected.")
    parser.add_argument(
        "--kvcanary-hf3fs",
        dest="hf3fs",
        metavar="PATH",
        help="Look at the storage tier in this folder. Default: that of the server's command line, or KVCANARY_HF3FS",
    )
    parser.add_argument(
        "server",
        nargs="*",
        metavar="-- COMMAND",
        help="A server's command line, to say what would be checked and what refused: "
        "-- sglang serve --model-path M --kvcanary log",
    )


def run_doctor(options: argparse.Namespace, console: Console) -> int:
    """Look, and print what was found. Returns 1 if something would keep kvcanary from working, else 0."""
    from .render import render_json, render_text

    with _quiet_output():
        checkup = examine(options.server, options.hf3fs)
    if options.json:
        print(render_json(checkup), file=console.file)
    else:
        render_text(checkup, console, is_verbose=options.verbose)
    return checkup.code


def examine(server: list[str], hf3fs: str | None) -> Checkup:
    """Everything but the printing. ``server`` is a command line, empty for none."""
    from .. import __version__
    from .checkup import Checkup
    from .command_line import ask_plan, judge, split_command
    from .environment import current_environment, examine_environment
    from .gpu import examine_gpu
    from .seams import examine_seams
    from .storage import examine_storage

    variables, arguments = split_command(server)
    environment = current_environment() | variables
    # Flags beat variables: with a command line it is the plan that tells whether the settings can be used.
    sections = [
        examine_environment(environment, check_settings=not server),
        examine_gpu(),
        *examine_seams(),
    ]
    if server:
        plan = ask_plan(arguments, environment)
        sections.append(judge(plan))
        hf3fs = hf3fs or plan.config.hf3fs
    hf3fs = hf3fs or environment.get("KVCANARY_HF3FS", "").strip() or None
    if hf3fs:
        sections.append(examine_storage(hf3fs))
    return Checkup(__version__, tuple(sections))


@contextmanager
def _quiet_output() -> Iterator[None]:
    """What SGLang and its libraries print while they are imported goes to the error output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
