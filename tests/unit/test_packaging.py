"""What is installed: the wheel's contents and metadata, and the entry points of the editable installation."""

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import kvcanary_plugin
import kvcanary_plugin.patches

ROOT = Path(__file__).parents[2]
PEERS = ("sglang", "torch", "triton")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """A wheel of a copy of the tree, so that neither build/ nor an old egg-info can add to it or be left behind."""
    work = tmp_path_factory.mktemp("wheel")
    tree, dist = work / "tree", work / "dist"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, f"--wheel-dir={dist}", str(tree)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = dist.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def dist_info(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(f"kvcanary-{kvcanary_plugin.__version__}.dist-info/{name}").decode()


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(dist_info(wheel, "METADATA"))


def files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = {f"kvcanary_plugin/{name}" for name in files(ROOT / "kvcanary_plugin")}
    patches = {f"kvcanary_plugin/patches/{name}" for name in files(ROOT / "patches")}
    assert any(name.endswith(".py") for name in patches)
    assert packed == package | patches


def test_wheel_carries_the_licence(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert dist_info(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def test_installing_never_pulls_a_peer(metadata: Message) -> None:
    required = metadata.get_all("Requires-Dist", [])
    assert required
    assert not [line for line in required if line.lower().startswith(PEERS)]


def test_wheel_declares_its_entry_points(wheel: zipfile.ZipFile) -> None:
    lines = dist_info(wheel, "entry_points.txt").split("\n")
    assert lines.index("kvcanary = kvcanary_plugin.activate:activate") == lines.index("[sglang.srt.plugins]") + 1
    assert lines.index("kvcanary = kvcanary_plugin.cli:main") == lines.index("[console_scripts]") + 1


def test_patches_are_imported_from_the_tree() -> None:
    """An edit in patches/ is seen at once: the editable installation maps the folder, it does not copy it."""
    assert list(kvcanary_plugin.patches.__path__) == [str(ROOT / "patches")]


@pytest.mark.parametrize(("group", "function"), [("sglang.srt.plugins", "activate"), ("console_scripts", "main")])
def test_entry_point_resolves(group: str, function: str) -> None:
    (entry,) = importlib.metadata.entry_points(group=group, name="kvcanary")
    loaded = entry.load()
    assert callable(loaded)
    assert loaded.__name__ == function
