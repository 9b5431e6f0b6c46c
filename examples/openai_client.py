"""A client that gets right answers from a server in mode ``quarantine``, whatever happens to its KV meanwhile.

A request that read damaged KV ends with HTTP 500, or in a stream that has begun with an error in its next chunk. Its
prefix is dropped from the cache, so the same request sent again is computed afresh. What the stream delivered before
was verified, but the answer is not complete: discard it and start over.

    python examples/openai_client.py

drills this on a tiny server on the CPU, in which one bit flips under a stream.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from openai import APIError, OpenAI

from kvcanary_plugin.demo.model import add_tokenizer, make_model
from kvcanary_plugin.demo.server import Server

PROMPT = [100 + token % 300 for token in range(80)]


def complete(client: OpenAI, *, attempts: int = 3, **request: Any) -> str:
    """The text of a streamed completion, from a run in which no error came.

    Raises:
        APIError: it ended in an error ``attempts`` times.
    """
    for attempt in range(1, attempts + 1):
        pieces: list[str] = []
        try:
            for chunk in client.completions.create(stream=True, **request):
                pieces += [choice.text for choice in chunk.choices]
            return "".join(pieces)
        except APIError as error:
            if "kvcanary" not in str(error) or attempt == attempts:
                raise
            print(f"attempt {attempt}: {len(pieces)} pieces discarded: {str(error)[:90]}...", flush=True)
            time.sleep(0.1 * attempt)
    raise AssertionError("not reached")


def main() -> int:
    """Ask for the same until a fault was injected under one of the answers; they must all be the same."""
    fault = {"KVCANARY_ALLOW_INJECT": "1", "KVCANARY_INJECT": "swap_entries@120"}
    with tempfile.TemporaryDirectory(prefix="kvcanary-client-") as folder:
        model = add_tokenizer(make_model(Path(folder) / "model"))
        flags = ["--max-total-tokens=4096", "--kvcanary=quarantine"]
        with Server(model, flags, Path(folder) / "log", environment=fault) as server:
            # The library sends a request again by itself when it ends with HTTP 500, but not a stream that broke off.
            client = OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=2)
            request = {"model": "m", "prompt": PROMPT, "max_tokens": 60, "temperature": 0}
            answers = [complete(client, extra_body={"ignore_eos": True}, **request) for _ in range(4)]
    print(f"{len(answers)} answers, {len(set(answers))} different: {answers[0][:60]}...")
    return 0 if len(set(answers)) == 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
