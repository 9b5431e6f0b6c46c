"""``kvcanary report``: what one or several event logs say, as text, as JSON, or as a page."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ..errors import KvcanaryError

CLEAN, DAMAGED, UNUSABLE = range(3)  # exit codes
DEFAULT_TOP = 20


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``kvcanary``."""
    parser = commands.add_parser(
        "report",
        help="Say what event logs (--kvcanary-log) record: counts, servers, and a block for each finding. Exit code 0 "
        "if no damage is recorded, 1 if some is, injected faults included, 2 if a file is no event log.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="An event log; those of several ranks are merged.")
    parser.add_argument(
        "--top",
        metavar="N",
        type=_read_count,
        default=DEFAULT_TOP,
        help=f"How many findings are told in full, 0 for all; --json has all. Default: {DEFAULT_TOP}.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="Print one JSON document instead of text.")
    form.add_argument("--html", metavar="PAGE", help="Write a page with a timeline and a map of the pool instead.")
    parser.add_argument("--force", action="store_true", help="Let --html replace a file that exists.")


def run_report(options: argparse.Namespace) -> int:
    """Run the command and return its exit code. Standard output gets the report, standard error what went wrong."""
    from .collector import summarise
    from .document import make_document
    from .page import check_target, write_page
    from .terminal import render_text

    try:
        if options.html:
            check_target(Path(options.html), options.files, force=options.force)
        summary = summarise(options.files)
        if options.html:
            size = write_page(summary, Path(options.html), top=options.top, force=options.force)
            _print(f"kvcanary: wrote {_escape(options.html)} ({size / 1024:.0f} KiB)")
        elif options.json:
            _print(make_document(summary))
        else:
            for piece in render_text(summary, options.top):
                _print(piece)
        sys.stdout.flush()
    except KvcanaryError as error:
        print(_escape(str(error)), file=sys.stderr)
        return UNUSABLE
    except BrokenPipeError:  # whoever reads has seen enough, as `head` has; nothing more can be said to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DAMAGED if summary.has_damage else CLEAN


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def _escape(text: str) -> str:
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _read_count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = -1
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; give a whole number, or 0 for all")
    return count
