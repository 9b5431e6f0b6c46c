"""What a user of the server gets must not depend on the canary."""

import random

import pytest

from kvcanary_plugin.demo.model import VOCABULARY
from kvcanary_plugin.demo.server import Server

pytestmark = pytest.mark.live


def answers(server):
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(rng.choice((5, 40, 130)))] for _ in range(12)]
    first = [server.generate(prompt, 24)["output_ids"] for prompt in prompts]
    again = [server.generate(prompt, 24)["output_ids"] for prompt in prompts]
    assert first == again
    return first


def test_output_tokens_with_log_equal_those_with_off(model, tmp_path, guarded):
    flags = ["--max-total-tokens=4096"]
    with Server(model, [*flags, "--kvcanary=off"], tmp_path / "off.log") as server:
        expected = answers(server)
        off_log = server.log.read_text()
    with guarded(flags=[*flags, "--kvcanary=log"]) as server:
        found = answers(server)
        assert server.events("violation") == []

    assert found == expected
    assert "kvcanary: guarding" not in off_log
