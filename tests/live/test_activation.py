"""The ways to switch it on, on real servers."""

import os
import subprocess
import sys

import pytest

from kvcanary_plugin.demo.server import Server, ServerError
from kvcanary_plugin.report.jsonl import read_events

pytestmark = pytest.mark.live


def test_environment_alone_guards_a_server_whose_command_line_is_fixed(model, tmp_path):
    events = tmp_path / "events.jsonl"
    environment = {"KVCANARY": "log", "KVCANARY_LOG": str(events), "KVCANARY_CHECKS": "chain"}
    with Server(model, ["--max-total-tokens=2048"], tmp_path / "log", environment=environment) as server:
        server.generate(range(3, 40), 4)

    assert '"checks":["chain"],"mode":"log"' in events.read_text()
    assert events.stat().st_mode & 0o007 == 0


def test_sglang_serve_takes_the_flags_from_yaml_and_they_beat_the_environment(model, tmp_path):
    events = tmp_path / "events.jsonl"
    config = tmp_path / "server.yaml"
    config.write_text(f"max-total-tokens: 2048\nkvcanary: log\nkvcanary-log: {events}\n")
    launcher = tmp_path / "serve.py"
    launcher.write_text(
        "import sys\nfrom sglang.cli.main import main\n"
        "if __name__ == '__main__':\n    sys.argv.insert(1, 'serve')\n    main()\n"
    )
    environment = {"KVCANARY": "raise", "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with Server(
        model, ["--config", str(config)], tmp_path / "log", environment=environment, launcher="serve"
    ) as server:
        server.generate(range(3, 40), 4)

    assert '"mode":"log"' in events.read_text()


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        (["--kvcanary=loud"], {}, "kvcanary: --kvcanary='loud' is not one of off, log, raise"),
        ([], {"KVCANARY": "loud"}, "kvcanary: KVCANARY='loud' is not one of off, log, raise"),
        (["--kvcanary=log", "--speculative-algorithm=DFLASH"], {}, "--speculative-algorithm is not covered"),
    ],
)
def test_a_server_that_cannot_be_guarded_as_asked_does_not_start(model, tmp_path, flags, environment, words):
    server = Server(model, flags, tmp_path / "log", environment=environment)
    with pytest.raises(ServerError):
        server.wait_ready()
    server.stop()

    assert server.process.returncode == 2
    assert server.tail(1).startswith(words) or words in server.tail(3)


EMBEDDED = """
import sglang

if __name__ == "__main__":
    engine = sglang.Engine(
        model_path={model!r}, device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
        grammar_backend="none", skip_tokenizer_init=True, mem_fraction_static=0.1, max_total_tokens=2048,
    )
    print(engine.generate(input_ids=list(range(3, 40)), sampling_params={{"max_new_tokens": 4}})["meta_info"])
    engine.shutdown()
"""


def test_an_engine_embedded_in_another_program_is_guarded_by_the_environment(model, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(EMBEDDED.format(model=str(model)))
    events = tmp_path / "events.jsonl"
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"KVCANARY": "log", "KVCANARY_LOG": str(events)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert {event["event"] for event in read_events(events)} <= {"attached", "learned", "heartbeat"}
