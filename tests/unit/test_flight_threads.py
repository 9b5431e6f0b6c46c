"""When a transfer is over, by SGLang's threads and sockets of either side, where only the wire between them is ours."""

import functools
import threading
import time
from types import SimpleNamespace

import pytest
import zmq
from sglang.srt.disaggregation.base import KVPoll

from kvcanary_plugin.patches.flights import OVER, declare_patches, tell_over
from kvcanary_plugin.pool_patcher.patch import PatchSet
from kvcanary_plugin.versions import installed_sglang
from tests.flying import ROOM, Pool

pytestmark = [
    pytest.mark.skipif(installed_sglang() != "0.5.15", reason="covered for SGLang 0.5.15"),
    pytest.mark.timeout(60),
]
SESSION = "127.0.0.1:1"


@pytest.fixture(params=[1, 16])
def pool(request):
    pool = Pool(request.param)
    yield pool
    pool.close()


class Wire:
    """What sends a chunk, and takes as long as it is told to."""

    def __init__(self) -> None:
        self.is_open, self.has_begun = threading.Event(), threading.Event()

    def send(self, *_):
        self.has_begun.set()
        assert self.is_open.wait(30)
        return 0


class Endpoint:
    """The other server: what SGLang's sockets of one side talk to."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def send(self, port, *message):
        with self.context.socket(zmq.PUSH) as socket:
            socket.connect(f"tcp://127.0.0.1:{port}")
            socket.send_multipart([part if isinstance(part, bytes) else str(part).encode() for part in message])

    def receive(self, seconds=20.0):
        """The next message, None if there is none for so long."""
        return self.socket.recv_multipart() if self.socket.poll(seconds * 1000) else None

    def close(self):
        self.socket.close()
        self.context.term()


@pytest.fixture
def endpoint():
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture
def conn(pool, monkeypatch):
    """SGLang's module with our patches in force, and threads that do not outlive the test process."""
    from sglang.srt.disaggregation.mooncake import conn

    patches = PatchSet(declare_patches(pool, "0.5.15", "0.5.16"))
    patches.install(installed_sglang())
    threads = SimpleNamespace(Thread=functools.partial(threading.Thread, daemon=True))
    monkeypatch.setattr(conn, "threading", threads)
    yield conn
    patches.uninstall()


