"""The one attention function that transformers calls for each layer of a step, over the block pool.

    torch_attention.py      the function, and the attention of a step in torch operations, for any device
    row_attention.py        the same for a deterministic model, each token by itself
    triton_attention.py     the attention of a step in Triton's kernels
    flashinfer_attention.py the same with FlashInfer for prompts
    latent_attention.py     multi-head latent attention, on the latents themselves

A step's attention is set for the forward in a context: attention_step().
"""
