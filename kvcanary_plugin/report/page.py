"""The report as one page that needs nothing else: no script, no network, no other file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from .. import __version__
from ..errors import KvcanaryError
from .chart import draw_maps, draw_timeline
from .facts import server_facts, tell_cut, verdict
from .format import show_count, show_counts, show_slots, show_time
from .layout import lay_out, name_tier
from .summary import Summary
from .text import quote_clause

MODE = 0o640  # request ids and slots are nobody else's business


class PageError(KvcanaryError):
    """A page cannot be written; names the file and the next step."""


def render_page(summary: Summary, *, top: int) -> str:
    """The page as HTML; ``top`` findings are told in full, all of them if it is 0."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_clean,
    )
    environment.globals.update(
        lay_out=lay_out, name_tier=name_tier, server_facts=server_facts, tell_cut=tell_cut, count=show_count
    )
    environment.globals.update(time=show_time, counts=show_counts, slots=show_slots, clause=quote_clause)
    template = environment.from_string(resources.files(__package__).joinpath("page.html.j2").read_text("utf-8"))
    shown = summary.findings[:top] if top else summary.findings
    return template.render(
        summary=summary,
        verdict=verdict(summary),
        tone=_tone(summary),
        findings=shown,
        rest=len(summary.findings) - len(shown),
        timeline=draw_timeline(summary),
        maps=draw_maps(summary),
        version=__version__,
    )


def check_target(path: Path, sources: Sequence[str], *, force: bool) -> None:
    """Before anything is read: may the page be written to ``path``?

    Raises:
        PageError: the file exists and is not to be replaced, is one of the logs, or is no regular file.
    """
    if not path.is_symlink() and not path.exists():
        return
    if any(os.path.exists(source) and os.path.samefile(source, path) for source in sources if path.exists()):
        raise PageError(f"kvcanary: {path} is the log itself; give --html another name")
    if not path.is_file():
        raise PageError(f"kvcanary: {path} exists and is no regular file; give --html another name")
    if not force:
        raise PageError(f"kvcanary: {path} exists; give --html another name, or add --force to replace it")


def write_page(summary: Summary, path: Path, *, top: int, force: bool = False) -> int:
    """Write the page to ``path``, all of it or nothing, readable by owner and group. Returns its size in bytes.

    Raises:
        PageError: the file exists and is not to be replaced, or cannot be written.
    """
    content = render_page(summary, top=top).encode("utf-8", "backslashreplace")
    try:
        if force:
            descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
        else:
            descriptor, name = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE), str(path)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                os.fchmod(file.fileno(), MODE)
            os.replace(name, path)  # without force, onto itself
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except FileExistsError:
        raise PageError(f"kvcanary: {path} exists; give --html another name, or add --force to replace it") from None
    except OSError as error:
        why = f"kvcanary: cannot write {path}: {error.strerror}; give --html a name in a folder that can be written to"
        raise PageError(why) from error
    return len(content)


def _tone(summary: Summary) -> str:
    if summary.event_count == 0:
        return "unknown"
    if summary.violation_count > summary.drill_count or summary.alarms:
        return "bad"
    if summary.has_damage:
        return "drill" if summary.violation_count and not summary.hidden_count else "bad"
    return "good"


def _clean(value: object) -> object:
    """What is put into the page: control and bidirectional characters would turn its text around."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return "".join(
            letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in value
        )
    return value
