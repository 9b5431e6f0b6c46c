import functools
import json

import pytest

from kvcanary_plugin.demo.model import make_model
from kvcanary_plugin.demo.server import Server
from kvcanary_plugin.report.jsonl import read_events


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


class Guarded(Server):
    """A server with an event log."""

    def __init__(self, model, flags, folder, **options):
        self.events_path = folder / "events.jsonl"
        super().__init__(model, [*flags, f"--kvcanary-log={self.events_path}"], folder / "server.log", **options)

    def events(self, name=None):
        events = read_events(self.events_path) if self.events_path.exists() else []
        return [event for event in events if name in (None, event["event"])]


@pytest.fixture
def guarded(model, tmp_path):
    return functools.partial(Guarded, model, folder=tmp_path)


def describe(events):
    """For assertion messages."""
    return "\n".join(json.dumps(event) for event in events)
