"""Choosing the backend: the flag, its variable, and the seams it needs."""

import json

import pytest
from host_pools import make_config, make_mha
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.server_args import ServerArgs

from kvcanary_plugin.config import Config, read_config
from kvcanary_plugin.errors import ConfigError
from kvcanary_plugin.patches import hf3fs
from kvcanary_plugin.pool_patcher.patch import PatchSet
from kvcanary_plugin.runtime.session import Session
from kvcanary_plugin.tiers import finding, scope
from kvcanary_plugin.tiers.guarded_storage import GuardedStorage
from kvcanary_plugin.tiers.hf3fs.options import parse_options, to_extra_config
from kvcanary_plugin.versions import installed_sglang


def arguments(**changes):
    import argparse

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    namespace = parser.parse_args(["--model-path", "m", "--enable-hierarchical-cache"])
    for name, value in changes.items():
        setattr(namespace, name, value)
    return namespace


def test_the_flag_becomes_sglang_s_own_arguments():
    namespace = arguments(hicache_storage_backend_extra_config='{"prefetch_threshold": 64}')
    hf3fs.choose_storage("/mnt/3fs/kv?capacity=2TiB&client=usrbio&identity.weights=7", namespace)
    extra = json.loads(namespace.hicache_storage_backend_extra_config)
    assert namespace.hicache_storage_backend == "dynamic"
    assert extra.pop("prefetch_threshold") == 64, "SGLang takes its own out before the backend sees them"
    assert extra["interface_v1"] == 1
    options = parse_options(extra)
    assert (options.path, options.capacity_bytes, options.client) == ("/mnt/3fs/kv", 2 * 2**40, "usrbio")
    assert options.identity == {"weights": "7"}
    hf3fs.choose_storage("/mnt/3fs/kv?capacity=2TiB&client=usrbio&identity.weights=7", namespace)
    assert json.loads(namespace.hicache_storage_backend_extra_config)["prefetch_threshold"] == 64, "twice is fine"


def test_nothing_asked_nothing_changed():
    namespace = arguments()
    hf3fs.choose_storage(None, namespace)
    assert namespace.hicache_storage_backend is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_hierarchical_cache": False}, "add --enable-hierarchical-cache"),
        ({"hicache_storage_backend": "file"}, "--hicache-storage-backend file exclude each other"),
        ({"hicache_storage_backend_extra_config": "@x.toml"}, "JSON object; it is '@x.toml'"),
        ({"hicache_storage_backend_extra_config": "3"}, "JSON object"),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        hf3fs.choose_storage("/tmp/kv", arguments(**changes))


def test_flag_and_variable():
    assert read_config({"KVCANARY_HF3FS": "/a"}, {}).hf3fs == "/a"
    assert read_config({"KVCANARY_HF3FS": "/a"}, {"hf3fs": "/b?threads=8"}).hf3fs == "/b?threads=8"
    with pytest.raises(ConfigError, match=r"capacity='x' is no size.*in KVCANARY_HF3FS"):
        read_config({"KVCANARY_HF3FS": "/a?capacity=x"})


@pytest.mark.parametrize(
    ("text", "size"), [("64GiB", 2**36), ("1T", 2**40), ("1.5 MiB", 3 * 2**19), ("4096", 4096), (8192, 8192)]
)
def test_sizes(text, size):
    assert parse_options({"path": "/a", "capacity": text}).capacity_bytes == size


def test_defaults_need_a_path_only():
    options = parse_options(json.loads(to_extra_config("/a")))
    assert (options.client, options.index, options.is_shared, options.uses_redis) == ("local", None, False, False)


@pytest.fixture
def session():
    session = Session(Config(mode="log"))
    patches = PatchSet(hf3fs.declare_patches(session))
    patches.install(installed_sglang())
    yield session
    patches.uninstall()
    finding.listen(None)


def test_any_backend_is_guarded_while_the_canary_is_on(session, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "files"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pool = make_mha()
    backend = StorageBackendFactory.create_backend("file", make_config({}), pool)
    assert type(backend) is GuardedStorage
    assert type(backend.backend) is HiCacheFile
    backend.close()


def test_wrapping_is_undone(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "files"))
    before = vars(StorageBackendFactory)["create_backend"]
    patches = PatchSet(hf3fs.declare_patches(Session(Config(mode="log"))))
    patches.install(installed_sglang())
    patches.uninstall()
    assert vars(StorageBackendFactory)["create_backend"] is before
    assert type(StorageBackendFactory.create_backend("file", make_config({}), make_mha())) is HiCacheFile


def test_scope_alone_is_undone():
    from sglang.srt.managers.cache_controller import HiCacheController, StorageOperation

    before = vars(StorageOperation)["__init__"], vars(HiCacheController)["_page_backup"]
    scope.install()
    scope.install()
    assert vars(StorageOperation)["__init__"] is not before[0]
    scope.uninstall()
    assert (vars(StorageOperation)["__init__"], vars(HiCacheController)["_page_backup"]) == before


def test_a_finding_reaches_the_session_s_reporter(session, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "files"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    events = []
    monkeypatch.setattr(session.reporter, "event", lambda name, fields: events.append((name, fields)))
    pool = make_mha("layer_first")
    backend = StorageBackendFactory.create_backend("file", make_config({}), pool)
    backend.register_mem_pool_host(pool)
    backend.set("a" * 64, pool.get_data_page(0))
    path = next((tmp_path / "files").glob("*.bin"))
    path.write_bytes(bytes([1]) * path.stat().st_size)
    assert backend.get("a" * 64, pool.get_dummy_flat_data_page()) is None
    assert [(name, fields["check"], fields["tier"]) for name, fields in events] == [("violation", "content", "storage")]
    assert session.reporter.counts["content"] == 1
    backend.close()
