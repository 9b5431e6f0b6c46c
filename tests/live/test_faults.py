"""Each fault on a real server is reported in the right place, within the promised number of forwards."""

import time

import pytest
from packaging.version import Version

from kvcanary_plugin.demo.story import match_outcomes
from kvcanary_plugin.demo.traffic import Traffic
from kvcanary_plugin.faults import library, stores
from kvcanary_plugin.faults.identity import IDENTITY_FAULTS
from kvcanary_plugin.faults.ownership import OWNERSHIP_FAULTS
from kvcanary_plugin.versions import installed_sglang
from tests.live.conftest import describe

pytestmark = pytest.mark.live
ALLOW = {"KVCANARY_ALLOW_INJECT": "1"}
# Not here: images, sliding windows and states, which this model has not (tests/unit/test_faults.py has them), waits
# between streams, which a CPU has not, and speculation.
FAULTS = [
    *library.FAULTS,
    "drop_part",
    *stores.BEFORE_FORWARD,
    *(name for name in IDENTITY_FAULTS if name != "other_image"),
    *OWNERSHIP_FAULTS,
    *stores.AT_LAUNCH,
]
if Version(installed_sglang()) >= Version("0.5.19"):  # which slots its tree has is not known
    FAULTS = [name for name in FAULTS if name not in ("free_cached", "abort_chunk", "foreign_entry")]
# Damaged bytes are found within a period of the pass, everything else at once.
BYTES = len(library.FAULTS) + 1
FORWARDS = [250 + 220 * min(place, BYTES) + 40 * max(0, place - BYTES) for place in range(len(FAULTS))]


def wait_for(condition, server, patience_s=240):
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and server.process.poll() is None:
        if condition():
            return
        time.sleep(0.3)


@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        pytest.param([], {}, id="page1"),
        pytest.param(["--page-size=16"], {"TRITON_INTERPRET": "1"}, id="page16"),
        pytest.param(["--disable-overlap-schedule"], {}, id="no-overlap"),
    ],
)
def test_every_fault_is_found_in_the_right_place(guarded, flags, environment):
    spec = ";".join(f"{name}@{forward}" for name, forward in zip(FAULTS, FORWARDS, strict=True))
    flags = [
        "--kvcanary=log",
        "--max-total-tokens=8192",
        "--chunked-prefill-size=64",
        "--kvcanary-scrub-budget=0.01",
        *flags,
        f"--kvcanary-inject={spec}",
    ]
    with guarded(flags=flags, environment={**ALLOW, **environment}) as server, Traffic(server):

        def all_found():
            outcomes, _ = match_outcomes(server.events())
            return len(outcomes) == len(FAULTS) and all(outcome.is_found for outcome in outcomes)

        wait_for(all_found, server)
        events = server.events()

    outcomes, unexplained = match_outcomes(events)
    assert [outcome.injected["fault"] for outcome in outcomes] == FAULTS, describe(unexplained)
    wrong = [outcome for outcome in outcomes if not outcome.is_right]
    assert wrong == []
    assert unexplained == [], describe(unexplained)


def test_raise_ends_the_server_with_the_first_violation_in_its_last_lines(guarded):
    flags = ["--kvcanary=raise", "--max-total-tokens=4096", "--kvcanary-inject=swap_entries@60"]
    with guarded(flags=flags, environment=ALLOW) as server, Traffic(server):
        wait_for(lambda: False, server, patience_s=120)
        code, tail = server.process.poll(), server.tail(40)

    assert code not in (None, 0), tail
    assert "chain/position in slot" in tail
    assert "last written by request" in tail
    (first, *_) = server.events("violation")
    assert f"slot {first['slot']}" in tail
    assert server.events("stopped")
