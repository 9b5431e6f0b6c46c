"""Small stores over real page files, for tests."""

import torch

from kvcanary_plugin.tiers.hf3fs.geometry import Geometry
from kvcanary_plugin.tiers.hf3fs.layout import Layout
from kvcanary_plugin.tiers.hf3fs.page_file import PageFile
from kvcanary_plugin.tiers.hf3fs.redis_index import RedisIndex
from kvcanary_plugin.tiers.hf3fs.sqlite_index import SqliteIndex
from kvcanary_plugin.tiers.hf3fs.store import PageStore

PAGE_BYTES = 4096
GEOMETRY = Geometry((("model", "test"),), PAGE_BYTES)


def key(number):
    return number.to_bytes(16, "big")


def page(number, version=0):
    """K and V of a page, apart from each other; every page has other bytes."""
    words = torch.arange(PAGE_BYTES // 8, dtype=torch.int64) * 1_000_003 + number * 7919 + version * 104_729 + 1
    whole = words.view(torch.uint8)
    return whole[: PAGE_BYTES // 2].clone(), whole[PAGE_BYTES // 2 :].clone()


def blank():
    return torch.full((PAGE_BYTES // 2,), 0xEE, dtype=torch.uint8), torch.full(
        (PAGE_BYTES // 2,), 0xEE, dtype=torch.uint8
    )


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def capacity(slots):
    """The size of a file with exactly that many slots."""
    return Layout(PAGE_BYTES, 0, slots).file_bytes


class Damages(list):
    def __call__(self, found):
        self.extend(found)

    @property
    def reasons(self):
        return [damage.reason for damage in self]


def open_file(folder, name="pages", **options):
    options.setdefault("capacity_bytes", capacity(8))
    return PageFile.open(folder / name, GEOMETRY, **options)


def open_store(folder, *, redis_url=None, name="pages", damages=None, **options):
    file = open_file(folder, name, **options)
    if redis_url:
        index = RedisIndex(redis_url, file.uuid.hex(), path=str(folder / name))
    else:
        index = SqliteIndex(folder / f"{name}.index", file.uuid.hex())

    def open_other(path):
        return PageFile.open(path, GEOMETRY, capacity_bytes=capacity(8), read_only=True, create=False)

    return PageStore(file, index, open_other=open_other, on_damage=damages if damages is not None else Damages())
