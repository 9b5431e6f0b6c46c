"""What opening and using a page file can raise.

PageFileError          base; the message names the file, what is wrong and what to do
├── NotAPageFile       no valid header, or written by a version of the format that this one cannot read
├── GeometryMismatch   the pages in it were made for another model, dtype, layout, size or rank
├── CapacityMismatch   the file was made with another capacity
├── InUse              another live process has it open for writing
└── Superseded         another process has taken the file over; this one must not write to it any more
"""

from __future__ import annotations

from ...errors import KvcanaryError


class PageFileError(KvcanaryError):
    """A page file cannot be used; the message names the file, what is wrong and what to do."""


class NotAPageFile(PageFileError):  # noqa: N818 - a condition, like FileNotFoundError without the suffix
    """Neither copy of the header is valid, or the file has a format version that this one cannot read."""


class GeometryMismatch(PageFileError):  # noqa: N818
    """The pages in the file were made under another geometry; the message names every field that differs."""


class CapacityMismatch(PageFileError):  # noqa: N818
    """The file exists with another number of slots than the capacity asked for would give."""


class InUse(PageFileError):  # noqa: N818
    """Another live process has the file open for writing."""


class Superseded(PageFileError):  # noqa: N818
    """Another process has opened the file for writing since; what this one knows about it is no longer true."""
