"""What SGLang's own output streamer sends of a request that ends because of damaged KV."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from kvcanary_plugin.patches.quarantine import end


class Detokenizer:
    """Keeps what is sent to it."""

    def __init__(self) -> None:
        self.sent = []

    def send_output(self, payload) -> None:
        self.sent.append(payload)


def make_streamer(detokenizer):
    return SchedulerOutputStreamer(
        send_to_detokenizer=detokenizer,
        tree_cache=None,
        ps=SimpleNamespace(dp_rank=0, attn_tp_rank=0),
        server_args=SimpleNamespace(stream_interval=1, enable_request_time_stats_logging=False),
        is_generation=True,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        disaggregation_mode=DisaggregationMode.NULL,
        enable_hicache_storage=lambda: False,
    )


def make_request(*, stream):
    sampling = SamplingParams(max_new_tokens=8)
    sampling.normalize(None)
    prompt = array("q", [1, 2, 3])
    return Req("r", "", prompt, sampling, return_logprob=True, top_logprobs_num=1, stream=stream, vocab_size=512)


def receive(request, token):
    """What the scheduler does with a request's next token and its probability."""
    request.output_ids.append(token)
    request.update_finish_state()
    request.logprob.output_token_logprobs_val.append(-0.5)
    request.logprob.output_token_logprobs_idx.append(token)
    request.logprob.output_top_logprobs_val.append([-0.5])
    request.logprob.output_top_logprobs_idx.append([token])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("good", [[], [101], [101, 102]])
@pytest.mark.parametrize("is_damaged", [True, False])
def test_neither_a_damaged_token_nor_its_probability_is_sent(stream, good, is_damaged):
    detokenizer = Detokenizer()
    streamer = make_streamer(detokenizer)
    request = make_request(stream=stream)
    for token in good:
        receive(request, token)
        streamer.stream_output([request], True)

    if is_damaged:
        end(request, "damaged")
    receive(request, 423)
    streamer.stream_output([request], True)

    sent = [*good] if is_damaged else [*good, 423]
    if not stream and not is_damaged:  # it goes on, and nothing is due yet
        assert detokenizer.sent == []
        return
    payloads = detokenizer.sent
    assert [token for payload in payloads for token in payload.output_ids[0]] == sent
    assert [token for payload in payloads for token in payload.output_token_logprobs_idx[0]] == sent
    assert [tokens[0] for payload in payloads for tokens in payload.output_top_logprobs_idx[0]] == sent
    assert request.finished() == is_damaged
