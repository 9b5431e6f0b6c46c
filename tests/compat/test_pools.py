"""Every KV pool class of every supported release is in the catalogue, with the releases that have it."""

from __future__ import annotations

import pytest
from packaging.version import Version

from kvcanary_plugin.doctor.seams import ABSTRACT_POOLS, POOL_BASE, POOLS
from kvcanary_plugin.pool_patcher.adapters.catalogue import CATALOGUE
from kvcanary_plugin.pool_patcher.seams import SourceTree
from kvcanary_plugin.versions import CHECKED_SGLANG
from tests.compat.wheels import find_sources


@pytest.mark.parametrize("version", CHECKED_SGLANG)
def test_the_catalogue_has_the_pools_of_the_release(version):
    release = Version(Version(version).base_version)
    found = set(SourceTree(find_sources(version)).list_subclasses(POOLS, POOL_BASE)) - ABSTRACT_POOLS
    listed = {
        entry.pool
        for entry in CATALOGUE
        if Version(entry.since) <= release and (entry.until is None or release <= Version(entry.until))
    }

    assert found - listed == set(), "not in the catalogue"
    assert listed - found == set(), "in the catalogue, but not in this release"
