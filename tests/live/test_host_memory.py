"""Real servers with a hierarchical cache: what comes back from host memory intact is silent, what does not is found.

A CPU has neither pinned memory nor SGLang's copy kernels: the launcher provides both.
"""

import random
import re
import time

import pytest
from packaging.version import Version
from rich.console import Console

from kvcanary_plugin.demo.model import VOCABULARY
from kvcanary_plugin.tiers.hf3fs.fsck import check_file
from kvcanary_plugin.tiers.hf3fs.header import read_header
from kvcanary_plugin.versions import installed_sglang
from tests.host_copies import VARIABLE
from tests.live.conftest import describe
from tests.live.test_clean import assert_clean, drive
from tests.storage.page_files import flip

pytestmark = pytest.mark.live
LAUNCHER = "tests.live.with_host_memory"
# Eight prompts of 150 tokens: more than the device has room for.
STEMS = [[random.Random(i).randrange(3, VOCABULARY) for _ in range(150)] for i in range(8)]
BASE = ["--enable-hierarchical-cache", "--hicache-ratio=3", "--max-total-tokens=900", "--kvcanary-scrub-budget=0.02"]
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "150"}


def loads_of(server):
    return [int(tokens) for tokens in re.findall(r"load \d+ of (\d+) tokens", server.log.read_text())]


def ask_again(server, rounds, seed=0):
    """Requests that go on from prompts which were pushed out in the meantime."""
    rng = random.Random(seed)
    for n in range(rounds):
        stem = STEMS[n % len(STEMS)]
        server.generate([*stem, rng.randrange(3, VOCABULARY)], rng.randrange(1, 12))


def flush(server):
    """SGLang refuses while it has anything left to do."""
    for _ in range(50):
        try:
            return server.post("/flush_cache", {})
        except OSError:
            time.sleep(0.2)
    raise AssertionError(server.tail())


LONG_STEMS = [[3 + (7 * n + k * (n + 1)) % (VOCABULARY - 3) for k in range(320)] for n in range(3)]


def wait_until_stored(server, seconds=2.0):
    """Storing goes on beside the server's work; nothing tells when it is over."""
    time.sleep(seconds)
    assert server.process.poll() is None, server.tail()


def flip_every_page(path):
    """One bit in the middle of each, behind the store's back."""
    with path.open("rb") as file:
        layout = read_header(file.fileno(), str(path))[0].layout
    middle = layout.payload_bytes // 2
    for offset in range(layout.data_offset, path.stat().st_size - middle, layout.stride):
        flip(path, offset + middle, bit=2)


def count_stored(answers):
    """Tokens of prompts that came from storage."""
    details = [answer["meta_info"]["cached_tokens_details"] for answer in answers]
    return sum(detail["storage"] for detail in details if detail)


@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        pytest.param(["--hicache-io-backend=direct", "--hicache-mem-layout=layer_first"], RETRACT, id="direct"),
        pytest.param(["--hicache-io-backend=kernel", "--hicache-mem-layout=page_first"], {}, id="page-first"),
        pytest.param(
            ["--hicache-write-policy=write_back", "--hicache-io-backend=direct", "--disable-overlap-schedule"],
            {},
            id="write-back",
        ),
        pytest.param(
            ["--hicache-write-policy=write_through_selective", "--page-size=16", "--hicache-io-backend=direct"],
            {"TRITON_INTERPRET": "1"},
            id="selective-page16",
        ),
    ],
)
def test_what_comes_back_intact_is_silent(guarded, flags, environment):
    with guarded(flags=["--kvcanary=log", *BASE, *flags], environment=environment, launcher=LAUNCHER) as server:
        drive(server, 200, clients=8, seed=4, abort_share=0.1)
        ask_again(server, 40)
        flush(server)
        ask_again(server, 40, seed=1)
        assert len(loads_of(server)) > 10, server.tail()
        assert_clean(server)


def test_a_bit_that_flips_in_host_memory_is_found_at_the_load(guarded):
    flags = ["--kvcanary=log", *BASE, "--hicache-io-backend=direct", "--hicache-mem-layout=layer_first"]
    with guarded(flags=flags, environment={VARIABLE: "5"}, launcher=LAUNCHER) as server:
        ask_again(server, 40)
        (violation,) = server.events("violation")
    assert (violation["check"], violation["phase"], violation["tier"]) == ("content", "load", "host")
    assert (violation["layer"], violation["half"]) == (1, "V")
    assert violation["hop"] == "L1 device -> L2 host, or in L2 host", describe([violation])


def test_quarantine_ends_the_request_and_the_next_one_is_right(guarded):
    flags = ["--kvcanary=quarantine", *BASE, "--hicache-io-backend=direct", "--hicache-mem-layout=layer_first"]
    with guarded(flags=flags, environment={VARIABLE: "5"}, launcher=LAUNCHER) as server:
        expected, refused = {}, []
        for n in range(40):
            stem = n % len(STEMS)
            try:
                answer = server.generate([*STEMS[stem], 7], 6)["output_ids"]
            except OSError as error:  # HTTP 500
                refused.append((n, str(error)))
                continue
            assert answer == expected.setdefault(stem, answer)
        assert len(refused) == 1, server.tail()
        assert len(server.events("violation")) == 1


@pytest.mark.skipif(
    Version(installed_sglang()) >= Version("0.5.22"),
    reason="on a CPU it takes no page back, with SGLang's own file backend and without kvcanary alike",
)
def test_pages_from_storage_are_taken_over_after_a_restart_and_damaged_ones_are_missed(guarded, tmp_path):
    """With what the device made of their rows: they are compared when they are loaded, and all of it is silent."""
    flags = [
        *("--kvcanary=log", "--enable-hierarchical-cache", "--hicache-ratio=2", "--page-size=16"),
        *("--max-total-tokens=1200", "--hicache-io-backend=direct", "--hicache-storage-prefetch-policy=wait_complete"),
        *(f"--kvcanary-hf3fs={tmp_path}/pages?capacity=64MiB", "--kvcanary-scrub-budget=0.02"),
        '--hicache-storage-backend-extra-config={"prefetch_threshold": 16}',
    ]

    def serve(look):
        """One life of the server. Returns its answers, and what ``look`` sees behind them."""
        with guarded(flags=flags, environment={"TRITON_INTERPRET": "1"}, launcher=LAUNCHER) as server:
            answers = [server.generate([*stem, 7], 3) for stem in LONG_STEMS]
            ask_again(server, 12)
            wait_until_stored(server)
            return answers, look(server)

    stored, _ = serve(assert_clean)
    loaded, _ = serve(assert_clean)
    (path,) = (tmp_path / "pages").glob("*.kvpages")
    findings = check_file(path, Console(), deep=True, repair=False)
    assert not findings.faults
    assert findings.recorded == findings.states["committed"] >= 3 * 320 // 16
    assert count_stored(loaded) >= 2 * 256, loaded

    flip_every_page(path)
    damaged, reports = serve(lambda server: server.events("violation"))
    assert reports, "no damaged page was read"
    assert {(each["tier"], each["check"], each["kind"]) for each in reports} == {("storage", "content", "digest")}
    assert count_stored(damaged) == 0, damaged
    first, *others = [[answer["output_ids"] for answer in round] for round in (stored, loaded, damaged)]
    assert others == [first, first]
