"""A transformers model that runs on the block pool: loaded, prepared and checked, unchanged in its code.

    checkpoint.py       loads configuration and weights from a folder or the Hub
    model_source.py     finds the folder, or the model on the Hub
    sharding.py         the division of a model over ranks
    preparing.py        makes a loaded model run on the pool: one of the three below, checked
                            PagedModel with latents     models with multi-head latent attention
                            PagedModel                  models that call the registered attention function
                            CachedModel                 models that keep their own attention
    pinned_rope.py      makes ropes depend on positions alone
    probe.py            learns each layer's attention from one forward
    packed_linear.py    packs weights for a CPU
    fingerprint.py      the identity of a block's content
    modes.py            how each part of a step runs, and why it is not faster
    self_check.py       compares logits over the pool with those of the model's own attention
    paged_model.py      a model with the worker's attention: one step's forward
    base_model.py       the part of a model below its output layer
    past_positions.py   positions for models that take them from their cache
    hidden_states.py    the base model's output, kept for log-probabilities of a prompt
    cache_layout.py     the keys, values and states that a model puts into its own cache
    cached_model.py     a model with its own attention, over a cache that is the pool

    A deterministic model; on a GPU it is a PagedModel in kernels with fixed tiles, and needs the last file alone:
    tiles.py            a step's tokens in forwards of one size
    tiled_model.py      a PagedModel in tiles
    tiled_cached.py     a CachedModel in tiles
    tiled_experts.py    experts on whole tiles
    thread_splits.py    how many threads divide a tile evenly
    row_check.py        checks that a token's bits do not depend on its step

    adapter_check.py    both checks of an adapter in the layers

A model that fails a check is refused with UnsupportedModel.
"""
