"""vLLM servers for tests: processes of their own, started, asked over HTTP, and ended with all that they began."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.vllm.engines import PROMPTS as ANSWERED
from tests.vllm.engines import TOKENS as ANSWER_TOKENS
from tests.vllm.engines import wait_for_end_of

from reshard.testing.ports import free_port

BLOCK = 32
"""Tokens of one block of the prefix cache."""

_START_SECONDS = 500
_ROOT = Path(__file__).parents[2]
_libc, _SIGNAL_AT_PARENTS_DEATH = ctypes.CDLL(None), 1


def _end_with_parent():
    """Let a server end when the tests are killed, too."""
    _libc.prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGTERM)


class Server:
    """One server of the OpenAI kind, with no tokenizer: it is asked in tokens."""

    def __init__(self, folder, log, *, tp=1, load_format="dummy", dev_mode=True, backend="reshard", dp=1, more=()):
        self.port = free_port()
        self.tp, self.url, self.log = tp, f"http://127.0.0.1:{self.port}", log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += [
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--skip-tokenizer-init",
            "--enforce-eager",
            "--enable-scale-out",
        ]
        command += ["--load-format", load_format, "--dtype", "bfloat16", "--tensor-parallel-size", str(tp)]
        command += ["--max-model-len", "2048", "--max-num-seqs", "8", "--block-size", str(BLOCK), "--seed", "1"]
        if backend is not None:
            command += ["--weight-transfer-config", json.dumps({"backend": backend})]
        command += ["--data-parallel-size", str(dp)] if dp > 1 else []
        command += more
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(_ROOT / "src"), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "HF_HUB_OFFLINE": "1",
            "PYTHONFAULTHANDLER": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # One thread a worker, and none bound to a core: servers side by side have more workers than there are
            # cores. Of two bound to one core, Linux 6.18 let one wait for 38 s in which it could have run, and such a
            # worker answers no call.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_SERVER_DEV_MODE": "1" if dev_mode else "0",
        }
        with open(log, "w", encoding="utf-8") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def wait(self):
        """Wait until it answers."""
        expiry = time.monotonic() + _START_SECONDS
        while True:
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()[-6000:]}"
            assert time.monotonic() < expiry, f"the server did not start:\n{self.log.read_text()[-6000:]}"
            try:
                if self.ask("GET", "/health")[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.5)

    def stop(self):
        """End it and all that it started."""
        group = members_of(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)
        wait_for_end_of(group)

    # -- requests -----------------------------------------------------------------------------------------------------

    def ask(self, method, route, body=None, timeout=60, headers=()):
        """(status, JSON)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, route, payload, {"Content-Type": "application/json", **dict(headers)})
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text else None
        finally:
            connection.close()

    def get(self, route):
        status, answer = self.ask("GET", route)
        assert status == 200, answer
        return answer

    def call_workers(self, method, *args):
        """Call a method of every worker; what they return."""
        status, answer = self.ask("POST", "/collective_rpc", {"method": method, "args": list(args)})
        assert status == 200, answer
        return answer["results"]

    def generate(self, prompt, tokens=6, *, replica=None):
        """The tokens that it answers, greedily; one of its data parallel replicas, if one is named."""
        headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        request = _request(prompt, tokens)
        status, answer = self.ask("POST", "/inference/v1/generate", request, timeout=120, headers=headers)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]

    def answer(self):
        """Tokens and logprobs of some prompts, one at a time, as ``engines.answer`` gives them."""
        answers = []
        for prompt in ANSWERED:
            request = _request(prompt, ANSWER_TOKENS)
            request["sampling_params"]["logprobs"] = 1
            status, answer = self.ask("POST", "/inference/v1/generate", request, timeout=120)
            assert status == 200, answer
            (choice,) = answer["choices"]
            logprob = sum(one["logprob"] for one in choice["logprobs"]["content"])
            answers.append((tuple(choice["token_ids"]), logprob))
        return answers

    def stream(self, prompt, tokens):
        """Begin a request that answers token by token."""
        return Stream(self.port, _request(prompt, tokens, stream=True))


class Stream:
    """A request on its way: when each token came, and how it ended."""

    def __init__(self, port, request):
        self.tokens, self.times = [], []
        self.ended = ""
        """vLLM's reason; empty while it goes on."""
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(port, request), daemon=True)
        self._thread.start()

    def _run(self, port, request):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=150)
        try:
            connection.request(
                "POST", "/inference/v1/generate", json.dumps(request), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                text = line.decode().strip()
                if text.startswith("data: {"):
                    self._take(json.loads(text[len("data: ") :]))
        except Exception as error:
            self.error = error
        finally:
            connection.close()

    def _take(self, chunk):
        assert "choices" in chunk, chunk
        for choice in chunk["choices"]:
            for token in choice.get("token_ids") or ():
                self.tokens.append(token)
                self.times.append(time.monotonic())
            self.ended = choice.get("finish_reason") or self.ended

    def wait(self, seconds=150):
        """Wait for its end, which must come."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"a request hangs after {len(self.tokens)} tokens"
        assert self.error is None, self.error
        return self


class Client:
    """Asks again as soon as it is answered, until it is told to stop."""

    def __init__(self, server, prompt, tokens):
        self.streams = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(server, prompt, tokens), daemon=True)
        self._thread.start()

    def _run(self, server, prompt, tokens):
        while not self._stopping.is_set():
            self.streams.append(server.stream(prompt, tokens))
            self.streams[-1].wait()

    @property
    def tokens(self):
        """Of all its requests."""
        return [token for stream in self.streams for token in stream.tokens]

    @property
    def error(self):
        return next((stream.error for stream in self.streams if stream.error), None)

    def stop(self, seconds=150):
        """Let its request end, and return all that it made."""
        self._stopping.set()
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "a request hangs"
        assert self.error is None, self.error
        return self.streams


def wait_until_running(streams, count, seconds=60):
    """Wait until so many of them have got a token or two."""
    expiry = time.monotonic() + seconds
    while sum(len(stream.tokens) > 1 for stream in streams) < count:
        assert time.monotonic() < expiry, [(len(stream.tokens), stream.error) for stream in streams]
        time.sleep(0.01)


def _request(prompt, tokens, *, stream=False):
    sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    return {"token_ids": list(prompt), "sampling_params": sampling, "stream": stream}


@contextmanager
def started(folder, logs, sizes, **options):
    """Servers of a dummy model, one for each number of tensor parallel ranks, started side by side."""
    servers = []
    try:
        servers += [Server(folder, logs / f"server{i}.log", tp=tp, **options) for i, tp in enumerate(sizes)]
        yield [server.wait() for server in servers]
    finally:
        for server in servers:
            server.stop()


def members_of(group):
    """The processes of a group."""
    return {pid for pid in _processes() if _group(pid) == group}


def _processes():
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _group(pid):
    try:
        return os.getpgid(pid)
    except OSError:
        return None
