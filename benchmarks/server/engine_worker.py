"""One SGLang engine as a child process that does what its parent asks, so that several arms can be kept warm at once.

Reads one JSON object a line from its standard input, answers on the file descriptor that its second argument names.
SGLang's scheduler is spawned from here and imports this file as ``__mp_main__``: that is how faults get in that nobody
can plan before the server runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from typing import Any

from engine_hooks import install_hooks

SHARED_PREFIXES, SHARED_TOKENS, SHARED_PROBABILITY = 4, 96, 0.7
DRILL_WORK = {"batch": 2, "prompt": 64, "new": 256, "seed": "drill"}  # a second or so, for the audit to fall into
DRILL_POLL_SECONDS = 0.05
FLUSH_TRIES, FLUSH_PAUSE_SECONDS = 200, 0.1
ABORT_SECONDS = 1.0  # at most, behind the request itself
KV = ["kv_cache"]  # what SGLang calls the memory of the pool


def make_prompts(work: dict[str, Any], vocabulary: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Prompts and sampling parameters of one round of ``work``, the same in every arm.

    Args:
        work: ``batch``, ``prompt``, ``new`` and ``seed``; with ``mixed`` lengths vary up to these, and prompts share
            prefixes, the same for the same ``prefixes``.
        vocabulary: token ids are below it.
    """
    rng = random.Random(work["seed"])
    tokens = range(10, vocabulary)
    prompts = [rng.choices(tokens, k=work["prompt"]) for _ in range(work["batch"])]
    counts = [work["new"]] * work["batch"]
    if work.get("mixed"):
        always = random.Random(work["prefixes"])
        prefixes = [always.choices(tokens, k=SHARED_TOKENS) for _ in range(SHARED_PREFIXES)]
        for index, prompt in enumerate(prompts):
            del prompt[rng.randint(1, len(prompt)) :]
            if rng.random() < SHARED_PROBABILITY:
                prompts[index] = rng.choice(prefixes) + prompt
        counts = [rng.randint(work["new"] // 2, work["new"]) for _ in counts]
    return prompts, [{"max_new_tokens": count, "ignore_eos": True, "temperature": 0} for count in counts]


class Worker:
    """The engine and what can be asked of it; every method whose name begins with ``do_`` is a command."""

    def __init__(self, arguments: dict[str, Any], vocabulary: int) -> None:
        import sglang

        began = time.perf_counter()
        self._engine: Any = sglang.Engine(**arguments)
        self._vocabulary = vocabulary
        self._rounds = self._updates = 0
        self.start_seconds = time.perf_counter() - began

    def do_generate(self, work: dict[str, Any]) -> dict[str, Any]:
        """Serve one round of ``work``. Returns its wall time."""
        prompts, params = make_prompts(work, self._vocabulary)
        began = time.perf_counter()
        self._engine.generate(input_ids=prompts, sampling_params=params)
        return {"seconds": time.perf_counter() - began}

    def do_state(self, _: dict[str, Any]) -> dict[str, Any]:
        """Slots of the pool, and the state of the guard if there is one."""
        info = self._engine.get_server_info()
        return {"tokens": info["max_total_num_tokens"], "guard": info["internal_states"][0].get("kvcanary")}

    def do_watch(self, work: dict[str, Any]) -> dict[str, Any]:
        """Serve one round of ``work``. Returns what the rotating pass did from ``first`` to ``last``, seconds of it."""
        return dict(self._engine.loop.run_until_complete(self._watch(work)))

    async def _watch(self, work: dict[str, Any]) -> dict[str, Any]:
        prompts, params = make_prompts(work, self._vocabulary)
        serving = asyncio.ensure_future(self._engine.async_generate(input_ids=prompts, sampling_params=params))
        seen = []
        for pause in (work["first"], work["last"] - work["first"]):
            await asyncio.sleep(pause)
            (state,) = await self._engine.tokenizer_manager.get_internal_state()
            seen.append((time.perf_counter(), state["kvcanary"]))
        await serving
        (began, before), (ended, after) = seen
        return {"slots": after["slots"], "folded": after["folded"] - before["folded"], "seconds": ended - began}

    def do_profile(self, work: dict[str, Any]) -> dict[str, Any]:
        """Serve one round of ``work`` under the profiler of torch, which writes a trace to ``folder``."""
        self._engine.start_profile(
            output_dir=work["folder"], activities=[work["activity"]], with_stack=False, record_shapes=False
        )
        answer = self.do_generate(work)
        self._engine.stop_profile()
        return answer

    def do_churn(self, work: dict[str, Any]) -> dict[str, Any]:
        """Serve one round of ``work`` as requests of their own, the share ``aborts`` of which is aborted.

        Returns how many were sent, and how many ended because of that.
        """
        return self._engine.loop.run_until_complete(self._churn(work))

    async def _churn(self, work: dict[str, Any]) -> dict[str, Any]:
        rng = random.Random(f"aborts/{work['seed']}")
        prompts, params = make_prompts(work, self._vocabulary)
        delays = [rng.random() * ABORT_SECONDS if rng.random() < work["aborts"] else None for _ in prompts]
        self._rounds += 1

        async def ask(index: int) -> str:
            rid = f"{self._rounds}/{index}"
            asking = asyncio.ensure_future(
                self._engine.async_generate(input_ids=prompts[index], sampling_params=params[index], rid=rid)
            )
            if (delay := delays[index]) is not None:
                await asyncio.wait([asking], timeout=delay)
                self._engine.tokenizer_manager.abort_request(rid)
            return str((await asking)["meta_info"]["finish_reason"]["type"])

        reasons = await asyncio.gather(*map(ask, range(len(prompts))))
        return {"requests": len(reasons), "aborted": reasons.count("abort")}

    def do_flush(self, _: dict[str, Any]) -> dict[str, Any]:
        """Flush the cache, which SGLang refuses while it has anything left to do."""
        for _ in range(FLUSH_TRIES):
            if self._engine.flush_cache().success:
                return {}
            time.sleep(FLUSH_PAUSE_SECONDS)
        raise RuntimeError("the cache was not flushed")

    def do_update(self, command: dict[str, Any]) -> dict[str, Any]:
        """Update the weight ``name``, of so many ``elements``, in place; SGLang flushes the cache with it."""
        import torch

        self.do_flush({})  # what is aborted may still run, and SGLang ends itself if it cannot flush behind an update
        self._updates += 1
        weight = torch.full((command["elements"],), 1 + self._updates / 128, dtype=torch.bfloat16)
        success, message = self._engine.update_weights_from_tensor([(command["name"], weight)])[:2]
        if not success:
            raise RuntimeError(message)
        return {}

    def do_give_back(self, _: dict[str, Any]) -> dict[str, Any]:
        """Give the memory of the KV back and take it again."""
        self.do_flush({})
        self._engine.release_memory_occupation(KV)
        self._engine.resume_memory_occupation(KV)
        return {}

    def do_audit(self, _: dict[str, Any]) -> dict[str, Any]:
        """Have the guard look at the whole pool."""
        return {"accepted": self._engine.loop.run_until_complete(self._set("audit=1"))}

    def do_inject(self, command: dict[str, Any]) -> dict[str, Any]:
        """Inject the faults that the file ``spec`` names, their forwards counted from now."""
        return {"accepted": self._engine.loop.run_until_complete(self._set(f"inject={command['spec']}"))}

    def do_drill(self, command: dict[str, Any]) -> dict[str, Any]:
        """Inject the fault that the file ``spec`` names into running requests, then have the guard look at the pool."""
        return {"accepted": self._engine.loop.run_until_complete(self._drill(command))}

    async def _drill(self, command: dict[str, Any]) -> bool:
        prompts, params = make_prompts(DRILL_WORK, self._vocabulary)
        if not await self._set(f"inject={command['spec']}"):
            return False
        serving = asyncio.ensure_future(self._engine.async_generate(input_ids=prompts, sampling_params=params))
        accepted = False
        while not serving.done() and not accepted:
            await asyncio.sleep(DRILL_POLL_SECONDS)
            with open(command["events"]) as events:
                if any('"injected"' in line for line in events):
                    accepted = await self._set("audit=1")
        await serving
        return accepted

    async def _set(self, change: str) -> bool:
        from sglang.srt.managers.io_struct import SetInternalStateReq

        request = SetInternalStateReq(server_args={f"kvcanary?{change}": 1})
        return all(await self._engine.tokenizer_manager.set_internal_state(request))

    def do_end(self, _: dict[str, Any]) -> dict[str, Any]:
        """End the engine."""
        self._engine.shutdown()
        return {}


def main() -> int:
    """Serve commands until the last one."""
    setting, replies = json.loads(sys.argv[1]), os.fdopen(int(sys.argv[2]), "w", buffering=1)
    worker = Worker(setting["arguments"], setting["vocabulary"])
    print(json.dumps({"start_seconds": worker.start_seconds}), file=replies)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, f"do_{command['do']}")(command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=replies)
        if command["do"] == "end":
            break
    return 0


if __name__ == "__mp_main__":
    install_hooks(os.environ)

if __name__ == "__main__":
    raise SystemExit(main())
