"""The public calls for attention: `MeshAttention`, `attention` and `merge`."""
