"""A live engine: its model is traced and checked beside the weights that serve, and answers as before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.vllm.tiny import LLAMA, MOE, QWEN3, checkpoint, write_config

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]

CASES = [
    ("qwen3", QWEN3, {"num_key_value_heads": 1}),
    ("tied", QWEN3, {"tie_word_embeddings": True}),
    ("biases", LLAMA, {"attention_bias": True, "num_attention_heads": 2, "num_key_value_heads": 1}),
    ("moe", MOE, {}),
]


@pytest.fixture
def engine(monkeypatch):
    """Start an engine inside this process; it is shut down at the end."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    started = []

    def start(folder):
        import torch

        from vllm import LLM

        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()  # a process has to ask for the tile registers, and nothing else did
        llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=64,
            dtype="bfloat16",
            max_num_seqs=2,
            seed=1,
        )
        started.append(llm)
        return llm

    yield start
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    for llm in started:
        llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def answer(llm):
    """Tokens and logprobs of two prompts, one at a time."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=1, detokenize=False, ignore_eos=True)
    llm.reset_prefix_cache()
    outputs = [llm.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)[0] for prompt in ([1, 5, 9], [7] * 5)]
    return [(tuple(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob) for o in outputs]


@pytest.mark.parametrize(("config", "changes"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_live_model_is_traced_and_checked_and_then_answers_as_before(config, changes, tmp_path, engine):
    from reshard.integrations.vllm import check_model, trace_model

    config = write_config(tmp_path, config, **changes)
    llm = engine(tmp_path)
    before = answer(llm)
    (model,) = llm.apply_model(lambda model: model)
    was = {name: (t.data_ptr(), tuple(t.shape)) for name, t in model.named_parameters(remove_duplicate=False)}

    specs = checkpoint(config)
    trace = trace_model(model, specs)
    assert trace.opaque == trace.unused == trace.hidden == ()
    assert check_model(trace, model) > 0

    assert {n: (t.data_ptr(), tuple(t.shape)) for n, t in model.named_parameters(remove_duplicate=False)} == was
    assert answer(llm) == before
    assert trace_model(model, specs) == trace  # again, and with the same result

    if changes.get("tie_word_embeddings"):  # a trainer's module has the head under a name of its own
        head = next(replace(spec, name="lm_head.weight") for spec in specs if spec.name.endswith("embed_tokens.weight"))
        with_head = trace_model(model, (*specs, head))
        assert [one.name for one in with_head.unused] == ["lm_head.weight"], "the embedding would travel twice"