def make_manager(conn, **more):
    """SGLang's manager of transfers without an engine, which is the wire."""
    manager = object.__new__(conn.MooncakeKVManager)
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    lock = threading.Lock()
    state = {"request_status": {}, "failure_records": {}, "_socket_cache": {}, "_monitor_cache": {}}
    locks = {"failure_lock": lock, "_socket_lock": threading.Lock(), "session_lock": threading.Lock()}
    settings = {"enable_trace": False, "enable_staging": False, "is_mla_backend": False, "bootstrap_port": 0}
    ranks = {"attn_tp_rank": 0, "attn_tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    sockets = {"_zmq_ctx": context, "server_socket": socket, "rank_port": port, "local_ip": "127.0.0.1"}
    for name, value in {**state, **locks, **settings, **ranks, **sockets, **more}.items():
        setattr(manager, name, value)
    return manager


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def prefill(conn, pool, endpoint):
    """The side that sends, one chunk of a request of two pages under way, and the wire it is on."""
    wire = Wire()
    slots = pool.ask()
    pages = pool.pages_of(slots)
    info = SimpleNamespace(is_dummy=False, mooncake_session_id=SESSION, dst_kv_indices=pages, endpoint="127.0.0.1")
    info.dst_port, info.room, info.required_dst_info_num = endpoint.port, ROOM, 1
    target = SimpleNamespace(dst_attn_tp_size=1, dst_kv_ptrs=[], dst_aux_ptrs=[])
    manager = make_manager(
        conn,
        failed_sessions=set(),
        transfer_infos={ROOM: {SESSION: info}},
        decode_kv_args_table={SESSION: target},
        req_to_decode_prefix_len={},
        disaggregation_mode=conn.DisaggregationMode.PREFILL,
        transfer_queues=[conn.FastQueue()],
        send_kvcache=wire.send,
        send_aux=lambda *_: 0,
    )
    manager.request_status[ROOM] = KVPoll.WaitingForInput
    manager.start_prefill_thread()
    conn.threading.Thread(target=manager.transfer_worker, args=(manager.transfer_queues[0], None)).start()
    pool.flights.name(ROOM, "request 7")
    yield SimpleNamespace(manager=manager, wire=wire, slots=slots, pages=pages)
    wire.is_open.set()


def test_a_page_that_is_given_out_while_it_is_read_to_be_sent(pool, endpoint, prefill):
    manager = prefill.manager
    manager.add_transfer_request(ROOM, prefill.pages, slice(0, 2), False)
    manager.add_transfer_request(ROOM, prefill.pages, slice(0, 2), True, aux_index=0)
    assert prefill.wire.has_begun.wait(20)
    endpoint.send(manager.rank_port, "ABORT", ROOM, "127.0.0.1", endpoint.port)
    assert endpoint.receive() == [b"ABORT_ACK", b"7"]
    pool.allocator.free(prefill.slots)
    assert pool.look() == []
    assert {(f.kind, f.owner) for f in pool.give_all()} == {("reused_in_flight", "request 7")}
    assert endpoint.receive(0.3) is None, "SGLang has acknowledged it, and yet it is not over"
    prefill.wire.is_open.set()
    assert endpoint.receive() == [OVER, b"7"]
    wait_for(lambda: pool.flights.count == 0)


def test_a_transfer_that_is_given_up_when_no_chunk_is_under_way_is_over_at_once(pool, endpoint, prefill):
    manager = prefill.manager
    prefill.wire.is_open.set()
    manager.add_transfer_request(ROOM, prefill.pages, slice(0, 2), False)
    wait_for(lambda: pool.flights.count == 0)
    endpoint.send(manager.rank_port, "ABORT", ROOM, "127.0.0.1", endpoint.port)
    messages = {endpoint.receive()[0], endpoint.receive()[0]}
    assert messages == {b"ABORT_ACK", OVER}
    manager.add_transfer_request(ROOM, prefill.pages, slice(0, 2), True, aux_index=0)
    assert pool.flights.count == 0, "SGLang sends no more of it"
    pool.allocator.free(prefill.slots)
    assert pool.give_all() == []


def test_a_transfer_that_succeeds_is_over_before_its_slots_are_free(pool, endpoint, prefill):
    manager = prefill.manager
    manager.add_transfer_request(ROOM, prefill.pages, slice(0, 2), True, aux_index=0)
    prefill.wire.is_open.set()
    wait_for(lambda: manager.check_status(ROOM) == KVPoll.Success)
    pool.allocator.free(prefill.slots)
    assert pool.give_all() == []
    assert endpoint.receive() == [b"7", b"4", b"0"]


@pytest.fixture
def decode(conn, pool, endpoint):
    """The side that receives: a request of two pages whose slots the other side was told."""
    manager = make_manager(
        conn,
        prefill_response_tracker={ROOM: set()},
        required_prefill_response_num_table={ROOM: 1},
        _start_heartbeat_checker_thread=lambda: None,
    )
    receiver = object.__new__(conn.MooncakeKVReceiver)
    infos = [{"rank_ip": "127.0.0.1", "rank_port": endpoint.port, "is_dummy": False}]
    state = {"bootstrap_infos": infos, "bootstrap_room": ROOM, "bootstrap_addr": "prefill:1", "kv_mgr": manager}
    for name, value in {**state, "session_id": SESSION, "required_dst_info_num": 1, "abort_notified": False}.items():
        setattr(receiver, name, value)
    manager.request_status[ROOM] = KVPoll.WaitingForInput
    manager.start_decode_thread()
    slots = pool.ask()
    receiver.send_metadata(pool.pages_of(slots), 0)
    pool.flights.name(ROOM, "request 7")
    assert endpoint.receive()[0] == b"7"
    return SimpleNamespace(manager=manager, receiver=receiver, slots=slots)


def give_up(pool, endpoint, decode):
    """What SGLang does when a client goes away: it tells the other server, and frees."""
    decode.receiver.abort()
    assert endpoint.receive()[:2] == [b"ABORT", b"7"]
    decode.receiver.clear()
    pool.allocator.free(decode.slots)
    assert pool.look() == []


def test_slots_that_are_given_out_before_the_other_server_has_let_go_of_them(pool, endpoint, decode):
    give_up(pool, endpoint, decode)
    endpoint.send(decode.manager.rank_port, "ABORT_ACK", ROOM)
    time.sleep(0.3)
    assert {(f.kind, f.owner) for f in pool.give_all()} == {("reused_in_flight", "request 7")}


@pytest.mark.parametrize("answer", ["over", "failed", "dead"])
def test_slots_that_are_given_out_behind_it(pool, endpoint, decode, answer):
    give_up(pool, endpoint, decode)
    if answer == "over":
        tell_over(ROOM, ("127.0.0.1", decode.manager.rank_port))
    elif answer == "failed":
        endpoint.send(decode.manager.rank_port, ROOM, KVPoll.Failed, 0)
    else:
        for name in ("connection_pool", "prefill_info_table", "addr_to_rooms_tracker"):
            setattr(decode.manager, name, {})
        decode.manager.connection_lock = threading.Lock()
        decode.manager._handle_node_failure("prefill:1")
    wait_for(lambda: pool.flights.count == 0)
    assert pool.give_all() == []


def test_a_transfer_that_has_come_is_over(pool, endpoint, decode):
    endpoint.send(decode.manager.rank_port, ROOM, KVPoll.Success, 0)
    wait_for(lambda: decode.manager.check_status(ROOM) == KVPoll.Success)
    pool.allocator.free(decode.slots)
    assert pool.give_all() == []
