"""The pool's parameters of attention layers, for tests without a model."""

from __future__ import annotations

from quire.worker.memory.layer_spec import Causal, LayerSpec


def causal_layer(
    layer_idx: int, *, num_kv_heads: int, k_head_dim: int, v_head_dim: int, num_query_heads: int | None = None
) -> LayerSpec:
    """A plain causal layer; as many query heads as KV heads unless said otherwise."""
    return LayerSpec(
        layer_idx=layer_idx,
        num_query_heads=num_query_heads or num_kv_heads,
        num_kv_heads=num_kv_heads,
        k_head_dim=k_head_dim,
        v_head_dim=v_head_dim,
        mask=Causal(),
        scaling=1.0,
        softcap=None,
        has_sinks=False,
    )


# Layers differ from one another, and layer indices have gaps.
UNEVEN_LAYERS = {
    0: causal_layer(0, num_kv_heads=2, k_head_dim=8, v_head_dim=8),
    3: causal_layer(3, num_kv_heads=1, k_head_dim=6, v_head_dim=4),
}
