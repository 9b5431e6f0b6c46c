"""A real redis-server on a free port of the loopback, with its files in a folder of the test, stopped by its pid."""

import contextlib
import os
import shutil
import signal
import subprocess
import time

import pytest
import redis

from kvcanary_plugin.demo.server import free_port

REQUIRE_VARIABLE = "KVCANARY_REQUIRE_REDIS"


def find_redis_server():
    """Path of redis-server. Without it the test is skipped, or fails where KVCANARY_REQUIRE_REDIS=1."""
    path = shutil.which("redis-server")
    if path is None:
        reason = "redis-server is not installed: apt-get install redis-server"
        if os.environ.get(REQUIRE_VARIABLE) == "1":
            pytest.fail(f"{REQUIRE_VARIABLE}=1, but {reason}")
        pytest.skip(reason)
    return path


class RedisServer:
    """Started and stopped as often as a test likes, always on the same port."""

    def __init__(self, folder):
        self.folder = folder
        self.program = find_redis_server()
        self.port = free_port()  # of no connection: while it is down, clients try to reach it again and again
        self.process = None
        self.start()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self):
        command = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self.folder), "--daemonize", "no"]
        with open(self.folder / "redis.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        client = redis.Redis(port=self.port)
        for _ in range(200):
            with contextlib.suppress(redis.RedisError):
                client.ping()
                client.close()
                return
            time.sleep(0.05)
        raise RuntimeError((self.folder / "redis.log").read_text())

    def stop(self):
        """Everything it holds is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def pause(self):
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)
