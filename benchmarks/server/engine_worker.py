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
