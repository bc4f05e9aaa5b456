"""An HTTP server that speaks the routes with which vLLM 0.30 to 0.33 is refitted, and what its workers answer there."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from reshard.integrations.vllm.workers import SECONDS_METHOD, UPDATE_OPEN


class WorkerError(Exception):
    """What a worker raises; vLLM answers 500 with its text."""


class FakeVLLM:
    """One server. ``calls`` is what was asked of it, in order; ``faults`` what it does instead, by route.

    A fault is ``(status, body)``, ``"close"`` (the connection ends without an answer), ``"hang"`` (no answer), or
    ``"drip"`` (a byte now and then). ``missing`` are routes that it does not have. With ``hangs_up`` it closes each
    connection after its answer, without having said so.
    """

    def __init__(self, *, workers=1, version="0.32.0", backend="reshard", dev_mode=True):
        self.workers, self.version, self.backend = workers, version, backend
        self.calls, self.faults, self.missing = [], {}, set()
        self.connections, self.hangs_up = 0, False
        self.label, self.paused, self.active = "default", False, False
        self.dev_mode = dev_mode
        self.on_init = self.on_install = lambda _: None
        self.on_receive = lambda version, **_: None
        self.on_finish = lambda: None
        self._over = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # connections are kept, as vLLM's server does

            def setup(self):
                super().setup()
                fake.connections += 1

            def log_message(self, *_):
                pass

            def do_GET(self):
                fake._handle(self, None)

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fake._handle(self, json.loads(body) if body else {})

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self):
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def asked(self, since=0):
        """The routes that change something, in order, with what matters of their payload."""
        return [call for call in self.calls[since:] if not call.startswith(("GET", "POST collective_rpc"))]

    # -- answers ------------------------------------------------------------------------------------------------------

    def _handle(self, request, body):
        parts = urlsplit(request.path)
        query = dict(parse_qsl(parts.query))
        route = parts.path
        told = "".join(f" {key}={value}" for key, value in sorted({**query, **_flat(body or {})}.items()))
        key = route + (f" {body['update_info'].get('action')}" if route == "/update_weights" else "")
        self.calls.append(f"{request.command} {route[1:]}{told}")
        fault = self.faults.get(key, self.faults.get(route))
        if fault == "close":
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault == "hang":
            self._over.wait(30)
            request.close_connection = True
            return
        if fault == "drip":
            self._drip(request)
            return
        if fault is not None:
            if route == "/update_weights":
                self.active = False  # as vLLM's worker does when it raises there
            self._answer(request, *fault)
            return
        try:
            self._answer(request, *self._do(request.command, route, query, body or {}))
        except WorkerError as error:
            self._answer(request, 500, {"error": {"message": str(error), "type": "InternalServerError", "code": 500}})

    def _do(self, command, route, query, body):
        method = f"{command.lower()}{route.replace('/', '_')}"
        dev = route not in ("/health", "/version")
        if route in self.missing or (dev and not self.dev_mode) or not hasattr(self, f"_{method}"):
            return 404, {"detail": "Not Found"}
        return 200, getattr(self, f"_{method}")(query, body)

    def _get_health(self, _query, _body):
        return None

    def _get_version(self, _query, _body):
        return {"version": self.version}

    def _get_get_world_size(self, query, _body):
        assert query["include_dp"] == "true"
        return {"world_size": self.workers}

    def _get_weight_info(self, _query, _body):
        return {"weight_version": self.label}

    def _get_is_paused(self, _query, _body):
        return {"is_paused": self.paused}

    def _post_init_weight_transfer_engine(self, _query, body):
        self._check_configured()
        if self.backend != "reshard":
            raise WorkerError(f"Invalid init_info for {self.backend}: __init__() got an unexpected keyword argument")
        self.on_init(body["init_info"])
        if self.active:
            raise WorkerError(f"Worker failed with error '{UPDATE_OPEN}: finish_weight_update ends it.'")
        return {"message": "Weight transfer initialized"}

    def _post_start_weight_update(self, _query, _body):
        self._check_configured()
        if self.active:
            raise WorkerError("start_weight_update called while a weight update is already active.")
        self.active = True
        return {"message": "Weight update started"}

    def _post_update_weights(self, _query, body):
        if not self.active:
            raise WorkerError("start_weight_update must be called before update_weights.")
        info = body["update_info"]
        try:
            if info["action"] == "receive":
                self.on_receive(**{key: value for key, value in info.items() if key != "action"})
            else:
                self.on_install(info["version"])
        except BaseException:
            self.active = False  # as vLLM's worker does
            raise
        return {"message": "Weights updated"}

    def _post_finish_weight_update(self, _query, body):
        if not self.active:
            raise WorkerError("finish_weight_update called without a matching start_weight_update.")
        self.active = False
        self.on_finish()
        if body.get("weight_version") is not None:
            self.label = body["weight_version"]
        return {"message": "Weight update finished"}

    def _post_collective_rpc(self, _query, body):
        assert body["method"] == SECONDS_METHOD
        return {"results": [{"waiting": 1e-6, "copying": 1e-5 * rank} for rank in range(self.workers)]}

    def _post_pause(self, _query, _body):
        self.paused = True
        return {"status": "paused"}

    def _post_resume(self, _query, _body):
        self.paused = False
        return {"status": "resumed"}

    def _check_configured(self):
        if self.backend is None:
            raise WorkerError("Weight transfer not configured. Please set weight_transfer_config to enable it.")

    def _answer(self, request, status, body):
        payload = b"" if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(payload)))
        request.end_headers()
        request.wfile.write(payload)
        request.close_connection = request.close_connection or self.hangs_up

    def _drip(self, request):
        request.send_response(200)
        request.send_header("Content-Length", "100000")
        request.end_headers()
        while not self._over.wait(0.05):
            try:
                request.wfile.write(b" ")
                request.wfile.flush()
            except OSError:
                return


def _flat(body):
    """What an order of calls is compared with: not the whole of what the workers are told."""
    info = body.get("update_info", {})
    shown = {key: info[key] for key in ("action", "version") if key in info}
    return {**shown, **{key: body[key] for key in ("weight_version",) if key in body}}
