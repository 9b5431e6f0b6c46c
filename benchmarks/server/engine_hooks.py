"""What the benchmarks change in a scheduler: faults that are planned while it runs, and flips without kvcanary.

Imported by every process of SGLang's, so nothing is loaded before it is needed.
"""

from __future__ import annotations

import gc
import json
import os
import random
import time
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

COMMANDS_VARIABLE = "KVCANARY_BENCH_COMMANDS"  # 1: the guard takes faults and says what its start took
FLIPS_VARIABLE = "KVCANARY_BENCH_FLIPS"  # a file that says which bits to flip; looked for until it is there
PACE_FORWARDS = 4  # between two faults, also where one had to wait for a batch that suits it
PATIENCE_FORWARDS = 150
SLOW_SECONDS = 0.02  # of a call of ours: worth a line
MAX_SKIPPED = 2  # faults of a kind; then it is given up


def install_hooks(environment: Mapping[str, str]) -> None:
    """Do what the variables ask for."""
    if environment.get(COMMANDS_VARIABLE) == "1":
        take_commands()
    if FLIPS_VARIABLE in environment:
        flip_bits(environment[FLIPS_VARIABLE])


def make_paced_injector(spec: str) -> Any:
    """An injector that keeps some forwards between two faults, and leaves out those that no batch suits."""
    from kvcanary_plugin.faults.injector import Injector

    class PacedInjector(Injector):
        def __init__(self, planned: list[Any]) -> None:
            super().__init__(planned)
            self._skipped: Counter[str] = Counter()
            self._left = len(planned)

        def before_forward(self, guard: Any, step: Any, reporter: Any) -> None:
            self._pace(step.number)  # where the batch was launched, a fault may have gone in as well
            super().before_forward(guard, step, reporter)
            planned = self._planned
            if planned and len(planned) == self._left and step.number > planned[0].forward + PATIENCE_FORWARDS:
                self._skip(planned[0])
            self._pace(step.number)

        def _pace(self, number: int) -> None:
            if self._planned and len(self._planned) != self._left:
                self._planned[0].forward = max(self._planned[0].forward, number + PACE_FORWARDS)
            self._left = len(self._planned)

        def _skip(self, first: Any) -> None:
            self._skipped[first.name] += 1
            is_given_up = self._skipped[first.name] > MAX_SKIPPED
            kept = [one for one in self._planned if one is not first and not (is_given_up and one.name == first.name)]
            print(f"BENCH skipped {len(self._planned) - len(kept)} {first.name}", flush=True)
            self._planned[:] = kept

    return PacedInjector.parse(spec)


def take_commands() -> None:
    """In the scheduler: let ``/set_internal_state`` plan faults, and print how long the guard took to be set up."""
    from kvcanary_plugin import activate
    from kvcanary_plugin.runtime.control import PREFIX, Control
    from kvcanary_plugin.runtime.session import Session

    apply, attach, install = Control.apply, Session.attach, activate._install_engine
    call = Session.call
    spent = 0.0

    def apply_or_inject(self: Any, text: str) -> bool:
        fields = dict(parse_qsl(text.removeprefix(PREFIX)))
        guard = self._session.guard
        if "inject" not in fields or guard is None:
            return apply(self, text)
        with open(fields["inject"]) as spec:
            injector = make_paced_injector(spec.read())
        for planned in injector._planned:
            planned.forward += guard.forwards
        injector.check_against(guard.pool.table, guard.settings.possible)
        guard.injector = injector
        return True

    def timed_attach(self: Any, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        attach(self, *args, **kwargs)
        print(f"BENCH start {spent + time.perf_counter() - began:.3f} s", flush=True)

    def timed_install() -> None:
        nonlocal spent
        began = time.perf_counter()
        install()
        spent += time.perf_counter() - began

    def watched_call(self: Any, action: Any) -> None:
        began = time.perf_counter()
        call(self, action)
        if (spent := time.perf_counter() - began) > SLOW_SECONDS:
            forwards = getattr(self.guard, "forwards", None)
            print(f"BENCH slow {spent:.3f} s at {action.__code__.co_names}, forward {forwards}", flush=True)

    collections: list[float] = []

    def watch_collector(phase: str, info: dict[str, int]) -> None:
        collections.append(time.perf_counter())
        if phase == "stop" and (spent := collections[-1] - collections[-2]) > SLOW_SECONDS:
            print(f"BENCH slow {spent:.3f} s in the garbage collector, generation {info['generation']}", flush=True)
        del collections[:-1]

    gc.callbacks.append(watch_collector)
    for owner, name, value in (
        (Control, "apply", apply_or_inject),
        (Session, "call", watched_call),
        (Session, "attach", timed_attach),
        (activate, "_install_engine", timed_install),
    ):
        setattr(owner, name, value)


def flip_bits(path: str) -> None:
    """In the scheduler of a server without kvcanary: flip the bits that the injector would, and print where."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    from kvcanary_plugin.faults.injector import Injector
    from kvcanary_plugin.faults.library import FAULTS
    from kvcanary_plugin.pool_patcher.adapters import adapt_model_runner

    forward = ModelRunner.forward
    state: dict[str, Any] = {"planned": None, "forwards": 0, "pool": None}

    def forward_with_flips(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if state["planned"] is None and os.path.exists(path):
            with open(path) as spec:
                state["planned"] = Injector.parse(spec.read())._planned
            state["pool"] = adapt_model_runner(self, "all")
        planned = state["planned"]
        state["forwards"] += planned is not None
        if planned and state["forwards"] >= planned[0].forward:
            flip(self, forward_batch, planned)
        return forward(self, forward_batch, *args, **kwargs)

    def flip(runner: Any, batch: Any, planned: list[Any]) -> None:
        if batch.forward_mode.is_decode():
            prefix_lens = [length - 1 for length in batch.seq_lens.tolist()]
        elif batch.forward_mode.is_extend():
            prefix_lens = list(batch.extend_prefix_lens_cpu)
        else:
            return
        rows = batch.req_pool_indices.tolist()
        step: Any = SimpleNamespace(
            prefix_lens=prefix_lens, rows=rows, requests=[SimpleNamespace(rid=None) for _ in rows], number=0
        )
        first = planned[0]
        rng = random.Random(first.options.get("seed", ""))
        guard: Any = SimpleNamespace(pool=state["pool"])
        done = FAULTS[first.name](guard, step, rng, first.options)
        if done is not None:
            del planned[0]
            fields = {"slots": done.slots, "positions": done.positions, "step": state["forwards"], **done.fields}
            print("BENCH flip " + json.dumps(fields), flush=True)

    ModelRunner.forward = forward_with_flips
