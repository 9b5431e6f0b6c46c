"""Prefill and decode in two servers: which slots a transfer uses, from when it is asked for until it is really over."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvcanary_plugin.pool_patcher.patch import Field, Patch, Wrapper, fields_of
from kvcanary_plugin.runtime.sending import Address, Tapped

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session

logger = logging.getLogger("kvcanary")

COMMON = "sglang.srt.disaggregation.common"
MANAGER = f"{COMMON}.conn"
QUEUE = f"{COMMON}.utils"
MOONCAKE = "sglang.srt.disaggregation.mooncake.conn"
PREFILL = "sglang.srt.disaggregation.prefill"
DECODE = "sglang.srt.disaggregation.decode"
BATCH = "sglang.srt.managers.schedule_batch"
SUCCESS, FAILED = 4, 0  # of SGLang's KVPoll
GIVEN_UP = b"ABORT"  # SGLang's, from a decode server
OVER = b"KVCANARY_OVER"  # ours, in answer to it
LINGER_MS = 5000


def tell_over(room: int, address: Address) -> None:
    """Tell the decode server at ``address`` that nothing of ``room`` is sent any more."""
    import zmq
    from sglang.srt.utils.network import NetworkAddress

    try:
        # A socket of its own: SGLang's belong to the threads that use them.
        socket: zmq.Socket[bytes]
        with zmq.Context.instance().socket(zmq.PUSH) as socket:
            place = NetworkAddress(*address)
            socket.setsockopt(zmq.LINGER, LINGER_MS)
            socket.setsockopt(zmq.IPV6, int(place.is_ipv6))
            socket.connect(place.to_tcp())
            socket.send_multipart([OVER, str(room).encode()])
    except (zmq.ZMQError, ValueError) as error:
        logger.warning("kvcanary: %s was not told that transfer %d is over: %s", address, room, error)


def declare_patches(session: Session, since: str, until: str) -> list[Patch]:
    """What begins a transfer and what ends it, on both sides. Most of it runs on threads of SGLang's."""

    def ask(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if instance.bootstrap_infos is not None:
            pages = args[0] if args else kwargs["kv_indices"]
            answers = len(instance.bootstrap_infos)
            session.begin_flight(instance.bootstrap_room, pages, instance.bootstrap_addr, answers)
        return wrapped(*args, **kwargs)

    def put(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if session.sending is not None:
            chunk = args[0] if args else kwargs["item"]
            flight = session.begin_flight(chunk.room, chunk.prefill_kv_indices)
            session.sending.put(chunk.room, chunk, flight)
        return wrapped(*args, **kwargs)

    def get(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if session.sending is None:
            return wrapped(*args, **kwargs)
        done = session.sending.finish(instance)
        if done.flight is not None and session.flights is not None:
            session.flights.end_one(done.flight)
        for address in done.waiting:
            tell_over(done.room, address)
        chunk = wrapped(*args, **kwargs)
        session.sending.take(instance, chunk)
        return chunk

    def listen_for_requests(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sending = session.sending
        if sending is not None:

            def look(message: list[bytes]) -> bool:
                if message[0] == GIVEN_UP:
                    sending.hear(int(message[1]), (message[2].decode(), int(message[3])))
                return True

            def answer() -> None:
                for room, address in sending.list_over():
                    tell_over(room, address)

            instance.server_socket = Tapped(instance.server_socket, look, answer)
        return wrapped(*args, **kwargs)

    def listen_for_ends(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def look(message: list[bytes]) -> bool:
            is_ours = message[0] == OVER
            has_failed = len(message) == 3 and message[1] == str(FAILED).encode()
            if (is_ours or has_failed) and session.flights is not None:
                session.flights.answer(int(message[1] if is_ours else message[0]))
            return not is_ours

        if session.handover is not None:
            instance.server_socket = Tapped(instance.server_socket, look)
        return wrapped(*args, **kwargs)

    def note_status(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        room = args[0] if args else kwargs["bootstrap_room"]
        status = args[1] if args[1:] else kwargs["status"]
        # Ahead of it: once it is noted, the scheduler frees the slots and may give them out.
        if status == SUCCESS and session.flights is not None:
            session.flights.end(room)
        return wrapped(*args, **kwargs)

    def lose(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = wrapped(*args, **kwargs)
        if session.flights is not None:
            session.flights.lose(args[0] if args else kwargs["failed_bootstrap_addr"])
        return result

    def name_received(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if session.flights is not None:
            for each in args[0] if args else kwargs["decode_reqs"]:
                session.flights.name(each.req.bootstrap_room, each.req.rid)
        return wrapped(*args, **kwargs)

    def name_sent(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request = args[0] if args else kwargs["req"]
        if session.flights is not None:
            session.flights.name(request.bootstrap_room, request.rid)
        return wrapped(*args, **kwargs)

    of_request = fields_of(BATCH, "Req", "bootstrap_room", "rid")
    of_chunk = fields_of(QUEUE, "TransferKVChunk", "room", "prefill_kv_indices")
    of_socket = fields_of(MANAGER, "CommonKVManager", "server_socket")
    of_receiver = fields_of(MANAGER, "CommonKVReceiver", "bootstrap_room", "bootstrap_addr", "bootstrap_infos")
    of_named = fields_of(DECODE, "DecodeRequest", "req") + of_request
    manager, mixin = "MooncakeKVManager", "SchedulerDisaggregationPrefillMixin"
    room, peer = ("bootstrap_room", "status"), ("failed_bootstrap_addr",)
    table: tuple[tuple[str, str, str, Wrapper, tuple[str, ...], str, tuple[Field, ...]], ...] = (
        (MOONCAKE, "MooncakeKVReceiver", "send_metadata", ask, ("kv_indices",), "slots are to be filled", of_receiver),
        (QUEUE, "FastQueue", "put", put, ("item",), "slots are about to be sent", of_chunk),
        (QUEUE, "FastQueue", "get", get, (), "a thread is done with what it was sending", ()),
        (MOONCAKE, manager, "start_prefill_thread", listen_for_requests, (), "hears what is given up", of_socket),
        (MOONCAKE, manager, "start_decode_thread", listen_for_ends, (), "hears what is over", of_socket),
        (MANAGER, "CommonKVManager", "update_status", note_status, room, "all has been sent", ()),
        (MANAGER, "CommonKVManager", "_handle_node_failure", lose, peer, "a server is dead", ()),
        (DECODE, "DecodeTransferQueue", "extend", name_received, ("decode_reqs",), "whose slots they are", of_named),
        (PREFILL, mixin, "send_kv_chunk", name_sent, ("req",), "whose slots they are", of_request),
    )
    return [
        Patch(module, owner, name, wrapper, ("self", *parameters), why, since, until, reads=reads)
        for module, owner, name, wrapper, parameters, why, reads in table
    ]
