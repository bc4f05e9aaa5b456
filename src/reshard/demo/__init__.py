"""The demo: two worlds of real processes, a real model, and the refit between them, with proof and timings.

    architecture.py   what a checkpoint's config says about the model, and which models the demo knows
    checkpoint.py     a folder of weights: the packaged model made into one, or the user's own
    worlds.py         the two layouts as the user writes them: "fsdp2 tp2" and "tp2 dp2"
    trainer.py        a source rank's model: transformers, FSDP2 over TP
    engine.py         a destination rank's model: fused buffers, tensor parallel, greedy decoding
    usual_way.py      gather and broadcast, written by hand on gloo: what the refit is compared with
    launch.py         start the processes, watch them, end them
    run.py            the story: what a rank of each world does, in order
    outcome.py        what came out, and how it is told

Torch is loaded by the modules that move bytes; the layouts and the outcome are plain values.
"""
