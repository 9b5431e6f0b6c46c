"""identity: KV is reused only for what it was made for."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from kvcanary_plugin.runtime.identity import Identities, compare, conceal, make_anchor
from kvcanary_plugin.runtime.images import locate_marks, make_tokens
from tests.engine import Engine


class Keyed:
    def __init__(self, extra_key=None, lora_id=None, cache_salt=None):
        self.extra_key, self.lora_id, self.cache_salt = extra_key, lora_id, cache_salt


def reuse(engine: Engine, *, first: str | None = None, second: str | None = None) -> Engine:
    """One request leaves its prefix in the cache, another with the same tokens takes it over and goes on."""
    tokens = list(range(30))
    cached = engine.request(tokens=tokens, extra_key=first)
    engine.prefill(cached)
    prefix = engine.finish(cached, keep=30)
    return take_over(engine, prefix, tokens, second)


def take_over(engine: Engine, prefix: torch.Tensor, tokens: list[int], key: str | None = None) -> Engine:
    request = engine.request(tokens=[*tokens, 5, 6], extra_key=key)
    engine.prefill(request, prefix=prefix)
    engine.run(request, steps=3)
    return engine


@pytest.mark.parametrize("key", [None, "tenant"])
def test_reuse_under_the_same_identity_is_silent(key: str | None):
    assert reuse(Engine(), first=key, second=key).violations == []


def test_reuse_across_a_salt_is_reported_at_the_match():
    engine = reuse(Engine(), first="salt-a", second="salt-b")
    (violation,) = engine.violations
    assert (violation.check, violation.kind, violation.request) == ("identity", "other_identity", "r2")
    assert violation.differs == (("extra_key", conceal("salt-b"), conceal("salt-a")),)
    assert violation.step == 2
    assert violation.writer.request == "r1"


def test_old_kv_after_a_weight_update_is_reported_at_first_reuse():
    engine = Engine()
    tokens = list(range(30))
    cached = engine.request(tokens=tokens)
    engine.prefill(cached)
    prefix = engine.finish(cached, keep=30)
    engine.guard.replace_weights("v2#1")
    take_over(engine, prefix, tokens)
    (violation,) = engine.violations
    assert violation.differs == (("weights", "v2#1", "0"),)


def test_an_audit_counts_what_is_still_reachable():
    engine = Engine()
    cached = engine.request(30)
    engine.prefill(cached)
    engine.finish(cached, keep=21)
    engine.forward([], [], [], ForwardMode.IDLE)
    engine.guard.replace_weights("a")
    engine.guard.traffic.release_all()
    engine.guard.replace_weights("b")
    events = [fields for name, fields in engine.reporter.events if name == "weights"]
    assert [(fields["version"], fields["older_slots"], fields["flushed"]) for fields in events] == [
        ("a", 21, False),
        ("b", 0, True),
    ]


def test_a_flush_with_the_update_leaves_nothing_to_report():
    engine = Engine()
    tokens = list(range(30))
    engine.prefill(cached := engine.request(tokens=tokens))
    engine.finish(cached)
    engine.guard.traffic.release_all()
    engine.guard.replace_weights("v2")
    engine.prefill(request := engine.request(tokens=tokens))
    engine.run(request, steps=4)
    assert engine.violations == []


def test_requests_that_run_through_an_update_are_said_once_and_are_not_damage():
    engine = Engine()
    one, other = engine.request(20), engine.request(10)
    engine.prefill(one, other)
    engine.decode(one, other)
    engine.guard.replace_weights("v2")
    engine.run(one, other, steps=4)
    assert engine.violations == []
    (fields,) = [fields for name, fields in engine.reporter.events if name == "mixed_weights"]
    assert fields["requests"] == [one.rid, other.rid]


def test_strict_weights_reports_them():
    engine = Engine(strict_weights=True)
    request = engine.request(20)
    engine.prefill(request)
    engine.guard.replace_weights("v2")
    engine.run(request, steps=3)
    (violation,) = engine.violations
    assert (violation.check, violation.kind, violation.request) == ("identity", "mixed_weights", request.rid)


def test_kv_of_a_request_that_ran_through_an_update_is_not_reused_silently():
    engine = Engine()
    tokens = list(range(30))
    mixed = engine.request(tokens=tokens)
    engine.prefill(mixed)
    engine.guard.replace_weights("v2")
    engine.decode(mixed)
    prefix = engine.finish(mixed, keep=30)
    take_over(engine, prefix, tokens)
    assert [v.kind for v in engine.violations] == ["other_identity"]


@pytest.mark.parametrize("field", ["extra_key", "lora_id", "cache_salt"])
def test_every_field_makes_another_anchor(field: str):
    identities = Identities((("model", "m"),))
    plain, other = Keyed(), Keyed(**{field: "x"})
    assert identities.anchor_of(plain) != identities.anchor_of(other)
    assert identities.anchor_of(other) == identities.anchor_of(Keyed(**{field: "x"}))
    tag = {"lora_id": "lora"}.get(field, field)
    shown = "x" if field == "lora_id" else conceal("x")
    assert identities.compare(identities.anchor_of(plain), identities.anchor_of(other)) == ((tag, "", shown),)


def test_fields_do_not_run_into_each_other():
    assert make_anchor([("a", "b;1:c=1:d")]) != make_anchor([("a", "b"), ("c", "d")])
    assert compare((("a", "1"),), (("a", "1"), ("b", "2"))) == (("b", "", "2"),)


def test_unknown_anchors_are_not_named():
    identities = Identities(())
    known = identities.anchor_of(Keyed())
    assert identities.compare(known, known + 1) is None
    assert identities.compare(known, known) is None


def with_image(engine: Engine, digest: int, *, pad: int = 10**6 + 7, text: int = 10):
    """A prompt of text, an image of 6 placeholders, and text."""
    request = engine.request(tokens=[*range(text), *[pad] * 6, 3, 4])
    item = MultimodalDataItem(modality=Modality.IMAGE, hash=digest, pad_value=pad, offsets=[(text, text + 5)])
    request.multimodal_inputs = MultimodalInputs(mm_items=[item])
    return request


def test_images_are_silent_and_text_before_them_is_shared():
    engine = Engine()
    first = with_image(engine, 2**63 + 1)
    engine.prefill(first)
    engine.run(first, steps=2)
    prefix = engine.finish(first, keep=10)
    second = with_image(engine, 2**63 + 2)
    engine.prefill(second, prefix=prefix)
    engine.run(second, steps=3)
    assert engine.violations == []


def test_the_same_image_is_shared_whole():
    engine = Engine()
    first = with_image(engine, 77)
    engine.prefill(first)
    prefix = engine.finish(first, keep=16)
    second = with_image(engine, 77)
    engine.prefill(second, prefix=prefix)
    engine.run(second, steps=3)
    assert engine.violations == []


def test_another_image_behind_the_same_placeholder_is_reported():
    engine = Engine()
    first = with_image(engine, 77)
    engine.prefill(first)
    prefix = engine.finish(first, keep=16)
    second = with_image(engine, 78)
    engine.prefill(second, prefix=prefix)
    (violation,) = engine.violations
    assert (violation.check, violation.position, violation.request) == ("chain", 10, second.rid)


def test_images_that_come_in_chunks_are_silent():
    engine = Engine()
    request = with_image(engine, 123)
    for end in (4, 12, 13, 18):
        engine.prefill(request, upto=end)
    engine.run(request, steps=3)
    assert engine.violations == []


def test_marks_lie_where_the_image_lies():
    engine = Engine()
    plain, image = engine.request(9), with_image(engine, 5)
    places, tokens = locate_marks([plain, image], [2, 12], [7, 6])
    assert places == [7, 8, 9, 10]
    assert len(set(make_tokens(5, 0, 6))) == 6
    from xxhash import xxh3_64_intdigest

    assert tokens == make_tokens(xxh3_64_intdigest(b"5"), 2, 6)
